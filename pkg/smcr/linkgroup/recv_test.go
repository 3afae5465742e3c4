// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// opened opens a connection in a group, over an RMB of one element.
func opened(t *testing.T, g *Group) *Conn {
	t.Helper()
	tokens := make([]RToken, MaxRNICs)
	if _, err := g.AddRMB(16<<10, 1, tokens); err != nil {
		t.Fatal(err)
	}
	c, err := g.OpenConn(16<<10, 1<<15)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// unknownType is a message of a type that nobody knows.
func unknownType(first byte) []byte {
	return append([]byte{first, llc.Size}, make([]byte, llc.Size-2)...)
}

// RFC 7609 A.3, C.7.1: a message that makes no sense ends the link on which it came; a group with another
// link goes on. Messages that their sender expects to be dropped are dropped: Linux expects that of every
// type that the receiver does not know.
func TestGroup_HandleRecv(t *testing.T) {
	asked := llc.TestLink{UserData: [16]byte{7}}
	answered := llc.TestLink{Header: llc.Header{Response: true}, UserData: [16]byte{7}}
	wrong := llc.TestLink{Header: llc.Header{Response: true}, UserData: [16]byte{8}}
	ask := func(g *Group, l *link) { l.testSent, l.testData = time.Unix(1, 0), answered.UserData }
	rfc := func(g *Group, _ *link) { g.dialect = llc.DialectRFC }
	for _, c := range []struct {
		name      string
		before    func(g *Group, l *link)
		msg       []byte
		want      error // of the group's own; nil: see lost
		lost      bool  // the link, with an error
		discarded uint64
		answers   int
	}{
		{name: "TEST LINK", msg: asked.Append(nil), answers: 1},
		{name: "its answer", before: ask, msg: answered.Append(nil)},
		{name: "a wrong answer", before: ask, msg: wrong.Append(nil), want: ErrTestLink, lost: true},
		{name: "an answer that nobody asked for", msg: answered.Append(nil), discarded: 1},
		{name: "no bytes", lost: true},
		{name: "a cut message", msg: asked.Append(nil)[:llc.Size-1], lost: true},
		{name: "unknown type, optional", msg: unknownType(0x8f), discarded: 1},
		{name: "unknown type", msg: unknownType(0x4f), discarded: 1},
		{name: "unknown type, optional, to RFC 7609", before: rfc, msg: unknownType(0x8f), discarded: 1},
		{name: "unknown type, to RFC 7609", before: rfc, msg: unknownType(0x4f), lost: true},
		{name: "not for this side", msg: llc.ConfirmLink{Header: llc.Header{Response: true}, Link: 2}.Append(nil), want: ErrProtocol, lost: true},
		{
			name: "of a link that is not confirmed", msg: asked.Append(nil), want: ErrProtocol, lost: true,
			before: func(g *Group, l *link) { l.state = linkForming },
		},
		{
			name: "of a link that is closed", msg: asked.Append(nil), discarded: 1,
			before: func(g *Group, l *link) { g.dropLink(l, nil) },
		},
		{
			name: "with as many answers waiting as may", msg: asked.Append(nil), want: ErrProtocol, lost: true,
			before: func(g *Group, l *link) { l.queue = make([]message, maxLLCQueue) },
		},
		{
			name: "with one less", msg: asked.Append(nil), answers: maxLLCQueue,
			before: func(g *Group, l *link) { l.queue = make([]message, maxLLCQueue-1) },
		},
		{name: "a link without its RTokens, in version 2", msg: llc.AddLink{Link: 3}.Append(nil), discarded: 1, before: func(g *Group, _ *link) {
			g.version = llc.Version2
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, other, l := pair(Client)
			if c.before != nil {
				c.before(g, l)
			}
			was, now := l.state, time.Unix(5, 0)
			err := g.HandleRecv(now, l.index, c.msg)
			switch {
			case (err != nil) != c.lost || c.want != nil && !errors.Is(err, c.want):
				t.Errorf("error %v", err)
			case c.lost != (l.state != was):
				t.Errorf("the link is %v, was %v", l.state, was)
			case g.State() != Active || !other.isUp():
				t.Errorf("group is %v", g.State())
			case g.Discarded != c.discarded || len(l.queue) != c.answers:
				t.Errorf("%d messages discarded, %d answers, want %d and %d", g.Discarded, len(l.queue), c.discarded, c.answers)
			case !c.lost && was != linkDown && !l.heard.Equal(now):
				t.Error("the link was not heard")
			}
		})
	}
}

// RFC 7609 C.7.1: of what comes late over a link that was closed, only the end of the group counts. It is answered over
// another link. Over a link that was never ACTIVE it may not be the peer that speaks.
func TestGroup_endsByLateMessage(t *testing.T) {
	all := llc.DeleteLink{All: true}
	answer := llc.DeleteLink{Header: llc.Header{Response: true}, All: true}
	closed := func(g *Group, l *link) { g.dropLink(l, nil) }
	for _, c := range []struct {
		name   string
		before func(g *Group, l *link)
		msg    []byte
		ends   bool
	}{
		{"DELETE LINK for the group", closed, all.Append(nil), true},
		{"an answer", closed, answer.Append(nil), false},
		{"DELETE LINK for one link", closed, llc.DeleteLink{Link: 1}.Append(nil), false},
		{"a cut message", closed, all.Append(nil)[:llc.Size-1], false},
		{"of version 2", closed, llc.DeleteLink{Header: llc.Header{Version: llc.Version2}, All: true}.Append(nil), false},
		{"the place is another link's", func(g *Group, l *link) {
			g.dropLink(l, nil)
			g.links.becomeWanted(l)
		}, all.Append(nil), false},
		{"the link was never ACTIVE", func(g *Group, l *link) {
			g.dropLink(l, nil)
			*l = link{index: l.index}
			g.links.becomeForming(l, Endpoint{RNIC: 1})
			g.closeLink(l)
		}, all.Append(nil), false},
	} {
		for _, role := range []Role{Client, Server} {
			g, other, l := pair(role)
			c.before(g, l)
			if err := g.HandleRecv(time.Unix(5, 0), l.index, c.msg); err != nil {
				t.Errorf("%s, %v: %v", c.name, role, err)
			}
			if ends := g.State() == Draining; ends != c.ends || len(other.queue) > 0 != ends || g.Discarded > 0 == ends {
				t.Errorf("%s, %v: group is %v, %d answers, %d messages discarded", c.name, role, g.State(), len(other.queue), g.Discarded)
			}
		}
	}
}

// RFC 7609 A.3.8: the answer to TEST LINK has the user data of the request.
func TestGroup_answersTestLink(t *testing.T) {
	g, l := formed(Server)
	m := llc.TestLink{Header: llc.Header{Version: llc.Version1}, UserData: [16]byte{1, 2, 3, 15: 16}}
	if err := g.HandleRecv(time.Unix(5, 0), l.index, m.Append(nil)); err != nil {
		t.Fatal(err)
	}
	m.Response = true
	if d := cmp.Diff([]llc.Message{m}, sentOn(t, l)); d != "" {
		t.Error(d)
	}
}

// A CDC message for a connection that does not exist does not end its link. A CDC message that came on a link
// which has closed since counts: the peer has had the acknowledgement, and will not send the message again.
func TestGroup_HandleRecvCDC(t *testing.T) {
	for _, c := range []struct {
		name      string
		cut       int
		edit      func(*Conn, *link, *cdc.Message)
		discarded uint64
		received  uint64
		fails     bool
	}{
		{name: "one that concerns a connection", received: 1},
		{name: "of a closed link", received: 1, edit: func(c *Conn, l *link, _ *cdc.Message) { c.g.dropLink(l, nil) }},
		{name: "a cut one", cut: 1, discarded: 1, fails: true},
		{name: "of a token that nobody has", discarded: 1, edit: func(_ *Conn, _ *link, m *cdc.Message) { m.Token += 256 }},
		{name: "of a connection that is done", discarded: 1, edit: func(c *Conn, _ *link, _ *cdc.Message) { c.finish() }},
		{name: "an impossible one", received: 1, fails: true, edit: func(_ *Conn, _ *link, m *cdc.Message) { m.Prod.Count = 1 << 30 }},
		{name: "of a closed link, while the group ends", discarded: 1, edit: func(c *Conn, l *link, _ *cdc.Message) {
			c.g.dropLink(l, nil)
			c.g.state = Draining
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, _, l := pair(Client)
			conn := opened(t, g)
			conn.data.Activate(g.ring(16<<10), 5)
			m := cdc.Message{Seq: 1, Token: conn.Token()}
			if c.edit != nil {
				c.edit(conn, l, &m)
			}
			was := l.state
			b := m.Append(nil)
			err := g.HandleRecv(time.Unix(1, 0), l.index, b[:len(b)-c.cut])
			if (err != nil) != c.fails || l.state != was || g.Discarded != c.discarded || conn.messagesRecv != c.received {
				t.Errorf("error %v, link is %v, %d discarded, %d received", err, l.state, g.Discarded, conn.messagesRecv)
			}
		})
	}
}

// §3.5.1.6: data may come before the set-up is complete only if the peer is the one to end the set-up. Then
// the data ends the set-up; otherwise the set-up fails.
func TestGroup_dataDuringFirstContact(t *testing.T) {
	for _, c := range []struct {
		name     string
		role     Role
		dialect  llc.Dialect
		step     setupStep
		adding   addStep
		ends     bool
		noReturn bool // EventPointOfNoReturn comes first
	}{
		{"client waits for its Accept", Client, llc.DialectLinux, waitPeer, addNone, false, false},
		{"client waits for CONFIRM LINK", Client, llc.DialectLinux, waitConfirmLink, addNone, false, false},
		{"client waits for ADD LINK", Client, llc.DialectLinux, waitAddLink, addNone, true, true},
		{"client agrees on no second link", Client, llc.DialectLinux, waitDeleteReply, addNone, true, false},
		{"client adds the second link", Client, llc.DialectRFC, waitSecondLink, addWaitConfirm, true, false},
		{"server waits for CONFIRM LINK", Server, llc.DialectLinux, waitConfirmLinkReply, addNone, false, false},
		{"server adds the second link", Server, llc.DialectRFC, waitSecondLink, addWaitReply, false, false},
		{"server adds the second link to Linux", Server, llc.DialectLinux, waitSecondLink, addWaitReply, true, false},
		{"server waits for the second CONFIRM LINK", Server, llc.DialectRFC, waitSecondLink, addWaitConfirm, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := New(Config{Role: c.role, Rand: rand.New(rand.NewPCG(1, 2))})
			g.AddFirstLink(Endpoint{})
			conn := opened(t, g)
			conn.peerSize, conn.peerTok = 16<<10, 5
			g.dialect = c.dialect
			start := g.ring(conn.peerSize).Start()
			g.setup.step, g.adding = c.step, adding{step: c.adding, link: 1}
			err := g.HandleRecv(time.Unix(1, 0), 0, cdc.Message{Seq: 1, Token: conn.Token(), Prod: start, Cons: start}.Append(nil))
			if !c.ends {
				var failed *SetupError
				last := g.out.list[len(g.out.list)-1]
				if !errors.Is(err, ErrProtocol) || g.State() != Dead || !errors.As(last.Err, &failed) || failed.Fault != FaultProtocol {
					t.Errorf("error %v, group is %v, last %+v", err, g.State(), last)
				}
				return
			}
			if err != nil || g.State() != Active || conn.messagesRecv != 1 {
				t.Fatalf("error %v, group is %v, %d messages received", err, g.State(), conn.messagesRecv)
			}
			if got := len(g.out.list) > 0 && g.out.list[0].Event == EventPointOfNoReturn; got != c.noReturn {
				t.Errorf("no return from here: %t, want %t", got, c.noReturn)
			}
		})
	}
}

// A group that is over takes only messages about its end.
func TestGroup_HandleRecvDead(t *testing.T) {
	g, l := formed(Client)
	g.becomeDead(nil)
	for _, b := range [][]byte{nil, {0xff}, llc.DeleteLink{All: true}.Append(nil)[:3]} {
		if err := g.HandleRecv(time.Unix(1, 0), l.index, b); err != nil || g.PeerKnows() {
			t.Errorf("% x: %v, the peer knows: %t", b, err, g.PeerKnows())
		}
	}
	if err := g.HandleRecv(time.Unix(1, 0), l.index, llc.DeleteLink{All: true}.Append(nil)); err != nil || !g.PeerKnows() {
		t.Errorf("DELETE LINK for all: %v, the peer knows: %t", err, g.PeerKnows())
	}
}
