// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// inputs are everything a machine can meet, in the words of script.
var inputs = []string{
	"open", "answer", "<message", "<decline", "<http", "<bytes", "eof",
	"wait:10s", "decline", "decline:cl", "pass", "complete",
}

// grid runs every input in every state and writes the state that follows.
func grid(t *testing.T, server bool, paths []struct{ name, steps, m string }) string {
	t.Helper()
	var b strings.Builder
	for _, p := range paths {
		m := firstV1(t)
		if p.m == "again" {
			m = againV1(t)
		}
		fmt.Fprintf(&b, "%s:", p.name)
		for _, in := range inputs {
			step := in
			switch in {
			case "open": // Propose; a server has nothing like it
				step = "propose"
				if server {
					continue
				}
			case "answer":
				step = "confirm"
				if server {
					step = "accept"
				}
			case "<message":
				step = "<accept"
				if server && p.name == "WaitProposal" {
					step = "<proposal"
				} else if server {
					step = "<confirm"
				}
			}
			lines := strings.Split(strings.TrimSpace(script(t, server, m, p.steps+" "+step)), "\n")
			last := lines[len(lines)-1]
			_, state, _ := strings.Cut(last, "-> ")
			state, _, _ = strings.Cut(state, ",")
			fmt.Fprintf(&b, " %s=%s", in, state)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// Every input in every state has a defined result. A state that is final stays
// what it is, except that a Conn that gets data over TCP, or is declined, after
// it was established must be reset.
func TestClientGrid(t *testing.T) {
	got := grid(t, false, []struct{ name, steps, m string }{
		{"Idle", "", "first"},
		{"WaitAccept", "propose", "first"},
		{"Deciding", "propose <accept", "first"},
		{"LinkSetup", "propose <accept confirm", "first"},
		{"LateDecline", "propose <accept confirm decline:cl", "first"},
		{"Committed", "propose <accept confirm", "again"},
		{"Established", "propose <accept confirm complete", "again"},
		{"Declined", "decline", "first"},
		{"Aborted", "eof", "first"},
	})
	want := `
Idle: open=WaitAccept answer=Aborted <message=Idle <decline=Idle <http=Idle <bytes=Aborted eof=Aborted wait:10s=Idle decline=Declined decline:cl=Declined pass=Aborted complete=Aborted
WaitAccept: open=Aborted answer=Aborted <message=Deciding <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Aborted decline=WaitAccept decline:cl=WaitAccept pass=Aborted complete=Aborted
Deciding: open=Aborted answer=LinkSetup <message=Deciding <decline=Deciding <http=Deciding <bytes=Aborted eof=Aborted wait:10s=Deciding decline=Declined decline:cl=Declined pass=Aborted complete=Aborted
LinkSetup: open=Aborted answer=Aborted <message=Aborted <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=LinkSetup decline=Declined decline:cl=LateDecline pass=Committed complete=Established
LateDecline: open=Aborted answer=Aborted <message=Aborted <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Declined decline=LateDecline decline:cl=LateDecline pass=Aborted complete=Aborted
Committed: open=Aborted answer=Aborted <message=Committed <decline=Committed <http=Committed <bytes=Aborted eof=Aborted wait:10s=Committed decline=Aborted decline:cl=Aborted pass=Committed complete=Established
Established: open=Established answer=Established <message=Established <decline=Established <http=Established <bytes=Aborted eof=Established wait:10s=Established decline=Aborted decline:cl=Aborted pass=Established complete=Established
Declined: open=Declined answer=Declined <message=Declined <decline=Declined <http=Declined <bytes=Declined eof=Declined wait:10s=Declined decline=Declined decline:cl=Declined pass=Declined complete=Declined
Aborted: open=Aborted answer=Aborted <message=Aborted <decline=Aborted <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Aborted decline=Aborted decline:cl=Aborted pass=Aborted complete=Aborted
`
	if diff := cmp.Diff(want[1:], got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestServerGrid(t *testing.T) {
	got := grid(t, true, []struct{ name, steps, m string }{
		{"WaitProposal", "", "first"},
		{"Deciding", "<proposal", "first"},
		{"WaitConfirm first", "<proposal accept", "first"},
		{"WaitConfirm subsequent", "<proposal accept", "again"},
		{"LinkSetup", "<proposal accept <confirm", "first"},
		{"LateDecline", "<proposal accept <confirm decline:cl", "first"},
		{"Committed", "<proposal accept <confirm", "again"},
		{"Established", "<proposal accept <confirm complete", "again"},
		{"Declined", "<decline", "first"},
		{"Aborted", "eof", "first"},
	})
	want := `
WaitProposal: answer=Aborted <message=Deciding <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Aborted decline=WaitProposal decline:cl=WaitProposal pass=Aborted complete=Aborted
Deciding: answer=WaitConfirm <message=Deciding <decline=Deciding <http=Deciding <bytes=Aborted eof=Aborted wait:10s=Deciding decline=Declined decline:cl=Declined pass=Aborted complete=Aborted
WaitConfirm first: answer=Aborted <message=LinkSetup <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Aborted decline=WaitConfirm decline:cl=WaitConfirm pass=Aborted complete=Aborted
WaitConfirm subsequent: answer=Aborted <message=Committed <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Aborted decline=Aborted decline:cl=Aborted pass=Aborted complete=Aborted
LinkSetup: answer=Aborted <message=Aborted <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=LinkSetup decline=Declined decline:cl=LateDecline pass=Committed complete=Established
LateDecline: answer=Aborted <message=Aborted <decline=Declined <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Declined decline=LateDecline decline:cl=LateDecline pass=Aborted complete=Aborted
Committed: answer=Aborted <message=Committed <decline=Committed <http=Committed <bytes=Aborted eof=Aborted wait:10s=Committed decline=Aborted decline:cl=Aborted pass=Committed complete=Established
Established: answer=Established <message=Established <decline=Established <http=Established <bytes=Aborted eof=Established wait:10s=Established decline=Aborted decline:cl=Aborted pass=Established complete=Established
Declined: answer=Declined <message=Declined <decline=Declined <http=Declined <bytes=Declined eof=Declined wait:10s=Declined decline=Declined decline:cl=Declined pass=Declined complete=Declined
Aborted: answer=Aborted <message=Aborted <decline=Aborted <http=Aborted <bytes=Aborted eof=Aborted wait:10s=Aborted decline=Aborted decline:cl=Aborted pass=Aborted complete=Aborted
`
	if diff := cmp.Diff(want[1:], got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// wire is one direction of the TCP connection between two machines.
type wire struct{ b []byte }

// duel lets a client and a server negotiate with random delays, Declines and
// points of no return, and checks what must hold for every order of events.
func duel(t *testing.T, rng *rand.Rand) (outcome string) {
	m := []messages{firstV1(t), againV1(t), firstV2(t)}[rng.IntN(3)]
	now := epoch
	c, s := NewClient(testCfg), NewServer(now, testCfg)
	var toServer, toClient wire
	var ended [2]Output
	crossed := ""
	c.Propose(now, m.proposal)

	drain := func(p peer, side int, out *wire) {
		for _, o := range p.Poll(nil) {
			if ended[side].Kind == OutputDeclined {
				t.Fatalf("output %v after Declined", o.Kind)
			}
			switch o.Kind {
			case OutputSend:
				out.b = append(out.b, o.Data...)
			case OutputAccepted:
				if rng.IntN(8) == 0 {
					c.Decline(now, ReasonMem, false)
				} else {
					c.Confirm(now, m.confirm, m.accept.FirstContact)
				}
			case OutputProposed:
				if rng.IntN(8) == 0 {
					s.Decline(now, ReasonMem, false)
				} else {
					s.Accept(now, m.accept)
				}
			case OutputDeclined, OutputAbort, OutputEstablished:
				ended[side] = o
				if o.Kind == OutputDeclined {
					out.b = append(out.b, "application"...)
				}
			case OutputConfirmed:
			}
		}
	}
	read := func(p peer, in *wire) {
		if n := p.Want(); n > 0 && n <= len(in.b) {
			_ = p.HandleData(now, in.b[:n])
			in.b = in.b[n:]
		}
	}
	// ready: LLC works only when both have come that far.
	ready := func() bool { return s.State() == StateLinkSetup || s.State() == StateCommitted }
	for range 200 {
		drain(c, 0, &toServer)
		drain(s, 1, &toClient)
		now = now.Add(time.Duration(rng.IntN(20)) * time.Millisecond)
		switch rng.IntN(20) {
		case 0:
			c.HandleTimeout(now.Add(time.Duration(rng.IntN(2)) * time.Second))
		case 1:
			s.HandleTimeout(now.Add(time.Duration(rng.IntN(2)) * time.Second))
		case 2:
			if rng.IntN(4) == 0 {
				c.Decline(now, []Reason{ReasonMem, ReasonTimeoutCL}[rng.IntN(2)], false)
			}
		case 3:
			if rng.IntN(4) == 0 {
				s.Decline(now, []Reason{ReasonMem, ReasonTimeoutCL}[rng.IntN(2)], false)
			}
		case 4:
			if ready() && (c.State() == StateCommitted || c.State() == StateLinkSetup) {
				c.Complete(now)
			}
		case 5:
			if ready() && (c.State() == StateEstablished || c.State() == StateCommitted) {
				s.Complete(now)
			}
		case 6, 7, 8, 9, 10, 11, 12:
			read(c, &toClient)
		default:
			read(s, &toServer)
		}
	}
	drain(c, 0, &toServer)
	drain(s, 1, &toClient)
	// Both in TCP: the application gets its bytes and nothing else.
	if ended[0].Kind == OutputDeclined && ended[1].Kind == OutputDeclined {
		for side, in := range []wire{toClient, toServer} {
			b := in.b
			if drop, _ := CrossingDecline(b); drop > 0 {
				if !ended[side].Declined.MayCross {
					t.Fatalf("side %d: a Decline before the application's data, not announced: %+v", side, ended[side].Declined)
				}
				b, crossed = b[drop:], " crossed"
			}
			if !bytes.Equal(b, []byte("application")) {
				t.Fatalf("side %d: the application gets %q", side, b)
			}
		}
	}
	// Nobody stays on SMC-R while the other is on TCP: what comes over TCP then
	// resets the connection.
	for side, p := range []peer{c, s} {
		in := []wire{toClient, toServer}[side]
		if p.State() != StateEstablished || ended[1-side].Kind != OutputDeclined {
			continue
		}
		if !ended[1-side].Declined.MayCross {
			t.Fatalf("one side on SMC-R, the other declined: %+v", ended[1-side].Declined)
		}
		if err := p.HandleData(now, in.b); err == nil || p.State() != StateAborted {
			t.Fatalf("side %d: %d bytes over TCP after the switch: %v, state %v", side, len(in.b), err, p.State())
		}
	}
	return ended[0].Kind.String() + "/" + ended[1].Kind.String() + crossed
}

func TestDuel(t *testing.T) {
	outcomes := map[string]int{}
	for seed := range uint64(3000) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			outcomes[duel(t, rand.New(rand.NewPCG(seed, 0)))]++
		})
	}
	t.Logf("client/server: %v", outcomes)
	for _, o := range []string{"Established/Established", "Declined/Declined", "Declined/Declined crossed", "Abort/Abort"} {
		if outcomes[o] == 0 {
			t.Errorf("no negotiation ended in %s: %v", o, outcomes)
		}
	}
}

// FuzzDuel looks for more orders of events.
func FuzzDuel(f *testing.F) {
	f.Add(uint64(1), uint64(1))
	f.Fuzz(func(t *testing.T, a, b uint64) { duel(t, rand.New(rand.NewPCG(a, b))) })
}

// FuzzMachines gives both machines random bytes and commands. The first byte of
// each step chooses what happens.
func FuzzMachines(f *testing.F) {
	m := captured(f, "proposal-40", "accept-40", "confirm-40")
	f.Add([]byte{0, 2, 3, 5}, m.raw[TypeAccept])
	f.Add([]byte{2, 1, 2, 3, 4}, append(bytes.Clone(m.raw[TypeProposal]), m.raw[TypeConfirm]...))
	f.Add([]byte{0, 2, 2}, m.raw[TypeDecline])
	m2 := firstV2(f)
	f.Add([]byte{2, 131, 2, 3, 4}, append(bytes.Clone(m2.raw[TypeProposal]), m2.raw[TypeConfirm]...))
	f.Add([]byte{2, 10, 131, 2}, append(bytes.Clone(m2.raw[TypeProposal]), m2.raw[TypeConfirm]...))
	f.Fuzz(func(t *testing.T, steps, stream []byte) {
		if len(steps) > 256 {
			return
		}
		c, s := NewClient(testCfg), NewServer(epoch, testCfg)
		for _, p := range []peer{c, s} {
			now, in := epoch, stream
			for _, step := range steps {
				before := p.State()
				switch step % 10 {
				case 0:
					if p == peer(c) {
						c.Propose(now, []messages{m, m2}[step/10%2].proposal)
					} else {
						s.WithoutV2(now, ReasonNoRoute)
					}
				case 1:
					if p == peer(c) {
						c.Confirm(now, m.confirm, step >= 128)
					} else {
						a := m.accept
						a.FirstContact = step >= 128
						s.Accept(now, a)
					}
				case 2:
					for n := p.Want(); n > 0 && n <= len(in); n = p.Want() {
						_ = p.HandleData(now, in[:n])
						in = in[n:]
					}
				case 3:
					p.PassPointOfNoReturn(now)
				case 4:
					p.Complete(now)
				case 5:
					p.Decline(now, Reason(step), step >= 128)
				case 6:
					p.Decline(now, ReasonTimeoutCL, false)
				case 7:
					now = now.Add(time.Duration(step) * time.Second / 20)
					p.HandleTimeout(now)
				case 8:
					p.HandleEOF(now)
				case 9:
					_ = p.HandleData(now, in[:min(len(in), int(step)/10)])
				}
				checkMachine(t, p, before)
			}
		}
	})
}

// checkMachine checks what holds in every state.
func checkMachine(t *testing.T, p peer, before State) {
	t.Helper()
	st := p.State()
	if before.Done() && st != before && (before != StateEstablished || st != StateAborted) {
		t.Fatalf("state %v after %v", st, before)
	}
	d, ok := p.NextTimeout()
	if st.Done() && (ok || p.Want() != 0) {
		t.Fatalf("%v wants %d bytes, timer %v", st, p.Want(), d)
	}
	if w := p.Want(); w < 0 || w > MaxLen {
		t.Fatalf("wants %d bytes", w)
	}
	end := Output{}
	for _, o := range p.Poll(nil) {
		if end.Kind != 0 {
			t.Fatalf("%v after %v", o.Kind, end.Kind)
		}
		if o.Kind == OutputDeclined || o.Kind == OutputAbort || o.Kind == OutputEstablished {
			end = o
		}
		if o.Kind == OutputAbort && o.Err == nil {
			t.Fatal("Abort without an error")
		}
	}
	if end.Kind == 0 && st != before && st.Done() {
		t.Fatalf("%v to %v without an output", before, st)
	}
}
