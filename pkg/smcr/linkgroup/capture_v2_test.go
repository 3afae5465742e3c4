// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// capturedV2 is a message of a conversation of version 2: a SEND over the link
// with this number or, with number 0, an Accept or Confirm.
type capturedV2 struct {
	fromServer bool
	link       llc.LinkID
	raw        []byte
}

func capturesV2(t testing.TB, name string) []capturedV2 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "captures", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	var script []capturedV2
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		words := strings.Fields(s.Text())
		if len(words) != 3 || words[0] == "#" {
			continue
		}
		m := capturedV2{fromServer: words[0] == "server"}
		if n, err := strconv.ParseUint(words[1], 10, 8); err == nil {
			m.link = llc.LinkID(n)
		}
		if m.raw, err = hex.DecodeString(words[2]); err != nil {
			t.Fatal(err)
		}
		script = append(script, m)
	}
	if len(script) == 0 {
		t.Fatalf("%s: no messages", name)
	}
	return script
}

// actor is a group that stands in for one side of a captured conversation of
// version 2.
type actor struct {
	*rig
	server bool
	script []capturedV2
	gids   []rdma.GID           // of our RNICs
	keys   [][]linkgroup.RToken // of our RMBs, by RNIC
	peer   clc.Endpoint         // the peer's last Accept or Confirm
	opened *actorConn           // whose Accept or Confirm is still to come
	conns  []*actorConn
	places map[llc.LinkID]linkgroup.LinkIndex // of all links so far
}

// actorConn is a connection and how far its streams are.
type actorConn struct {
	*linkgroup.Conn
	ours, theirs cdc.AlertToken // in the capture
	pos, got     uint64
}

const capturedRMBE = 64 << 10

// newActor reads what our side has from the messages that it sends.
func newActor(t *testing.T, script []capturedV2, server bool) *actor {
	a := &actor{
		rig: newRig(t, linkgroup.Client, false, true), server: server, script: script,
		places: map[llc.LinkID]linkgroup.LinkIndex{},
	}
	a.release, a.offers = true, []linkgroup.Endpoint{}
	for _, m := range script {
		if m.fromServer != server || m.link == 0 {
			continue
		}
		switch p, _ := llc.Parse(llc.DialectLinux, 2, m.raw); p := p.(type) {
		case llc.ConfirmLink:
			if m.link == 1 {
				a.gids = append(a.gids, p.GID)
			}
		case llc.AddLink:
			if p.Reject {
				continue
			}
			e := linkgroup.Endpoint{QPN: p.QPN, GID: p.GID, MAC: p.MAC, PSN: p.PSN, MTU: p.MTU, RNIC: 1}
			if p.GID == a.gids[0] {
				e.RNIC = 0
			} else if len(a.gids) == 1 {
				a.gids = append(a.gids, p.GID)
			}
			a.offers = append(a.offers, e)
			if len(a.keys) == 0 && len(p.Ext.Pairs) > 0 {
				a.keys = append(a.keys, []linkgroup.RToken{
					{RKey: p.Ext.Pairs[0].Reference, VAddr: p.Ext.Pairs[0].New.VAddr}, linkgroup.RToken(p.Ext.Pairs[0].New),
				})
			}
		case llc.ConfirmRKey:
			if p.Response {
				continue
			}
			keys := []linkgroup.RToken{linkgroup.RToken(p.This), linkgroup.RToken(p.This)}
			if p.Others > 0 { // link 1 is over RNIC 0, link 2 over RNIC 1
				keys[p.Other[0].Link-1] = linkgroup.RToken(p.Other[0].RToken)
			}
			a.keys = append(a.keys, keys)
		}
	}
	return a
}

// rnic is the number of our RNIC with a GID.
func (a *actor) rnic(g rdma.GID) uint8 {
	if len(a.gids) > 1 && a.gids[1] == g {
		return 1
	}
	return 0
}

func halfOf(e clc.Endpoint) linkgroup.Endpoint {
	return linkgroup.Endpoint{QPN: e.QPN, GID: e.GID, MAC: e.MAC, PSN: e.PSN, MTU: e.MTU}
}

func rmbeOf(e clc.Endpoint) linkgroup.RMBE {
	return linkgroup.RMBE{
		Index: e.RMBEIndex, Size: uint32(e.RMBESize.Bytes()), RToken: linkgroup.RToken{RKey: e.RKey, VAddr: e.RMBAddr}, Token: cdc.AlertToken(e.AlertToken),
	}
}

// begin makes the group and its first connection from a first contact.
func (a *actor) begin(ours clc.Endpoint) {
	cfg := linkgroup.Config{
		Version: 2, Release: 1, MaxLinks: a.peer.Ext.MaxLinks, MaxConns: a.peer.Ext.MaxConns,
		UserID: 1, Rand: rand.New(rand.NewPCG(1, 2)),
	}
	if a.server {
		cfg.Role = linkgroup.Server
	}
	a.g = linkgroup.New(cfg)
	a.g.AddFirstLink(halfOf(ours))
	if len(a.keys) == 0 || a.keys[0][0].RKey != ours.RKey {
		t := linkgroup.RToken{RKey: ours.RKey, VAddr: ours.RMBAddr}
		a.keys = append([][]linkgroup.RToken{{t, t}}, a.keys...)
	}
	a.openConn()
	a.meet(ours)
	a.g.ConnectPeer(a.now, halfOf(a.peer))
}

// openConn opens a connection with the next of our captured RMBs, if a new one
// is needed.
func (a *actor) openConn() {
	c, err := a.g.OpenConn(capturedRMBE, 1<<17)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		if _, err = a.g.AddRMB(capturedRMBE, 1, a.keys[0]); err == nil {
			a.keys = a.keys[1:]
			c, err = a.g.OpenConn(capturedRMBE, 1<<17)
		}
	}
	if err != nil {
		a.t.Fatal(err)
	}
	a.opened = &actorConn{Conn: c}
	a.names[c] = "conn"
}

// meet ends the rendezvous of the connection that is being opened.
func (a *actor) meet(ours clc.Endpoint) {
	c := a.opened
	a.opened = nil
	c.ours, c.theirs = cdc.AlertToken(ours.AlertToken), cdc.AlertToken(a.peer.AlertToken)
	if !a.server && a.g.State() == linkgroup.Active {
		index, ok := a.g.FindLink(a.peer.QPN, a.peer.GID, a.peer.MAC)
		if !ok {
			a.t.Fatalf("the Accept names QP %v of %v, which is no link", a.peer.QPN, a.peer.GID)
		}
		c.UseLink(index)
	}
	if err := c.Activate(rmbeOf(a.peer)); err != nil {
		a.t.Fatal(err)
	}
	a.conns = append(a.conns, c)
}

// prepare opens the next connection and tells its RMB, at the latest before our
// Accept or Confirm.
func (a *actor) prepare() {
	if a.opened != nil || a.g.State() != linkgroup.Active {
		return
	}
	a.openConn()
	a.g.ConfirmRMB(a.opened.Local().RMB)
	a.poll()
	if a.g.IsConfirmed(a.opened.Local().RMB) {
		return
	}
	// Which link carries the exchange is ours to choose: the peer's answer is
	// made of what we sent.
	m, err := llc.ParseConfirmRKey(a.sent[len(a.sent)-1])
	if err != nil {
		a.t.Fatal(err)
	}
	m.Response = true
	a.recv(m)
	a.poll()
}

// play goes through the script.
func (a *actor) play() {
	a.t.Helper()
	var ours clc.Endpoint // the server's Accept
	for i, m := range a.script {
		if m.link == 0 {
			e := endpointIn(a.t, m.raw)
			switch {
			case m.fromServer != a.server:
				a.peer = e
				if a.server && a.g.State() == linkgroup.Active {
					a.meet(ours)
				} else if a.server {
					a.begin(ours)
				}
			case !a.server && e.FirstContact:
				a.begin(e)
			case !a.server:
				a.prepare()
				a.meet(e)
			default:
				if ours = e; !e.FirstContact {
					a.prepare()
				}
			}
		} else if m.fromServer == a.server {
			a.perform(m)
		} else if err := a.hear(m); err != nil {
			a.t.Fatalf("message %d, %s: %v\n%s", i, a.describe(m.raw), err, strings.Join(a.log, "\n"))
		}
		a.poll()
		if err := a.g.Check(); err != nil {
			a.t.Fatal(err)
		}
	}
}

func endpointIn(t testing.TB, b []byte) clc.Endpoint {
	t.Helper()
	if a, err := clc.ParseAccept(b); err == nil {
		return a.Endpoint
	}
	c, err := clc.ParseConfirm(b)
	if err != nil {
		t.Fatal(err)
	}
	return c.Endpoint
}

// index is the place of the link with a number, while there is such a link.
func (a *actor) index(id llc.LinkID) (linkgroup.LinkIndex, bool) {
	for _, l := range a.g.Links() {
		a.places[l.ID] = l.Index
		if l.ID == id {
			return l.Index, true
		}
	}
	return 0, id == 1 && a.g.State() == linkgroup.Forming // CONFIRM LINK says it
}

// position is where a stream is whose cursor has this value.
func position(c cdc.Cursor) uint64 { return uint64(c.Wrap)*capturedRMBE + uint64(c.Count) }

// perform does what our side did when it sent m.
func (a *actor) perform(m capturedV2) {
	if d, err := cdc.Parse(m.raw); err == nil {
		for _, c := range a.conns {
			if c.theirs == d.Token && !d.Flags.FailoverValidation() {
				a.performData(c, d)
			}
		}
		return
	}
	p, err := llc.Parse(llc.DialectLinux, 2, m.raw)
	if err != nil {
		a.t.Fatal(err)
	}
	switch p := p.(type) {
	case llc.ConfirmRKey:
		if !p.Response {
			a.prepare()
		}
	case llc.RequestAddLink:
		a.g.HandlePort(a.now, a.rnic(p.GIDs[len(p.GIDs)-1]), true)
	case llc.AddLink:
		if a.server && len(a.offers) > 0 && a.offers[0].QPN == p.QPN && a.offers[0].PSN == p.PSN { // not offered of itself
			a.g.HandlePort(a.now, a.rnic(p.GID), true)
		}
	case llc.DeleteLink:
		index, ok := a.index(p.Link)
		if !ok || p.Response || p.Reason != llc.DeleteLostPath {
			return
		}
		if strings.HasPrefix(a.linkState(index), "FORMING") {
			a.advance(linkgroup.ExchangeTimeout) // nothing came over it
			return
		}
		a.g.HandleLinkFailure(a.now, index, errors.New("as captured"))
	}
}

func (a *actor) performData(c *actorConn, m cdc.Message) {
	if p := position(m.Prod); p > c.pos {
		if m.Flags.UrgentPresent() && !c.Urgent(p) {
			a.t.Fatalf("the byte before %d is urgent too late", p)
		}
		c.pos = p
		c.Produce(p)
	}
	if p := position(m.Cons); p > c.got {
		c.got = p
		c.Consume(p)
	}
	switch {
	case m.Flags.Abort(), m.Flags.Closed():
		c.Close(a.now)
	case m.Flags.SendingDone():
		c.Shutdown()
	}
}

// hear gives us what the peer sent.
func (a *actor) hear(m capturedV2) error {
	b := bytes.Clone(m.raw)
	if d, err := cdc.Parse(b); err == nil {
		for _, c := range a.conns {
			if c.ours == d.Token {
				d.Token = c.Token()
			}
		}
		b = d.Append(b[:0])
	}
	index, ok := a.index(m.link)
	if place, was := a.places[m.link]; !ok && was && b[0] == cdc.Type {
		// Linux hears, and so speaks, on a queue pair that it deletes: what it has
		// acknowledged counts, also a moment after DELETE LINK.
		index, ok = place, true
	}
	if !ok {
		a.t.Fatalf("the peer sends %s over link %d, which is down", a.describe(b), m.link)
	}
	return a.g.HandleRecv(a.now, index, b)
}

// comparable makes captured and own messages alike where they may differ.
func comparable(t testing.TB, b []byte) string {
	b = bytes.Clone(b)
	m, err := llc.Parse(llc.DialectLinux, 2, b)
	if err != nil {
		t.Fatal(err)
	}
	switch m := m.(type) {
	case llc.ConfirmLink:
		copy(b[30:34], []byte{0, 0, 0, 0}) // link user ID
	case llc.AddLink:
		if m.Reject {
			return string(b)
		}
		// Linux registers an RMB with each link, we do with each RNIC; and it
		// forgets an RMB that no connection uses.
		m.Ext.Pairs = nil
		b = m.Append(b[:0])
	case llc.DeleteLink:
		copy(b[5:9], []byte{0, 0, 0, 0}) // Linux answers without a reason
	case llc.DeleteRKeyV2:
		clear(b[8:]) // and without keys
	}
	return string(b)
}

// checkAnswers looks for each answer that our side gave in the capture, and for
// each link that it set up, among what we sent.
func (a *actor) checkAnswers() {
	a.t.Helper()
	ours := map[string]int{}
	for _, b := range a.sent {
		if b[0] != cdc.Type {
			ours[comparable(a.t, b)]++
		}
	}
	for _, m := range a.script {
		if m.link == 0 || m.fromServer != a.server || m.raw[0] == cdc.Type {
			continue
		}
		p, err := llc.Parse(llc.DialectLinux, 2, m.raw)
		if err != nil {
			a.t.Fatal(err)
		}
		if q, ok := p.(llc.RequestAddLink); ok && !a.asked(q) {
			a.t.Errorf("no message like %v among\n%v", q, strings.Join(a.log, "\n"))
		}
		if t := p.Type(); !p.IsResponse() && t != llc.TypeConfirmLink && t != llc.TypeAddLink {
			continue
		}
		if d, ok := p.(llc.AddLink); ok && d.Reject && a.lateReject(d.Link) {
			continue
		}
		key := comparable(a.t, m.raw)
		if ours[key] == 0 {
			a.t.Errorf("no message like %s among\n%v", a.describe(m.raw), strings.Join(a.log, "\n"))
			return
		}
		ours[key]--
	}
}

// asked reports whether we have asked for a link with one of the GIDs in a
// captured request.
func (a *actor) asked(q llc.RequestAddLink) bool {
	return slices.ContainsFunc(a.sent, func(b []byte) bool {
		m, err := llc.ParseRequestAddLink(b)
		return err == nil && len(m.GIDs) == 1 && slices.Contains(q.GIDs, m.GIDs[0])
	})
}

// lateReject reports whether our side answered an ADD LINK twice: Linux rejects
// afterwards what it accepted when the link did not come about.
func (a *actor) lateReject(id llc.LinkID) bool {
	for _, m := range a.script {
		if p, err := llc.ParseAddLink(llc.DialectLinux, m.raw); err == nil && m.link != 0 && m.fromServer == a.server && p.Response && !p.Reject && p.Link == id {
			return true
		}
	}
	return false
}

// Conversations of two Linux kernels in version 2, with us in the place of
// either.
func TestGroup_replaysLinuxV2(t *testing.T) {
	type end struct {
		urgent  int // messages of ours with urgent data
		conns   int
		open    int // connections that the capture leaves open
		aborted int
		links   []llc.LinkID
		is      linkgroup.Redundancy
	}
	for name, want := range map[string]end{
		"01-first-contact-orderly-close":           {conns: 1, links: []llc.LinkID{1}},
		"02-subsequent-contact":                    {conns: 2, links: []llc.LinkID{1}},
		"07-oob-urgent":                            {conns: 2, urgent: 1, links: []llc.LinkID{1}},
		"08-flow-control-slow-reader":              {conns: 2, links: []llc.LinkID{1}},
		"10-abnormal-close-unread-data":            {conns: 2, aborted: 1, links: []llc.LinkID{1}},
		"14-test-link-keepalive":                   {conns: 1, links: []llc.LinkID{1}},
		"15-lgr-terminate-dev-removal-delete-link": {conns: 2, open: 1, links: []llc.LinkID{1}},
		"20-two-rxe-first-contact-add-link":        {conns: 2, links: []llc.LinkID{1, 2}, is: linkgroup.Symmetric},
		"21-failover-client-netdev-down":           {conns: 3, open: 1, links: []llc.LinkID{2}},
		"24-failover-link-cut-recover":             {conns: 1, links: []llc.LinkID{2, 4}, is: linkgroup.Symmetric},
		"25-failover-silent-drop-udp4791":          {conns: 1, links: []llc.LinkID{2}},
		"27-failover-client-netdev-down-hub":       {conns: 1, open: 1, links: []llc.LinkID{2}},
		"28-failover-client-link-cut-recover":      {conns: 1, links: []llc.LinkID{2, 4}, is: linkgroup.Symmetric},
	} {
		for _, server := range []bool{false, true} {
			side := "/client"
			if server {
				side = "/server"
			}
			t.Run(name+side, func(t *testing.T) {
				want := want
				if server {
					want.urgent = 0 // only clients have some
				}
				a := newActor(t, capturesV2(t, name), server)
				a.play()
				a.checkAnswers()
				got := end{conns: len(a.conns), is: a.g.Redundancy()}
				for _, l := range a.g.Links() {
					got.links = append(got.links, l.ID)
				}
				for _, b := range a.sent {
					if m, err := cdc.Parse(b); err == nil && m.Flags.UrgentPresent() {
						got.urgent++
					}
				}
				for _, c := range a.conns {
					d := c.Data()
					if d.State() != cdc.Closed {
						got.open++
					}
					if d.WasAborted() {
						got.aborted++
					}
					if d.Produced() != d.Completed() {
						t.Errorf("connection %v: produced %d, completed %d", c.Token(), d.Produced(), d.Completed())
					}
				}
				if diff := cmp.Diff(want, got, cmp.AllowUnexported(end{})); diff != "" || a.g.State() != linkgroup.Active {
					t.Errorf("group is %v, %v\n%s\n%s", a.g.State(), a.g.Err(), diff, strings.Join(a.log, "\n"))
				}
				a.advance(time.Second)
			})
		}
	}
}

// spokenLate puts the last message that the peer sent for a connection over a link also
// behind its DELETE LINK for that link; false if there is none.
func spokenLate(script []capturedV2, server bool) ([]capturedV2, bool) {
	last := map[llc.LinkID]capturedV2{}
	for i, m := range script {
		if m.fromServer == server || m.link == 0 {
			continue
		}
		if m.raw[0] == cdc.Type {
			last[m.link] = m
			continue
		}
		p, _ := llc.Parse(llc.DialectLinux, 2, m.raw)
		if d, ok := p.(llc.DeleteLink); ok && !d.All && d.Link != m.link && last[d.Link].raw != nil {
			return slices.Insert(slices.Clone(script), i+1, last[d.Link]), true
		}
	}
	return nil, false
}

// Linux speaks and hears on a queue pair that it deletes: a message behind DELETE LINK
// was acknowledged, so it counts, and the link is not given up for it.
func TestGroup_hearsOnDeletedLink(t *testing.T) {
	heard := 0
	for _, name := range []string{"21-failover-client-netdev-down", "24-failover-link-cut-recover", "25-failover-silent-drop-udp4791", "28-failover-client-link-cut-recover"} {
		for _, server := range []bool{false, true} {
			script, ok := spokenLate(capturesV2(t, name), server)
			if !ok {
				continue
			}
			heard++
			a := newActor(t, script, server)
			a.play()
			a.checkAnswers()
			if a.g.State() != linkgroup.Active {
				t.Errorf("%s, server %t: group is %v, %v", name, server, a.g.State(), a.g.Err())
			}
		}
	}
	if heard < 2 {
		t.Errorf("%d captures have such a message", heard)
	}
}
