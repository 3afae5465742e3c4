// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// peer is what both machines offer.
type peer interface {
	State() State
	Want() int
	HandleData(time.Time, []byte) error
	HandleEOF(time.Time)
	HandleTimeout(time.Time)
	NextTimeout() (time.Time, bool)
	Poll([]Output) []Output
	Decline(time.Time, Reason, bool)
	PassPointOfNoReturn(time.Time)
	Complete(time.Time)
}

var (
	epoch   = time.Unix(1_000_000, 0)
	testCfg = Config{PeerID: NewPeerID(9, macClient), OS: OSLinux, Hostname: "g2", Support: testSupport}
	// testSupport is what the kernels of the captures have, and no look at
	// subnets.
	testSupport = Support{
		V1: true, V2: true, AnySubnet: true, EIDs: []EID{eid("SMCV2-DEFAULT-UEID")},
		Release: Release1, MaxConns: 255, MaxLinks: 2, FeatureMask: 1,
	}
)

// feed gives a message to a machine as the shell does, in the pieces that Want
// asks for; what the machine does not want is left over.
func feed(p peer, now time.Time, b []byte) (left []byte, err error) {
	for len(b) > 0 && err == nil {
		n := p.Want()
		if n == 0 || n > len(b) {
			return b, nil
		}
		err = p.HandleData(now, b[:n])
		b = b[n:]
	}
	return b, err
}

// trace writes outputs in one line.
func trace(outs []Output) string {
	var s []string
	for _, o := range outs {
		switch o.Kind {
		case OutputSend:
			h, err := ParseHeader([HeaderLen]byte(o.Data))
			x := fmt.Sprintf("Send(%v v%d", h.Type, h.Version)
			if h.Type == TypeDecline {
				d, _ := ParseDecline(o.Data)
				x += fmt.Sprintf(" %v", d.Reason)
				if d.OutOfSync {
					x += " S"
				}
			}
			if err != nil || h.Length != len(o.Data) {
				x += " BAD"
			}
			s = append(s, x+")")
		case OutputDeclined:
			x := fmt.Sprintf("Declined(%v", o.Declined.Reason)
			if o.Declined.FromPeer {
				x += " peer"
			}
			if o.Declined.OutOfSync {
				x += " S"
			}
			if o.Declined.MayCross {
				x += " cross"
			}
			s = append(s, x+")")
		case OutputAbort:
			x := "?"
			for _, e := range []error{ErrTimeout, ErrPeerClosed, ErrTooLate, ErrUnexpectedData, ErrState} {
				if errors.Is(o.Err, e) {
					x = strings.TrimPrefix(e.Error(), "clc: ")
				}
			}
			if isParseError(o.Err) {
				x = "parse error"
			} else if errors.Is(o.Err, ErrDecline) {
				x = "reserved value"
			}
			s = append(s, "Abort("+x+")")
		case OutputProposed, OutputAccepted, OutputConfirmed, OutputEstablished:
			s = append(s, o.Kind.String())
		}
	}
	return strings.Join(s, " ")
}

// messages of a captured negotiation.
type messages struct {
	proposal Proposal
	accept   Accept
	confirm  Confirm
	raw      map[Type][]byte
}

func captured(tb testing.TB, proposal, accept, confirm string) messages {
	m := messages{raw: map[Type][]byte{
		TypeProposal: load(tb, "captured/"+proposal),
		TypeAccept:   load(tb, "captured/"+accept),
		TypeConfirm:  load(tb, "captured/"+confirm),
		TypeDecline:  load(tb, "captured/decline-11"),
	}}
	var err error
	if m.proposal, err = ParseProposal(m.raw[TypeProposal]); err != nil {
		tb.Fatal(err)
	}
	if m.accept, err = ParseAccept(m.raw[TypeAccept]); err != nil {
		tb.Fatal(err)
	}
	if m.confirm, err = ParseConfirm(m.raw[TypeConfirm]); err != nil {
		tb.Fatal(err)
	}
	return m
}

func firstV1(tb testing.TB) messages {
	return captured(tb, "proposal-40", "accept-40", "confirm-40")
}

func againV1(tb testing.TB) messages {
	return captured(tb, "proposal-40", "accept-41", "confirm-41")
}

func firstV2(tb testing.TB) messages {
	return captured(tb, "proposal-01", "accept-01", "confirm-01")
}

// script drives one machine through steps, each a word, and returns one line
// per step: the outputs, then the state.
func script(tb testing.TB, server bool, m messages, steps string) string {
	tb.Helper()
	now := epoch
	var c *Client
	var s *Server
	var p peer
	if server {
		s = NewServer(now, testCfg)
		p = s
	} else {
		c = NewClient(testCfg)
		p = c
	}
	var log strings.Builder
	for _, step := range strings.Fields(steps) {
		var left []byte
		name, arg, _ := strings.Cut(step, ":")
		switch name {
		case "propose":
			c.Propose(now, m.proposal)
		case "confirm":
			c.Confirm(now, m.confirm, m.accept.FirstContact)
		case "accept":
			s.Accept(now, m.accept)
		case "<proposal":
			left, _ = feed(p, now, m.raw[TypeProposal])
		case "<accept":
			left, _ = feed(p, now, m.raw[TypeAccept])
		case "<accept-mtu":
			b := bytes.Clone(m.raw[TypeAccept])
			b[50] &= 0xf0
			left, _ = feed(p, now, b)
		case "<confirm":
			left, _ = feed(p, now, m.raw[TypeConfirm])
		case "<confirm-mtu":
			b := bytes.Clone(m.raw[TypeConfirm])
			b[50] |= 0x0f
			left, _ = feed(p, now, b)
		case "<decline":
			left, _ = feed(p, now, append(bytes.Clone(m.raw[TypeDecline]), "application data"...))
			if string(left) == "application data" {
				left = nil
			}
		case "<decline-head":
			_, _ = feed(p, now, m.raw[TypeDecline][:HeaderLen])
		case "<decline-rest":
			_, _ = feed(p, now, m.raw[TypeDecline][HeaderLen:])
		case "<decline-sync":
			left, _ = feed(p, now, Decline{Version: 1, OutOfSync: true, Reason: ReasonSyncErr}.Append(nil))
		case "<http":
			_, _ = feed(p, now, []byte("HTTP/1.1 400 Bad Request\r\n"))
		case "<bytes":
			_ = p.HandleData(now, []byte("x"))
		case "eof":
			p.HandleEOF(now)
		case "decline":
			r := map[string]Reason{"": ReasonNoDev, "cl": ReasonTimeoutCL, "al": ReasonTimeoutAL, "sync": ReasonSyncErr}[arg]
			p.Decline(now, r, arg == "sync")
		case "pass":
			p.PassPointOfNoReturn(now)
		case "complete":
			p.Complete(now)
		case "wait":
			d, err := time.ParseDuration(arg)
			if err != nil {
				tb.Fatal(err)
			}
			now = now.Add(d)
			p.HandleTimeout(now)
		default:
			tb.Fatalf("no step %q", step)
		}
		line := trace(p.Poll(nil))
		if line != "" {
			line += " "
		}
		line += "-> " + p.State().String()
		if len(left) > 0 {
			line += fmt.Sprintf(", %d bytes not taken", len(left))
		}
		fmt.Fprintln(&log, line)
	}
	return log.String()
}

type scriptTest struct {
	name  string
	m     messages
	steps string
	want  string
}

func runScripts(t *testing.T, server bool, tests []scriptTest) {
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want := strings.ReplaceAll(strings.TrimSpace(tt.want), "\t", "") + "\n"
			if diff := cmp.Diff(want, script(t, server, tt.m, tt.steps)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.steps, diff)
			}
		})
	}
}

func TestClientScripts(t *testing.T) {
	first, again, v2 := firstV1(t), againV1(t), firstV2(t)
	runScripts(t, false, []scriptTest{
		{"first contact (3.5.1)", first, "propose <accept confirm pass complete", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> Committed
			Established -> Established`},
		{"first contact, no ADD LINK comes", first, "propose <accept confirm complete", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			Established -> Established`},
		{"subsequent contact (3.5.2)", again, "propose <accept confirm complete", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> Committed
			Established -> Established`},
		{"first contact of version 2", v2, "propose <accept confirm pass complete", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v2) -> LinkSetup
			-> Committed
			Established -> Established`},
		{"Decline in place of the Proposal (C.1)", first, "decline", `
			Send(Decline v1 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"a Decline does not chase the Proposal (C.1)", first, "propose decline <accept", `
			Send(Proposal v2) -> WaitAccept
			-> WaitAccept
			Send(Decline v1 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"the first reason stays", first, "propose decline:sync decline <accept", `
			Send(Proposal v2) -> WaitAccept
			-> WaitAccept
			-> WaitAccept
			Send(Decline v1 SYNCERR S) Declined(SYNCERR S) -> Declined`},
		{"Declines of both sides, ours waits (C.1)", first, "propose decline <decline", `
			Send(Proposal v2) -> WaitAccept
			-> WaitAccept
			Declined(NOSMCDEV peer) -> Declined`},
		{"Decline in place of the Confirm (C.1)", again, "propose <accept decline", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Decline v1 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"Decline has the version of the Accept", v2, "propose <accept decline", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"out of sync (C.4)", again, "propose <accept decline:sync", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Decline v1 SYNCERR S) Declined(SYNCERR S) -> Declined`},
		{"no Decline after Confirm on subsequent contact (C.1)", again, "propose <accept confirm decline", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> Committed
			Abort(too late to fall back to TCP) -> Aborted`},
		{"Decline during LLC set-up (C.2)", first, "propose <accept confirm decline", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			Send(Decline v1 NOSMCDEV) Declined(NOSMCDEV cross) -> Declined`},
		{"no Decline past the point of no return (C.3)", first, "propose <accept confirm pass decline", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> Committed
			Abort(too late to fall back to TCP) -> Aborted`},
		{"the peer's Decline past the point of no return (C.3)", first, "propose <accept confirm pass <bytes", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> Committed
			Abort(unexpected data) -> Aborted`},
		{"the peer's Decline arrives while the point is passed (C.3)", first, "propose <accept confirm <decline-head pass", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> LinkSetup
			Abort(too late to fall back to TCP) -> Aborted`},
		{"our Decline does not follow a half-read one", first, "propose <accept confirm <decline-head decline <decline-rest", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> LinkSetup
			-> LateDecline
			Declined(NOSMCDEV peer) -> Declined`},
		{"a half Decline is never finished", first, "propose <accept confirm <decline-head decline wait:3s", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> LinkSetup
			-> LateDecline
			Abort(no answer in time) -> Aborted`},
		{"LLC timeout, the peer tells why (C.7)", first, "propose <accept confirm decline:cl <decline", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> LateDecline
			Declined(NOSMCDEV peer) -> Declined`},
		{"LLC timeout, the peer is silent", first, "propose <accept confirm decline:cl wait:2999ms wait:1ms", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			-> LateDecline
			-> LateDecline
			Send(Decline v1 TIMEOUT_CL) Declined(TIMEOUT_CL cross) -> Declined`},
		{"the server's Decline", first, "propose <decline", `
			Send(Proposal v2) -> WaitAccept
			Declined(NOSMCDEV peer) -> Declined`},
		{"the server's Decline with the S bit", first, "propose <decline-sync", `
			Send(Proposal v2) -> WaitAccept
			Declined(SYNCERR peer S) -> Declined`},
		{"the server's Decline during LLC set-up (C.2)", first, "propose <accept confirm <decline", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			Declined(NOSMCDEV peer) -> Declined`},
		{"no Accept in time (C.5)", first, "propose wait:5999ms wait:1ms", `
			Send(Proposal v2) -> WaitAccept
			-> WaitAccept
			Abort(no answer in time) -> Aborted`},
		{"a server that stops in the middle of a Decline (C.5)", first, "propose <decline-head wait:6s", `
			Send(Proposal v2) -> WaitAccept
			-> WaitAccept
			Abort(no answer in time) -> Aborted`},
		{"a server that echoes the option and speaks no CLC (C.6)", first, "propose <http", `
			Send(Proposal v2) -> WaitAccept
			Abort(parse error) -> Aborted`},
		{"wrong message (C.6)", first, "propose <confirm", `
			Send(Proposal v2) -> WaitAccept
			Abort(parse error) -> Aborted, 60 bytes not taken`},
		{"reserved MTU (C.6)", first, "propose <accept-mtu", `
			Send(Proposal v2) -> WaitAccept
			Send(Decline v1 CNFERR) Declined(CNFERR) -> Declined`},
		{"a pending Decline wins over a reserved MTU", first, "propose decline <accept-mtu", `
			Send(Proposal v2) -> WaitAccept
			-> WaitAccept
			Send(Decline v1 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"version 1 accepted, not offered", captured(t, "proposal-01", "accept-40", "confirm-40"), "propose <accept", `
			Send(Proposal v2) -> WaitAccept
			Send(Decline v1 MODEUNSUPP) Declined(MODEUNSUPP) -> Declined`},
		{"version 2 accepted, not offered", captured(t, "proposal-40", "accept-01", "confirm-01"), "propose <accept", `
			Send(Proposal v2) -> WaitAccept
			Send(Decline v2 MODEUNSUPP) Declined(MODEUNSUPP) -> Declined`},
		{"the server closes", first, "propose eof", `
			Send(Proposal v2) -> WaitAccept
			Abort(peer closed the connection) -> Aborted`},
		{"the server closes during LLC set-up", first, "propose <accept confirm eof", `
			Send(Proposal v2) -> WaitAccept
			Accepted -> Deciding
			Send(Confirm v1) -> LinkSetup
			Abort(peer closed the connection) -> Aborted`},
	})
}

func TestServerScripts(t *testing.T) {
	first, again, v2 := firstV1(t), againV1(t), firstV2(t)
	rfc := first
	rfc.raw = map[Type][]byte{TypeProposal: load(t, "published/proposal-ipv4")}
	mixed := first
	mixed.raw = map[Type][]byte{TypeProposal: first.raw[TypeProposal], TypeConfirm: v2.raw[TypeConfirm]}
	noExt := v2
	noExt.raw = map[Type][]byte{TypeProposal: v2.raw[TypeProposal], TypeConfirm: load(t, "captured/confirm-02")}
	runScripts(t, true, []scriptTest{
		{"first contact (3.5.1)", first, "<proposal accept <confirm pass complete", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> LinkSetup
			-> Committed
			Established -> Established`},
		{"subsequent contact (3.5.2)", again, "<proposal accept <confirm complete", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> Committed
			Established -> Established`},
		{"first contact of version 2", v2, "<proposal accept <confirm pass complete", `
			Proposed -> Deciding
			Send(Accept v2) -> WaitConfirm
			Confirmed -> LinkSetup
			-> Committed
			Established -> Established`},
		{"the client's Decline in place of the Proposal (C.1)", first, "<decline", `
			Declined(NOSMCDEV peer) -> Declined`},
		{"no Decline before the Proposal", first, "decline <proposal", `
			-> WaitProposal
			Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"Decline in place of the Accept (C.1)", first, "<proposal decline", `
			Proposed -> Deciding
			Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"Decline to a client of RFC 7609", rfc, "<proposal decline", `
			Proposed -> Deciding
			Send(Decline v1 NOSMCDEV) Declined(NOSMCDEV) -> Declined`},
		{"no Decline after Accept on subsequent contact (C.1)", again, "<proposal accept decline", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Abort(too late to fall back to TCP) -> Aborted`},
		{"nor after the Confirm (C.3)", again, "<proposal accept <confirm decline", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> Committed
			Abort(too late to fall back to TCP) -> Aborted`},
		{"a Decline does not chase the Accept (C.1)", first, "<proposal accept decline <confirm", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			-> WaitConfirm
			Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV cross) -> Declined`},
		{"the client's Decline in place of the Confirm (C.1)", again, "<proposal accept <decline", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Declined(NOSMCDEV peer) -> Declined`},
		{"the client is out of sync (C.4)", again, "<proposal accept <decline-sync", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Declined(SYNCERR peer S) -> Declined`},
		{"the client's Decline during LLC set-up (C.2)", first, "<proposal accept <confirm <decline", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> LinkSetup
			Declined(NOSMCDEV peer) -> Declined`},
		{"Decline during LLC set-up (C.2)", first, "<proposal accept <confirm decline", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> LinkSetup
			Send(Decline v2 NOSMCDEV) Declined(NOSMCDEV cross) -> Declined`},
		{"LLC timeout, the client is silent", first, "<proposal accept <confirm decline:al wait:1s", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> LinkSetup
			-> LateDecline
			Send(Decline v2 TIMEOUT_AL) Declined(TIMEOUT_AL cross) -> Declined`},
		{"no Decline past the point of no return (C.3)", first, "<proposal accept <confirm pass decline:al", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> LinkSetup
			-> Committed
			Abort(too late to fall back to TCP) -> Aborted`},
		{"no Proposal in time (C.5)", first, "wait:6s", `
			Abort(no answer in time) -> Aborted`},
		{"no Confirm in time (C.5)", first, "<proposal wait:20s accept wait:5999ms wait:1ms", `
			Proposed -> Deciding
			-> Deciding
			Send(Accept v1) -> WaitConfirm
			-> WaitConfirm
			Abort(no answer in time) -> Aborted`},
		{"application data in place of the Proposal (C.6)", first, "<http", `
			Abort(parse error) -> Aborted`},
		{"application data during LLC set-up (C.6)", first, "<proposal accept <confirm <http", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> LinkSetup
			Abort(parse error) -> Aborted`},
		{"a second Confirm (C.6)", first, "<proposal accept <confirm <confirm", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Confirmed -> LinkSetup
			Abort(parse error) -> Aborted, 60 bytes not taken`},
		{"reserved MTU (C.6)", first, "<proposal accept <confirm-mtu", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Send(Decline v2 CNFERR) Declined(CNFERR cross) -> Declined`},
		{"Confirm of another version", mixed, "<proposal accept <confirm", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Abort(parse error) -> Aborted`},
		{"Confirm without its extension", noExt, "<proposal accept <confirm", `
			Proposed -> Deciding
			Send(Accept v2) -> WaitConfirm
			Send(Decline v2 RELEASEERR) Declined(RELEASEERR cross) -> Declined`},
		{"the client closes", first, "<proposal accept eof", `
			Proposed -> Deciding
			Send(Accept v1) -> WaitConfirm
			Abort(peer closed the connection) -> Aborted`},
	})
}

// Linux sets the first contact bit in the Confirm, RFC 7609 A.2.4 has none:
// in version 1 both are the same to us.
func TestConfirmFirstContactBitTolerated(t *testing.T) {
	for _, steps := range []string{"<proposal accept <confirm complete", "<proposal accept <confirm-mtu"} {
		for _, m := range []messages{firstV1(t), againV1(t)} {
			want := script(t, true, m, steps)
			m.raw[TypeConfirm][7] ^= flagBit
			if diff := cmp.Diff(want, script(t, true, m, steps)); diff != "" {
				t.Errorf("first contact %v, %s (-want +got):\n%s", m.accept.FirstContact, steps, diff)
			}
		}
	}
}

// The shell never gets to read a byte behind a message.
func TestWantStopsAtMessages(t *testing.T) {
	m := firstV1(t)
	s := NewServer(epoch, testCfg)
	stream := append(bytes.Clone(m.raw[TypeProposal]), "more"...)
	left, err := feed(s, epoch, stream)
	if err != nil || string(left) != "more" || s.Want() != 0 {
		t.Errorf("%d bytes left, Want %d, %v", len(left), s.Want(), err)
	}
}

// A message is partial between its header and its end, and never once the machine has given up.
func TestPartial(t *testing.T) {
	m := firstV1(t)
	p := m.raw[TypeProposal]
	for _, c := range []struct {
		name   string
		pieces [][]byte
		want   bool
	}{
		{"nothing", nil, false},
		{"a header", [][]byte{p[:HeaderLen]}, true},
		{"a message", [][]byte{p[:HeaderLen], p[HeaderLen:]}, false},
		{"the wrong message", [][]byte{m.raw[TypeConfirm][:HeaderLen]}, false},
	} {
		s := NewServer(epoch, testCfg)
		for _, b := range c.pieces {
			_ = s.HandleData(epoch, b)
		}
		if s.Partial() != c.want {
			t.Errorf("after %s: %t in state %v", c.name, s.Partial(), s.State())
		}
	}
}

func TestTimerDefaultsAndConfig(t *testing.T) {
	c := NewClient(Config{MessageTimeout: time.Minute})
	if _, ok := c.NextTimeout(); ok {
		t.Error("an idle client has a timer")
	}
	c.Propose(epoch, firstV1(t).proposal)
	if got, _ := c.NextTimeout(); got != epoch.Add(time.Minute) {
		t.Errorf("timer at %v", got.Sub(epoch))
	}
	s := NewServer(epoch, Config{})
	if got, _ := s.NextTimeout(); got != epoch.Add(6*time.Second) {
		t.Errorf("default timer at %v", got.Sub(epoch))
	}
}

func TestCrossingDecline(t *testing.T) {
	d := load(t, "captured/decline-12")
	for n := range d {
		if drop, undecided := CrossingDecline(d[:n]); drop != 0 || !undecided {
			t.Errorf("%d bytes of a Decline: %d, %v", n, drop, undecided)
		}
	}
	if drop, undecided := CrossingDecline(append(bytes.Clone(d), "data"...)); drop != len(d) || undecided {
		t.Errorf("a Decline and data: %d, %v", drop, undecided)
	}
	bad := bytes.Clone(d)
	bad[len(bad)-1]++
	for _, b := range [][]byte{[]byte("x"), []byte("GET / HTTP/1.1\r\n"), load(t, "captured/accept-40"), bad} {
		if drop, undecided := CrossingDecline(b); drop != 0 || undecided {
			t.Errorf("%q: %d, %v", b, drop, undecided)
		}
	}
}
