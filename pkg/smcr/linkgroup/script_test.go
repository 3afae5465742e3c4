// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// The endpoints of all scripts. The peer is what the scripts write.
var (
	ourEnd   = linkgroup.Endpoint{QPN: 0x11, GID: rdma.GID{15: 1}, MAC: rdma.MAC{5: 1}, PSN: 100, MTU: rdma.MTU1024}
	ourSpare = linkgroup.Endpoint{QPN: 0x12, GID: rdma.GID{15: 1}, MAC: rdma.MAC{5: 1}, PSN: 200, MTU: rdma.MTU1024}
	peerEnd  = linkgroup.Endpoint{QPN: 0x21, GID: rdma.GID{15: 2}, MAC: rdma.MAC{5: 2}, PSN: 300, MTU: rdma.MTU4096}
)

const (
	ourRKey    = 0x1000
	peerRKey   = 0x2000
	rmbeSize   = 16 << 10
	sendBuffer = 32 << 10
)

// rig drives one group: time is the script's, the queue pair delivers at once
// unless held.
type rig struct {
	t         testing.TB
	g         *linkgroup.Group
	now       time.Time
	conns     map[string]*linkgroup.Conn
	names     map[*linkgroup.Conn]string
	produced  map[string]uint64
	consumed  map[string]uint64
	peerSeq   map[string]uint16
	nextRMB   int
	elements  int
	held      bool
	late      bool // our answer to EventWantLink
	unoffered []linkgroup.Output
	spare     bool  // a server with one RNIC has a queue pair to offer at first contact
	rnics     uint8 // how many we have; those of the set down do not count
	down      uint8
	offer     *linkgroup.Endpoint  // for a further link, whatever the rest says
	offers    []linkgroup.Endpoint // the same, one after the other
	two       bool                 // form leaves the second link to second
	peerMax   uint8                // links that the peer allows
	qps       uint32               // made for further links
	answers   bool                 // the peer answers TEST LINK, which is not logged then
	waiting   []sentID             // SENDs not completed
	most      int                  // SENDs in flight at once
	log       []string
	sent      [][]byte
	peers     []linkgroup.Endpoint // that queue pairs were connected to
	wanted    []linkgroup.Endpoint // what was known of the peer's half
	release   bool                 // connections are released when they are done
	crossed   bool                 // see cross

	cfg        linkgroup.Config
	encodeEach int // the group moves after each step, each nth time encoded; 0: it does not
	moves      int
	acting     bool // outputs are carried out
}

// sentID is a SEND under way.
type sentID struct {
	link linkgroup.LinkIndex
	id   uint64
}

func newRig(t testing.TB, role linkgroup.Role, rfc, spare bool) *rig {
	return newRigOf(t, 1, linkgroup.Config{Role: role, AllowRFC: rfc}, spare)
}

// newRigOf makes a rig with several RNICs.
func newRigOf(t testing.TB, rnics uint8, cfg linkgroup.Config, spare bool) *rig {
	cfg.UserID, cfg.Rand = 7, rand.New(rand.NewPCG(1, 2))
	r := &rig{
		t: t, now: time.Unix(1000, 0), elements: 2, rnics: rnics, spare: spare && cfg.Role == linkgroup.Server,
		conns: map[string]*linkgroup.Conn{}, names: map[*linkgroup.Conn]string{},
		produced: map[string]uint64{}, consumed: map[string]uint64{}, peerSeq: map[string]uint16{},
	}
	r.cfg = cfg
	r.g = linkgroup.New(cfg)
	r.g.AddFirstLink(ourEnd)
	return r
}

// cross tells the group of subnets: each of the peer's RNICs has one, and our RNICs 0 and 1 are in those of the
// peer's RNICs 1 and 0.
func (r *rig) cross() {
	r.crossed = true
	r.g = linkgroup.New(r.cfg)
	r.g.AddFirstLink(r.inSubnet(ourEnd))
}

// inSubnet is an end of ours as the group is told of it.
func (r *rig) inSubnet(e linkgroup.Endpoint) linkgroup.Endpoint {
	if r.crossed {
		e.GID[14], e.SubnetBits = e.RNIC^1, 120
	}
	return e
}

// ourEndOn is our half of a further link: RNIC n has GID ::1, ::101 ...
func (r *rig) ourEndOn(rnic uint8) linkgroup.Endpoint {
	e := ourSpare
	e.QPN += rdma.QPN(r.qps)
	e.PSN += rdma.PSN(r.qps) * 100
	r.qps++
	e.GID[14], e.MAC[4], e.RNIC = rnic, rnic, rnic
	return r.inSubnet(e)
}

// wantLink answers the group's wish for another queue pair as the shell does:
// an RNIC that carries no link, or else one that does.
func (r *rig) wantLink(o linkgroup.Output) {
	if r.late {
		r.unoffered = append(r.unoffered, o)
		return
	}
	r.wanted = append(r.wanted, *o.Peer)
	if r.offers != nil {
		if len(r.offers) == 0 {
			r.g.NoLink(r.now, o.Link)
			return
		}
		e := r.offers[0]
		r.offers = r.offers[1:]
		r.g.OfferLink(r.now, o.Link, e)
		return
	}
	if r.offer != nil {
		r.g.OfferLink(r.now, o.Link, *r.offer)
		return
	}
	used := r.g.RNICsInUse() | r.down
	for _, set := range [...]uint8{used, r.down} {
		for n := range r.rnics {
			if set&(1<<n) == 0 && (r.rnics > 1 || (r.spare && r.g.State() == linkgroup.Forming)) {
				if !r.g.OfferLink(r.now, o.Link, r.ourEndOn(n)) {
					r.logf("link %d is not wanted", o.Link)
				}
				return
			}
		}
		if o.Fresh {
			break
		}
	}
	r.g.NoLink(r.now, o.Link)
}

// open opens a connection, with a new RMB if need be.
func (r *rig) open(name string) error {
	c, err := r.g.OpenConn(rmbeSize, sendBuffer)
	if errors.Is(err, linkgroup.ErrNeedRMB) {
		r.nextRMB++
		token := linkgroup.RToken{RKey: rdma.RKey(ourRKey + r.nextRMB), VAddr: uint64(r.nextRMB) << 32}
		tokens := make([]linkgroup.RToken, r.rnics)
		for n := range tokens {
			tokens[n] = linkgroup.RToken{RKey: token.RKey + rdma.RKey(n)<<16, VAddr: token.VAddr + uint64(n)<<16}
		}
		if _, err := r.g.AddRMB(rmbeSize, r.elements, tokens); err != nil {
			return err
		}
		c, err = r.g.OpenConn(rmbeSize, sendBuffer)
	}
	if err != nil {
		return err
	}
	r.conns[name], r.names[c] = c, name
	r.produced[name], r.consumed[name], r.peerSeq[name] = 0, 0, 0
	return nil
}

// peerToken is the peer's RToken with a key: on its link n a key is higher by
// (n-1)<<16, and so is the address.
func peerToken(key rdma.RKey) linkgroup.RToken {
	return linkgroup.RToken{RKey: key, VAddr: 1<<40 + uint64(key&^0xffff)}
}

func (r *rig) activate(name string, key rdma.RKey, index uint8) error {
	return r.conns[name].Activate(linkgroup.RMBE{
		Index: index, Size: rmbeSize, Token: 0xabc,
		RToken: peerToken(key),
	})
}

// form brings a group to state Active with connection "a".
func (r *rig) form(dialect llc.Dialect) {
	r.t.Helper()
	r.connect()
	flags := llc.NoRMBEEyecatcher
	if dialect == llc.DialectRFC {
		flags = 0
	}
	h := llc.Header{Version: r.g.Version()}
	confirm := llc.ConfirmLink{Header: h, MAC: peerEnd.MAC, GID: peerEnd.GID, QPN: peerEnd.QPN, Link: 1, MaxLinks: 2, Flags: flags}
	add := llc.AddLink{Header: h, Dialect: dialect, Link: 2, MTU: rdma.MTU1024, GID: peerEnd.GID, MAC: peerEnd.MAC, QPN: 0x22}
	if r.g.Role() == linkgroup.Server {
		confirm.Response = true
		add.Response, add.Reject, add.Reason = true, true, llc.RejectNoAlternatePath
	}
	if r.peerMax != 0 {
		confirm.MaxLinks = r.peerMax
	}
	r.recv(confirm)
	r.poll()
	if r.two {
		return
	}
	r.recv(add)
	r.poll()
	if r.g.State() != linkgroup.Active {
		r.t.Fatalf("group is %v after the set-up:\n%s", r.g.State(), strings.Join(r.log, "\n"))
	}
	r.log = nil
}

func (r *rig) connect() {
	r.t.Helper()
	if err := r.open("a"); err != nil {
		r.t.Fatal(err)
	}
	if err := r.activate("a", peerRKey, 1); err != nil {
		r.t.Fatal(err)
	}
	r.g.ConnectPeer(r.now, peerEnd)
	r.poll()
}

// peerEndOn is the peer's half of a further link: its RNIC n has GID ::2,
// ::102 ...
func peerEndOn(rnic uint8) linkgroup.Endpoint {
	e := peerEnd
	e.QPN, e.MTU = 0x22, rdma.MTU1024
	e.GID[14], e.MAC[4] = rnic, rnic
	return e
}

// second adds a second link, which the peer's second RNIC carries unless it
// shares the first one.
func (r *rig) second(asymmetric bool) {
	r.t.Helper()
	p := peerEndOn(1)
	if asymmetric {
		p = peerEndOn(0)
	}
	flags := llc.NoRMBEEyecatcher
	if r.g.Dialect() == llc.DialectRFC {
		flags = 0
	}
	h := llc.Header{Version: r.g.Version(), Response: r.g.Role() == linkgroup.Server}
	pair := llc.RTokenPair{Reference: peerRKey, New: llc.RToken(peerToken(peerRKey + 1<<16))}
	r.recv(llc.AddLink{
		Header: h, Dialect: r.g.Dialect(), Link: 2, MTU: p.MTU, GID: p.GID, MAC: p.MAC, QPN: p.QPN,
		Ext: llc.AddLinkExt{Pairs: []llc.RTokenPair{pair}},
	})
	r.poll()
	if h.Version == llc.Version1 {
		r.recv(llc.AddLinkContinuation{Header: h, Link: 2, Remaining: 1, Pairs: [2]llc.RTokenPair{pair}})
		r.poll()
	}
	r.recvOn(1, llc.ConfirmLink{
		Header: h, MAC: p.MAC, GID: p.GID, QPN: p.QPN, Link: 2, MaxLinks: 2, Flags: flags,
	}.Append(nil))
	r.poll()
	if len(r.g.Links()) < 2 || r.g.State() != linkgroup.Active {
		r.t.Fatalf("group is %v with %d links:\n%s", r.g.State(), len(r.g.Links()), strings.Join(r.log, "\n"))
	}
	r.log = nil
}

// recv hands over a message of the peer.
func (r *rig) recv(m interface{ Append([]byte) []byte }) {
	r.recvRaw(m.Append(nil))
}

func (r *rig) recvRaw(b []byte) { r.recvOn(0, b) }

func (r *rig) recvOn(link linkgroup.LinkIndex, b []byte) {
	if err := r.g.HandleRecv(r.now, link, b); err != nil {
		r.logf("error: %v", err)
	}
	r.between()
}

func (r *rig) logf(format string, args ...any) { r.log = append(r.log, fmt.Sprintf(format, args...)) }

// between is called between any two things that happen to the group.
func (r *rig) between() {
	if r.encodeEach > 0 {
		r.move()
	}
}

// poll carries out what the group wants until it wants nothing.
func (r *rig) poll() {
	for range 1000 {
		r.between()
		if r.g.Idle() {
			for _, id := range r.g.TakeGoneRMBs() {
				r.logf("RMB %d is gone", id)
			}
			return
		}
		r.acting = true
		for _, o := range r.g.Poll(r.now, nil) {
			r.do(o)
		}
		r.acting = false
	}
	r.t.Fatal("the group does not come to rest")
}

func (r *rig) do(o linkgroup.Output) {
	logf := func(format string, args ...any) {
		if o.Link > 0 {
			format, args = "link %d: "+format, append([]any{o.Link}, args...)
		}
		r.logf(format, args...)
	}
	switch o.Kind {
	case linkgroup.OutReceive:
		r.peers = append(r.peers, *o.Peer)
		logf("RTR towards QP %v of %v, MTU %v", o.Peer.QPN, o.Peer.GID, o.Peer.MTU)
	case linkgroup.OutTransmit:
		logf("RTS")
	case linkgroup.OutWrite:
		logf("WRITE %s %v to 0x%x rkey 0x%x", r.names[o.Conn], o.Local, o.RemoteAddr, uint32(o.RKey))
	case linkgroup.OutSend:
		if m, err := llc.ParseTestLink(bytesOf(&o)); err == nil && r.answers && !m.Response {
			r.g.HandleSent(r.now, o.Link, o.ID)
			m.Response = true
			r.recvOn(o.Link, m.Append(nil))
			return
		}
		logf("SEND %s", r.describe(bytesOf(&o)))
		r.sent = append(r.sent, slices.Clone(bytesOf(&o)))
		r.waiting = append(r.waiting, sentID{o.Link, o.ID})
		r.most = max(r.most, len(r.waiting))
		if !r.held {
			r.complete(len(r.waiting))
		}
	case linkgroup.OutCloseLink:
		logf("close the link")
		r.waiting = slices.DeleteFunc(r.waiting, func(s sentID) bool { return s.link == o.Link })
	case linkgroup.OutEvent:
		if o.Event == linkgroup.EventWantLink {
			r.wantLink(o)
			return
		}
		s := "event: " + o.Event.String()
		switch o.Event {
		case linkgroup.EventLink:
			s += fmt.Sprintf(" %d %s", o.Link, r.linkState(o.Link))
		case linkgroup.EventConn:
			s += fmt.Sprintf(" %s %v", r.names[o.Conn], o.Events)
		case linkgroup.EventConnDone:
			s += " " + r.names[o.Conn]
			if r.release {
				o.Conn.Release(r.now)
			}
		case linkgroup.EventRMBConfirmed, linkgroup.EventRMBRefused:
			s += fmt.Sprintf(" %d", o.RMB)
		case linkgroup.EventPointOfNoReturn, linkgroup.EventReady, linkgroup.EventSetupFailed, linkgroup.EventDead, linkgroup.EventWantLink:
		}
		if o.Err != nil {
			s += ": " + o.Err.Error()
		}
		r.logf("%s", s)
	}
}

// linkState tells a link's state and number on the wire.
func (r *rig) linkState(index linkgroup.LinkIndex) string {
	for _, l := range r.g.Links() {
		if l.Index == index {
			s := fmt.Sprintf("%s number %d", l.State, l.ID)
			if l.Asymmetric {
				s += " asymmetric"
			}
			return s
		}
	}
	return "DOWN"
}

func (r *rig) describe(b []byte) string {
	if b[0] == cdc.Type {
		m, err := cdc.Parse(b)
		if err != nil {
			r.t.Fatal(err)
		}
		return m.String()
	}
	m, err := llc.Parse(r.g.Dialect(), r.g.Version(), b)
	if err != nil {
		r.t.Fatalf("we sent %x: %v", b, err)
	}
	return m.String()
}

// complete delivers the n oldest SENDs.
func (r *rig) complete(n int) {
	for range min(n, len(r.waiting)) {
		s := r.waiting[0]
		r.waiting = r.waiting[1:]
		r.g.HandleSent(r.now, s.link, s.id)
		r.between()
	}
}

// advance lets time pass, with every timer on the way.
func (r *rig) advance(d time.Duration) {
	end := r.now.Add(d)
	for range 1000 {
		next, ok := r.g.NextTimeout()
		if !ok || next.After(end) {
			r.now = end
			return
		}
		if next.After(r.now) {
			r.now = next
		}
		before := len(r.log)
		r.g.HandleTimeout(r.now)
		r.between()
		r.poll()
		if len(r.log) > before {
			r.log = slices.Insert(r.log, before, fmt.Sprintf("+%v", r.now.Sub(time.Unix(1000, 0))))
		}
	}
	r.t.Fatal("a timer does not go away")
}

func TestGroup_scripts(t *testing.T) { scripts(t, 0) }

// scripts runs all of them; see rig.encodeEach.
func scripts(t *testing.T, encodeEach int) {
	t.Helper()
	files := 0
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		files++
		var r *rig
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "group" {
				role := linkgroup.Client
				if d.HasArg("server") {
					role = linkgroup.Server
				}
				rnics, most := 1, 0
				d.MaybeScanArgs(t, "rnics", &rnics)
				d.MaybeScanArgs(t, "max-links", &most)
				cfg := linkgroup.Config{Role: role, AllowRFC: d.HasArg("rfc"), MaxLinks: uint8(most)}
				if d.HasArg("v2") {
					cfg.Version, cfg.Release = llc.Version2, 1
				}
				d.MaybeScanArgs(t, "release", &cfg.Release)
				d.MaybeScanArgs(t, "max-conns", &cfg.MaxConns)
				if d.HasArg("releases") {
					cfg.ReleaseTimeout = 3 * time.Second
				}
				r = newRigOf(t, uint8(rnics), cfg, !d.HasArg("no-spare"))
				if d.HasArg("crossed") {
					r.cross()
				}
				r.encodeEach = encodeEach
				d.MaybeScanArgs(t, "elements", &r.elements)
				d.MaybeScanArgs(t, "down", &r.down)
				r.answers = d.HasArg("answer")
				r.two = d.HasArg("two")
				r.peerMax = 2
				d.MaybeScanArgs(t, "peer-max", &r.peerMax)
				if d.HasArg("ready") || d.HasArg("two") {
					dialect := llc.DialectLinux
					if d.HasArg("rfc") {
						dialect = llc.DialectRFC
					}
					r.form(dialect)
				}
				if d.HasArg("two") {
					r.second(d.HasArg("asymmetric"))
				}
			} else if err := r.run(d); err != nil {
				r.logf("refused: %v", err)
			}
			r.poll()
			out := strings.Join(r.log, "\n")
			r.log = nil
			return out
		})
	})
	if files == 0 {
		t.Fatal("no scripts")
	}
}

// run runs one command of a script; see the files in testdata/scripts.
func (r *rig) run(d *datadriven.TestData) error {
	name := "a"
	if len(d.CmdArgs) > 0 && len(d.CmdArgs[0].Vals) == 0 {
		name = d.CmdArgs[0].Key
	}
	n := uint64(0)
	d.MaybeScanArgs(r.t, "n", &n)
	switch d.Cmd {
	case "connect":
		r.connect()
	case "recv":
		on := 0
		d.MaybeScanArgs(r.t, "on", &on)
		for _, line := range strings.Split(strings.TrimSpace(d.Input), "\n") {
			r.recvOn(linkgroup.LinkIndex(on), r.message(line))
			r.poll()
		}
	case "advance":
		dur, err := time.ParseDuration(name)
		if err != nil {
			return err
		}
		r.answers = r.answers || d.HasArg("answer")
		r.advance(dur)
	case "late": // answers to EventWantLink
		r.late = true
	case "offer":
		r.late = false
		for _, o := range r.unoffered {
			r.wantLink(o)
		}
		r.unoffered = nil
	case "hold":
		r.held = true
	case "complete":
		r.held = d.HasArg("held")
		if n == 0 {
			n = uint64(len(r.waiting))
		}
		r.complete(int(n))
	case "fail-link":
		r.g.HandleLinkFailure(r.now, linkgroup.LinkIndex(n), errors.New("retry counter exceeded"))
	case "port":
		if d.HasArg("down") {
			r.down |= 1 << n
		} else {
			r.down &^= 1 << n
		}
		r.g.HandlePort(r.now, uint8(n), !d.HasArg("down"))
	case "delete-link":
		r.g.DeleteLink(r.now, linkgroup.LinkIndex(n), llc.DeleteOperator)
	case "allow-links":
		r.g.AllowLinks()
	case "links":
		for _, l := range r.g.Links() {
			r.logf("%d: %s conns=%d, RNIC %d to %v", l.Index, r.linkState(l.Index), l.Conns, l.Local.RNIC, l.Peer.GID)
		}
		r.logf("%v", r.g.Redundancy())
	case "terminate":
		r.g.Terminate(r.now, llc.DeleteOperator)
	case "state":
		r.logf("%v %v conns=%d usable=%t discarded=%d err=%v", r.g.State(), r.g.Dialect(), r.g.Conns(), r.g.Usable(), r.g.Discarded, r.g.Err())
	default:
		return r.runConn(d, name, n)
	}
	return nil
}

// runConn runs a command for one connection.
func (r *rig) runConn(d *datadriven.TestData, name string, n uint64) error {
	c := r.conns[name]
	switch d.Cmd {
	case "open":
		if err := r.open(name); err != nil {
			return err
		}
		l := r.conns[name].Local()
		stale := ""
		if r.conns[name].Stale() {
			stale = " stale"
		}
		r.logf("RMB %d index %d rkey 0x%x confirmed=%t%s", l.RMB, l.Index, uint32(l.RKey), r.g.IsConfirmed(l.RMB), stale)
	case "confirm":
		r.g.ConfirmRMB(c.Local().RMB)
	case "activate":
		key, index := strconv.Itoa(peerRKey), uint8(1)
		d.MaybeScanArgs(r.t, "rkey", &key)
		d.MaybeScanArgs(r.t, "index", &index)
		k, err := strconv.ParseUint(key, 0, 32)
		if err != nil {
			return err
		}
		return r.activate(name, rdma.RKey(k), index)
	case "produce":
		r.produced[name] += n
		c.Produce(r.produced[name])
	case "consume":
		r.consumed[name] += n
		c.Consume(r.consumed[name])
	case "shutdown":
		c.Shutdown()
	case "close":
		c.Close(r.now)
	case "abort":
		c.Abort(r.now)
	case "abandon":
		c.Abandon(r.now, d.HasArg("declined"))
	case "release":
		c.Release(r.now)
	case "conn":
		s := c.Data()
		r.logf("%v produced=%d sent=%d completed=%d received=%d announced=%d window=%d",
			s.State(), s.Produced(), s.Sent(), s.Completed(), s.PeerProduced(), s.Announced(), s.Window())
	default:
		return fmt.Errorf("unknown command %q", d.Cmd)
	}
	return nil
}

// message builds a message of the peer from its description: a kind, then
// flags and fields.
func (r *rig) message(line string) []byte {
	words := strings.Fields(line)
	args := map[string]string{}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		args[k] = v
	}
	has := func(k string) bool { _, ok := args[k]; return ok }
	num := func(k string, def uint64) uint64 {
		if !has(k) {
			return def
		}
		v, err := strconv.ParseUint(args[k], 0, 64)
		if err != nil {
			r.t.Fatalf("%s: %v", line, err)
		}
		return v
	}
	h := llc.Header{Version: r.g.Version(), Response: has("resp")}
	if has("v1") { // in a group of version 2, or the reverse
		h.Version = llc.Version1
	} else if has("v2") {
		h.Version = llc.Version2
	}
	switch words[0] {
	case "confirm-link":
		m := llc.ConfirmLink{
			Header: h, MAC: peerEnd.MAC, GID: peerEnd.GID, QPN: rdma.QPN(num("qpn", uint64(peerEnd.QPN))),
			Link: llc.LinkID(num("link", 1)), Flags: llc.ConfirmLinkFlags(num("flags", 3)), MaxLinks: uint8(num("max", 2)), UserID: 9,
			MaxConns: uint8(num("conns", 0)),
		}
		m.GID[15] = byte(num("gid", 2))
		if has("rnic") {
			p := peerEndOn(uint8(num("rnic", 0)))
			m.QPN, m.GID, m.MAC = p.QPN, p.GID, p.MAC
		}
		return m.Append(nil)
	case "add-link":
		p := peerEndOn(uint8(num("rnic", 0)))
		return llc.AddLink{
			Header: h, Dialect: r.g.Dialect(), Reject: has("reject"), Reason: llc.RejectReason(num("reason", 0)),
			Link: llc.LinkID(num("link", 2)), MTU: rdma.MTU(num("mtu", 3)), QPN: p.QPN, GID: p.GID, MAC: p.MAC,
			Ext: llc.AddLinkExt{Direct: !has("routed"), TargetGID: p.GID, Pairs: pairsOf(args["keys"])}, // version 2
		}.Append(nil)
	case "sent-back": // our last message, as Linux answers what it does not expect
		b := slices.Clone(r.sent[len(r.sent)-1][:llc.Size])
		b[3] |= 0x80
		return b
	case "request-add-link": // of version 2
		m := llc.RequestAddLink{Header: h}
		if has("rnic") {
			m.GIDs = append(m.GIDs, peerEndOn(uint8(num("rnic", 0))).GID)
		}
		return m.Append(nil)
	case "add-link-cont": // the peer's RKey k is k+0x10000 on the new link
		m := llc.AddLinkContinuation{Header: h, Link: llc.LinkID(num("link", 2))}
		m.Remaining = uint8(copy(m.Pairs[:], pairsOf(args["keys"])))
		m.Remaining = uint8(num("remaining", uint64(m.Remaining)))
		return m.Append(nil)
	case "delete-link":
		return llc.DeleteLink{
			Header: h, All: has("all"), Orderly: has("orderly"), Link: llc.LinkID(num("link", 1)),
			Reason: llc.DeleteReason(num("reason", 0x30000)),
		}.Append(nil)
	case "confirm-rkey":
		m := llc.ConfirmRKey{
			Header: h, Negative: has("negative"), Retry: has("retry"),
			This: llc.RToken(peerToken(rdma.RKey(num("rkey", 0)))),
		}
		m.Others = uint8(copy(m.Other[:], otherTokens(args["others"], num("rkey", 0))))
		m.Others = uint8(num("total", uint64(m.Others)))
		return m.Append(nil)
	case "confirm-rkey-cont":
		m := llc.ConfirmRKeyContinuation{Header: h, Negative: has("negative")}
		m.Remaining = uint8(copy(m.Other[:], otherTokens(args["others"], num("rkey", 0))))
		m.Remaining = uint8(num("remaining", uint64(m.Remaining)))
		return m.Append(nil)
	case "delete-rkey":
		m := llc.DeleteRKey{Header: h, Negative: has("negative")}
		var keys []rdma.RKey
		for _, k := range strings.Split(args["keys"], ",") {
			v, err := strconv.ParseUint(k, 0, 32)
			if err != nil {
				r.t.Fatal(err)
			}
			keys = append(keys, rdma.RKey(v))
		}
		if h.Version == llc.Version2 {
			return llc.DeleteRKeyV2{Header: h, Negative: m.Negative, Invalid: uint8(num("invalid", 0)), RKeys: keys}.Append(nil)
		}
		m.Count = uint8(copy(m.RKeys[:], keys))
		return m.Append(nil)
	case "test-link":
		m := llc.TestLink{Header: h}
		if has("echo") { // what we sent last
			copy(m.UserData[:], r.sent[len(r.sent)-1][4:20])
		}
		return m.Append(nil)
	case "cdc":
		return r.cdcMessage(args, num).Append(nil)
	case "raw":
		b, err := hex.DecodeString(words[1])
		if err != nil {
			r.t.Fatal(err)
		}
		return append(b, make([]byte, max(0, llc.Size-len(b)))...)
	}
	r.t.Fatalf("unknown message %q", line)
	return nil
}

// pairsOf are the RTokens of the peer's RKeys on link 2.
func pairsOf(keys string) []llc.RTokenPair {
	var pairs []llc.RTokenPair
	for _, k := range strings.Split(keys, ",") {
		if v, err := strconv.ParseUint(k, 0, 32); err == nil {
			pairs = append(pairs, llc.RTokenPair{
				Reference: rdma.RKey(v), New: llc.RToken(peerToken(rdma.RKey(v + 1<<16))),
			})
		}
	}
	return pairs
}

// otherTokens are the RTokens of a key on the links with these numbers.
func otherTokens(ids string, key uint64) []llc.LinkRToken {
	var list []llc.LinkRToken
	for _, s := range strings.Split(ids, ",") {
		if id, err := strconv.ParseUint(s, 0, 8); err == nil {
			list = append(list, llc.LinkRToken{
				Link: llc.LinkID(id), RToken: llc.RToken(peerToken(rdma.RKey(key + (id-1)<<16))),
			})
		}
	}
	return list
}

// cdcMessage builds a CDC message for connection "to"; the sequence number
// goes up by itself.
func (r *rig) cdcMessage(args map[string]string, num func(string, uint64) uint64) cdc.Message {
	name := args["to"]
	if name == "" {
		name = "a"
	}
	c := r.conns[name]
	r.peerSeq[name]++
	m := cdc.Message{
		Seq: uint16(num("seq", uint64(r.peerSeq[name]))), Token: c.Token() ^ cdc.AlertToken(num("stale", 0)),
		Prod: c.Ring().Cursor(num("prod", 0)), Cons: c.Ring().Cursor(num("cons", 0)),
	}
	for _, f := range args["flags"] {
		m.Flags = map[rune]func() cdc.Flags{
			'B': m.Flags.WithWriterBlocked, 'R': m.Flags.WithCursorUpdateRequested, 'F': m.Flags.WithFailoverValidation,
			'D': m.Flags.WithSendingDone, 'C': m.Flags.WithClosed, 'A': m.Flags.WithAbort,
		}[f]()
	}
	return m
}
