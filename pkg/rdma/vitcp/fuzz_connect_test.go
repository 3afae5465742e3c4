// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"errors"
	"net/netip"
	"testing"
	"time"
)

// What a script of FuzzConnect does, from the lower bits of a byte; the upper five go with it. What a
// machine has no word for is nothing.
const (
	fuzzData    = iota // the peer's next bytes
	fuzzDialed         // or a match
	fuzzFailed         // or no match
	fuzzEnd            // TCP ends
	fuzzWait           // until the timer
	fuzzCancel         // or reject
	fuzzAccept         // of a callee
	fuzzRequest        // the peer of a peer-to-peer call calls
	fuzzSteps
)

// FuzzConnect has a caller, a callee and a peer-to-peer call go through whatever the network, the program and the
// peer do. A machine asks for nothing that is not to be had, says once how it ended and nothing after that, sends
// only messages that are well formed, reads no byte behind the peer's, and ends when time has passed.
func FuzzConnect(f *testing.F) {
	ce := CE{Attr: reliable(), Calling: disc(f, "web0"), Called: disc(f, "db1"), Security: []byte("secret")}
	peer := ce
	peer.Peer = true
	other := peer
	other.Reliable = false
	var all []byte
	for _, ce := range []CE{ce, peer, other} {
		for _, typ := range []Type{TypeConnectRequest, TypeConnectAccept, TypeConnectReject, TypeConnectNoMatch} {
			m := connectMessage{typ: typ, first: 7, posted: 3, ce: ce}
			b := m.bytes()
			all = append(all, b...)
			for _, pause := range []byte{fuzzDialed, fuzzEnd} {
				f.Add([]byte{2, fuzzDialed, pause, fuzzRequest, fuzzWait}, b)
				f.Add([]byte{2 | 128, fuzzDialed, pause, fuzzRequest, fuzzWait}, b)
			}
			for role := range byte(3) {
				f.Add([]byte{role, fuzzDialed, fuzzData | 31<<3, fuzzData | 31<<3, fuzzData | 31<<3, fuzzDialed, fuzzAccept}, b)
				f.Add([]byte{role, fuzzDialed, fuzzEnd, fuzzWait, fuzzDialed, fuzzData | 3<<3, fuzzRequest, fuzzCancel}, b)
				f.Add([]byte{role, fuzzData | 31<<3, fuzzData | 31<<3, fuzzFailed, fuzzWait, fuzzRequest, fuzzWait}, b)
			}
		}
	}
	f.Add([]byte{2, fuzzDialed, fuzzRequest, fuzzData | 31<<3}, all)
	f.Fuzz(func(t *testing.T, script, stream []byte) {
		if len(script) == 0 || len(script) > 200 {
			return
		}
		newFuzzedCall(t, script[0], ce, stream).run(script[1:])
	})
}

// machine is what a caller and a callee have in common.
type machine interface {
	State() State
	Poll(dst []Output) []Output
	Want() int
	NextTimeout() (time.Time, bool)
	HandleTimeout(now time.Time)
	HandleEnd(now time.Time, err error)
	HandleData(now time.Time, b []byte)
}

// fuzzedCall is a machine under fuzzing, and its TCP connection.
type fuzzedCall struct {
	t      *testing.T
	m      machine
	caller *Caller // nil: the machine is a callee
	peer   *Peer   // nil: it is none
	callee *Callee
	ce     CE
	stream []byte
	now    time.Time

	dialing, up, over bool
}

func newFuzzedCall(t *testing.T, role byte, ce CE, stream []byte) *fuzzedCall {
	t.Helper()
	z := &fuzzedCall{t: t, ce: ce, stream: stream, now: time.Unix(0, 0)}
	c := CallConfig{Calling: ce.Calling, Called: ce.Called, Attr: ce.Attr, First: 100, Timeout: time.Second}
	var err error
	switch role & 127 % 3 {
	case 0:
		z.caller, err = NewCaller(c)
	case 1:
		z.callee = NewCallee(z.now, CalleeConfig{})
		z.m, z.up = z.callee, true
		return z
	case 2:
		local, remote := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
		if role&128 != 0 { // the call of the higher address stands
			local, remote = remote, local
		}
		if z.peer, err = NewPeer(c, local, remote); err == nil {
			z.caller = &z.peer.Caller
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	z.m = z.caller
	z.caller.Start(z.now)
	return z
}

func (z *fuzzedCall) run(script []byte) {
	z.look()
	for _, s := range script {
		z.step(s%fuzzSteps, int(s>>3))
		z.look()
	}
	for range 100 {
		at, ok := z.m.NextTimeout()
		if !ok {
			break
		}
		z.now = at
		z.m.HandleTimeout(z.now)
		z.look()
	}
	if !z.over {
		z.t.Fatalf("in %v for ever", z.m.State())
	}
}

func (z *fuzzedCall) step(what byte, n int) {
	switch what {
	case fuzzData:
		z.data(n)
	case fuzzEnd:
		if z.up {
			z.up = false
			z.m.HandleEnd(z.now, nil)
		}
	case fuzzWait:
		if at, ok := z.m.NextTimeout(); ok {
			z.now = at
		}
		z.m.HandleTimeout(z.now)
	case fuzzRequest:
		if z.peer != nil {
			z.called()
		}
	default:
		if z.caller != nil {
			z.stepCaller(what, n)
		} else {
			z.stepCallee(what, n)
		}
	}
}

func (z *fuzzedCall) stepCaller(what byte, n int) {
	switch what {
	case fuzzDialed:
		if z.dialing {
			z.dialing, z.up = false, true
			z.caller.HandleDialed(z.now, uint16(n))
		}
	case fuzzFailed:
		if z.dialing {
			z.dialing = false
			z.caller.HandleDialFailed(z.now, errors.New("refused"))
		}
	case fuzzCancel:
		z.caller.Cancel(z.now)
	default:
	}
}

func (z *fuzzedCall) stepCallee(what byte, n int) {
	switch what {
	case fuzzDialed:
		z.callee.Match(z.now)
	case fuzzFailed:
		z.callee.NoMatch(z.now)
	case fuzzCancel:
		z.callee.Reject(z.now)
	case fuzzAccept:
		a := reliable()
		a.Reliable, a.RDMARead, a.MaxTransfer = n&1 == 0, n&2 == 0, uint32(n)
		before := z.callee.State()
		if _, err := z.callee.Accept(z.now, Answer{Attr: a, First: 9, Posted: 4}); (err == nil) != (z.callee.State() == StateConnected && before != StateConnected) {
			z.t.Fatalf("accepted: %v, from %v to %v", err, before, z.callee.State())
		}
	default:
	}
}

// data gives the machine n bytes, or as many as it wants.
func (z *fuzzedCall) data(n int) {
	if n = min(n, z.m.Want(), len(z.stream)); n == 0 || !z.up {
		return
	}
	z.m.HandleData(z.now, z.stream[:n])
	z.stream = z.stream[n:]
}

// called has the peer call with the rest of the stream.
func (z *fuzzedCall) called() {
	in := NewCallee(z.now, CalleeConfig{})
	for len(z.stream) > 0 && in.Want() > 0 {
		n := min(in.Want(), len(z.stream))
		in.HandleData(z.now, z.stream[:n])
		z.stream = z.stream[n:]
	}
	if in.State() != StateMatching {
		return
	}
	z.look()
	before := z.over
	stands := z.peer.HandleRequest(z.now, in, 2)
	want := StateDisconnected // it is answered in any case
	if stands {
		want = StateConnected
	}
	if in.State() != want || stands && (before || z.peer.State() != StateDisconnected) {
		z.t.Fatalf("the peer's call stands: %t; it is in %v, ours in %v", stands, in.State(), z.peer.State())
	}
}

// look does what the machine asks for.
func (z *fuzzedCall) look() {
	for _, o := range z.m.Poll(nil) {
		if z.over {
			z.t.Fatalf("%v after the end", o.Kind)
		}
		switch o.Kind {
		case OutputDial:
			if z.dialing || z.up {
				z.t.Fatal("a second TCP connection")
			}
			z.dialing = true
		case OutputSend:
			if _, err := parseConnect(o.Data); err != nil || !z.up && z.caller != nil {
				z.t.Fatalf("sends %x: %v, with TCP up: %t", o.Data, err, z.up)
			}
		case OutputClose:
			z.dialing, z.up = false, false
		case OutputConnected:
			z.over = true
			if !z.up || o.Terms.MaxTransfer == 0 || o.Terms.MaxTransfer > z.ce.MaxTransfer && z.caller != nil {
				z.t.Fatalf("connected with %+v, TCP up: %t", o.Terms, z.up)
			}
		case OutputFailed:
			z.over = true
			if o.Err == nil || z.dialing || z.m.State() != StateDisconnected {
				z.t.Fatalf("failed with %v in %v, dialing: %t", o.Err, z.m.State(), z.dialing)
			}
		case OutputRequest:
			if z.callee == nil || o.Request == nil {
				z.t.Fatalf("asks about %+v", o.Request)
			}
		}
	}
}
