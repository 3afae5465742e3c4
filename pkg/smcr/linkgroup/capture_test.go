// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// stage is a group that stands in for one side of a captured conversation.
type stage struct {
	*rig
	server   bool
	pos, got uint64 // of the connection's streams
	ring     cdc.Ring
}

// newStage makes the group with the numbers that our side has in the script.
func newStage(t *testing.T, script []llcScript, server bool) *stage {
	r := newRig(t, linkgroup.Client, false, true)
	role := linkgroup.Client
	if server {
		role = linkgroup.Server
	}
	ours, theirs := ourEnd, peerEnd
	tokens := []linkgroup.RToken{{RKey: 0x77, VAddr: 0x7700}}
	for _, m := range script {
		e := &theirs
		if m.fromServer == server {
			e = &ours
		}
		parsed, err := llc.Parse(llc.DialectLinux, 1, m.raw)
		switch c := parsed.(type) {
		case llc.ConfirmLink:
			if c.Link == 1 {
				e.QPN, e.GID, e.MAC = c.QPN, c.GID, c.MAC
			}
		case llc.AddLink:
			if m.fromServer == server {
				r.offer = &linkgroup.Endpoint{QPN: c.QPN, GID: c.GID, MAC: c.MAC, PSN: c.PSN, MTU: c.MTU, RNIC: 1}
			}
		case llc.AddLinkContinuation:
			if p := c.Pairs[0]; m.fromServer == server {
				tokens = []linkgroup.RToken{{RKey: p.Reference, VAddr: p.New.VAddr}, linkgroup.RToken(p.New)}
			}
		default:
			_ = err // CDC
		}
	}
	r.g = linkgroup.New(linkgroup.Config{Role: role, UserID: 1, Rand: rand.New(rand.NewPCG(1, 2))})
	r.g.AddFirstLink(ours)
	r.spare = server
	s := &stage{rig: r, server: server, ring: cdc.Ring{Size: 64 << 10}}
	if _, err := r.g.AddRMB(s.ring.Size, 1, tokens); err != nil {
		t.Fatal(err)
	}
	c, err := r.g.OpenConn(s.ring.Size, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	r.conns["a"], r.names[c] = c, "a"
	peer := linkgroup.RMBE{Index: 1, Size: s.ring.Size, Token: 1}
	for _, m := range script {
		if d, err := cdc.Parse(m.raw); err == nil && m.fromServer == server {
			peer.Token = d.Token // what our side's messages carry
		}
		if d, err := llc.ParseDeleteRKey(m.raw); err == nil && m.fromServer != server && !d.Response {
			peer.RKey = d.RKeys[0] // what the peer takes back at the end
		}
	}
	if err := c.Activate(peer); err != nil {
		t.Fatal(err)
	}
	r.g.ConnectPeer(r.now, theirs)
	r.poll()
	return s
}

// perform does what our side did when it sent b.
func (s *stage) perform(b []byte) {
	c := s.conns["a"]
	if m, err := cdc.Parse(b); err == nil {
		if p, err := s.ring.Advance(s.pos, m.Prod); err == nil && p > s.pos {
			s.pos = p
			c.Produce(p)
		}
		if p, err := s.ring.Advance(s.got, m.Cons); err == nil && p > s.got {
			s.got = p
			c.Consume(p)
		}
		switch {
		case m.Flags.Abort(), m.Flags.Closed():
			c.Close(s.now)
		case m.Flags.SendingDone():
			c.Shutdown()
		}
		return
	}
	m, err := llc.Parse(llc.DialectLinux, 1, b)
	if err != nil {
		s.t.Fatal(err)
	}
	if d, ok := m.(llc.DeleteLink); ok && !d.Response && s.g.Role() == linkgroup.Client {
		s.g.Terminate(s.now, d.Reason)
	}
}

// hear gives us what the peer sent, with our own alert token in it.
func (s *stage) hear(b []byte) error {
	b = append([]byte(nil), b...)
	if m, err := cdc.Parse(b); err == nil {
		m.Token = s.conns["a"].Token()
		b = m.Append(b[:0])
	}
	link := linkgroup.LinkIndex(0)
	if m, err := llc.ParseConfirmLink(b); err == nil && m.Link == 2 {
		link = 1 // it goes over the link it is about
	}
	return s.g.HandleRecv(s.now, link, b)
}

// Conversations of two Linux kernels with us in the place of either: nothing
// of what the peer says is refused, each of its requests gets the answer that
// Linux gave, the streams end where they ended, and the connection is over.
func TestGroup_replaysLinux(t *testing.T) {
	for _, tt := range []struct {
		name    string
		setUp   bool // the capture has the first contact
		aborted bool
		dead    bool
	}{
		{"40-v1-first-contact-two-links", true, false, false},
		{"41-v1-subsequent-contact", false, false, false},
		{"43-v1-abnormal-close-unread-data", false, true, false},
		{"47-v1-client-smc-module-unload-delete-link-all", false, false, true},
	} {
		for _, server := range []bool{false, true} {
			name := tt.name + "/client"
			if server {
				name = tt.name + "/server"
			}
			t.Run(name, func(t *testing.T) {
				script := captures(t, tt.name)
				s := newStage(t, script, server)
				if !tt.setUp {
					s.finishSetUp()
				}
				for i, m := range script {
					if m.fromServer == server {
						s.perform(m.raw)
					} else if err := s.hear(m.raw); err != nil {
						t.Fatalf("message %d, %s: %v", i, s.describe(m.raw), err)
					}
					s.poll()
				}
				s.checkAnswers(script)
				if tt.setUp && s.g.Redundancy() != linkgroup.Symmetric {
					t.Errorf("group is %v", s.g.Redundancy())
				}
				c := s.conns["a"]
				if tt.dead {
					if s.g.State() != linkgroup.Dead || server != errors.Is(s.g.Err(), linkgroup.ErrPeerDeleted) {
						t.Errorf("group is %v, %v", s.g.State(), s.g.Err())
					}
					return
				}
				if d := c.Data(); d.State() != cdc.Closed || !d.PeerReleased() || d.WasAborted() != tt.aborted || d.Produced() != d.Completed() {
					t.Errorf("connection is %v, aborted %t, produced %d, completed %d", d.State(), d.WasAborted(), d.Produced(), d.Completed())
				}
				if s.g.State() != linkgroup.Active {
					t.Errorf("group is %v", s.g.State())
				}
				c.Release(s.now)
				s.advance(time.Second)
			})
		}
	}
}

// finishSetUp lets the peer of a capture without first contact confirm the
// link.
func (s *stage) finishSetUp() {
	confirm := llc.ConfirmLink{MAC: peerEnd.MAC, GID: peerEnd.GID, QPN: peerEnd.QPN, Link: 1, MaxLinks: 2, Flags: llc.NoRMBEEyecatcher}
	add := llc.AddLink{Dialect: llc.DialectLinux, Link: 2, MTU: rdma.MTU1024}
	if s.server {
		confirm.Response, add.Response, add.Reject = true, true, true
	}
	s.recv(confirm)
	s.poll()
	s.recv(add)
	s.poll()
}

// checkAnswers compares our answers with those of the kernel whose place we
// took, and what we ask to set up links.
func (s *stage) checkAnswers(script []llcScript) {
	s.t.Helper()
	ours := map[string]bool{}
	for _, b := range s.sent {
		ours[string(b[:])] = true
	}
	n := 0
	for _, m := range script {
		if m.fromServer != s.server || m.raw[0] == cdc.Type {
			continue
		}
		want := append([]byte(nil), m.raw...)
		switch kind := llc.Type(want[0]); {
		case kind == llc.TypeConfirmLink:
			copy(want[30:], []byte{want[29] - 1, 0, 0, 1, 2}) // user ID and number of links: ours
		case kind == llc.TypeAddLink, kind == llc.TypeAddLinkContinuation:
		case m.raw[3]&0x80 == 0:
			continue
		}
		if !ours[string(want)] {
			s.t.Errorf("no message like %s among\n%v", s.describe(want), strings.Join(s.log, "\n"))
		}
		n++
	}
	if n == 0 && s.g.State() != linkgroup.Dead {
		s.t.Error("the script asked nothing")
	}
}
