// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestStart_errors(t *testing.T) {
	for _, tc := range []struct {
		name string
		s    Startup
		want error
	}{
		{"revision", Startup{Rev: 3}, rdma.ErrInvalid},
		{"role", Startup{Role: 2}, rdma.ErrInvalid},
		{"peer-to-peer with revision 1", Startup{Rev: Rev1, PeerToPeer: true}, rdma.ErrInvalid},
		{"READs", Startup{IRD: MaxReads + 1}, rdma.ErrInvalid},
		{"private data", Startup{PrivateData: make([]byte, 509)}, rdma.ErrInvalid},
		{"private data, revision 1", Startup{Rev: Rev1, PrivateData: make([]byte, 513)}, rdma.ErrInvalid},
		{"most private data", Startup{PrivateData: make([]byte, 508)}, nil},
		{"ULPDU", Startup{MaxULPDU: 65531}, rdma.ErrInvalid},
	} {
		a := newSide(t, "a", nil)
		if err := a.q.Start(time.Time{}, tc.s); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	a := newSide(t, "a", nil)
	if err := a.q.Start(time.Time{}, Startup{}); err != nil {
		t.Fatal(err)
	}
	if err := a.q.Start(time.Time{}, Startup{}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("twice: %v", err)
	}
	if err := a.q.Reply(time.Time{}, Reply{}); !errors.Is(err, rdma.ErrState) {
		t.Errorf("Reply of an initiator: %v", err)
	}
	for _, st := range []rdma.QPState{rdma.QPRTR, rdma.QPRTS} {
		if err := a.q.Modify(time.Time{}, rdma.QPAttr{State: st}); !errors.Is(err, rdma.ErrNotSupported) {
			t.Errorf("Modify to %v: %v", st, err)
		}
	}
	if _, err := a.q.PostSend(time.Time{}, make([]rdma.SendWR, 1)); !errors.Is(err, rdma.ErrState) {
		t.Errorf("PostSend in INIT: %v", err)
	}
}

// TestInitiator_replies gives an initiator every kind of Reply.
func TestInitiator_replies(t *testing.T) {
	p2p := func(w, r bool) Enhanced {
		return Enhanced{PeerToPeer: true, RTRWrite: w, RTRRead: r, IRD: 16, ORD: 16}
	}
	for _, tc := range []struct {
		name  string
		ask   Startup
		reply Frame
		err   error
		tell  Code // CodeLocal: nothing
		ird   int
		ord   int
		rtr   Opcode // first FPDU, OpTerminate: none
	}{
		{"accepted", Startup{}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}}, nil, 0, 16, 16, OpTerminate},
		{"accepted, CRC of the peer", Startup{NoCRC: true}, Frame{CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}}, nil, 0, 16, 16, OpTerminate},
		{"RTR by WRITE", Startup{PeerToPeer: true}, Frame{Rev: 2, IsEnhanced: true, Enhanced: p2p(true, true)}, nil, 0, 16, 16, OpWrite},
		{"RTR by READ", Startup{PeerToPeer: true}, Frame{Rev: 2, IsEnhanced: true, Enhanced: p2p(false, true)}, nil, 0, 16, 16, OpReadRequest},
		{"peer is no peer", Startup{PeerToPeer: true}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}}, nil, 0, 16, 16, OpTerminate},
		{"no common RTR", Startup{PeerToPeer: true}, Frame{Rev: 2, IsEnhanced: true, Enhanced: p2p(false, false)}, ErrRTR, CodeRTR, 0, 0, 0},
		{"fewer READs", Startup{}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 3, ORD: 2}}, nil, 0, 16, 3, OpTerminate},
		{"fewer READs than demanded", Startup{IRD: 4, ORD: 4, Exact: true}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 3, ORD: 2}}, ErrReads, CodeIRD, 0, 0, 0},
		{"more READs asked", Startup{}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 100}}, nil, 0, 100, 16, OpTerminate},
		{"more READs asked than there can be", Startup{}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 129}}, ErrReads, CodeIRD, 0, 0, 0},
		{"more READs asked than given", Startup{IRD: 4, ORD: 4, Exact: true}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 5}}, ErrReads, CodeIRD, 0, 0, 0},
		{"READs agreed elsewhere", Startup{}, Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: ReadsUnknown, ORD: ReadsUnknown}}, nil, 0, 16, 16, OpTerminate},
		{"refused", Startup{}, Frame{Reject: true, Rev: 2, IsEnhanced: true, PrivateData: []byte("no")}, ErrRejected, 0, 0, 0, 0},
		{"revision 1", Startup{}, Frame{Rev: 1}, ErrRevision, 0, 0, 0, 0},
		{"revision 1 to 1", Startup{Rev: 1}, Frame{Rev: 1}, nil, 0, 16, 16, OpTerminate},
		{"not enhanced", Startup{}, Frame{Rev: 2}, ErrPrivateData, CodeStartup, 0, 0, 0},
		{"no common RTR, markers", Startup{PeerToPeer: true}, Frame{Markers: true, Rev: 2, IsEnhanced: true, Enhanced: p2p(false, false)}, ErrRTR, CodeRTR, 0, 0, 0},
		{"fewer READs than demanded, markers", Startup{IRD: 4, ORD: 4, Exact: true}, Frame{Markers: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 3, ORD: 2}}, ErrReads, CodeIRD, 0, 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := newSide(t, "a", nil)
			now := time.Unix(1000, 0)
			if err := a.q.Start(now, tc.ask); err != nil {
				t.Fatal(err)
			}
			for a.transmit(now, 7) > 0 {
			}
			if f, err := ParseFrame(a.sent); err != nil || f.CRC == tc.ask.NoCRC || f.Markers || f.Enhanced.PeerToPeer != tc.ask.PeerToPeer {
				t.Fatalf("Request %+v, %v", f, err)
			}
			a.sent = a.sent[:0]
			tc.reply.Reply = true
			var err error
			for _, c := range tc.reply.Append(nil) { // one byte at a time
				if err != nil {
					t.Fatalf("error before the end: %v", err)
				}
				err = a.feed(now, []byte{c})
			}
			if !errors.Is(err, tc.err) || (err == nil) != (a.q.State() == rdma.QPRTS) || (err != nil) != (a.q.Phase() == PhaseFailed) {
				t.Fatalf("%v in %v, %v; want %v", err, a.q.State(), a.q.Phase(), tc.err)
			}
			a.transmit(now, 1<<20)
			r, ok := a.q.Request()
			if !ok || string(r.PrivateData) != string(tc.reply.PrivateData) {
				t.Errorf("private data %q", r.PrivateData)
			}
			crc := !tc.ask.NoCRC || tc.reply.CRC
			if err == nil {
				if r.IRD != tc.ird || r.ORD != tc.ord {
					t.Errorf("IRD %d, ORD %d, want %d and %d", r.IRD, r.ORD, tc.ird, tc.ord)
				}
				rtr := OpTerminate
				if len(a.sent) > 0 {
					u, _, err := new(Framing{CRC: crc}).Next(a.sent)
					var h Header
					if err != nil || h.Parse(u) != nil {
						t.Fatalf("%v: %x", err, a.sent)
					}
					rtr = h.Op
				}
				if rtr != tc.rtr {
					t.Errorf("first message %v, want %v", rtr, tc.rtr)
				}
				return
			}
			if term := terminateIn(t, Framing{CRC: crc, Markers: tc.reply.Markers}, a.sent); (term != nil) != (tc.tell != 0) || term != nil && term.Code != tc.tell {
				t.Errorf("told %+v, want %v", term, tc.tell)
			}
			if err := a.q.Start(now, Startup{Rev: 1}); err != nil {
				t.Errorf("another start: %v", err)
			}
		})
	}
}

// TestResponder_requests gives a responder every kind of Request.
func TestResponder_requests(t *testing.T) {
	for _, tc := range []struct {
		name    string
		s       Startup
		ask     Frame
		err     error // of HandleRx or of Reply
		refused bool
		tell    Code
		reply   Frame
	}{
		{
			name: "siw's default", ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 1, ORD: 1}},
			reply: Frame{Reply: true, CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 1}},
		},
		{
			name: "no CRC on both sides", s: Startup{NoCRC: true}, ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}},
			reply: Frame{Reply: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}},
		},
		{
			name: "CRC of the peer", s: Startup{NoCRC: true}, ask: Frame{CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}},
			reply: Frame{Reply: true, CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}},
		},
		{
			name: "many READs", ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 300, ORD: 300}},
			reply: Frame{Reply: true, CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: MaxReads, ORD: 16}},
		},
		{
			name: "exactly as many READs", s: Startup{IRD: 4, ORD: 4, Exact: true}, ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 300, ORD: 300}},
			reply: Frame{Reply: true, CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 4, ORD: 4}},
		},
		{name: "fewer READs than demanded", s: Startup{IRD: 4, ORD: 4, Exact: true}, ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 3, ORD: 3}}, err: ErrReads},
		{
			name: "peer-to-peer", ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{PeerToPeer: true, RTRSend: true, RTRWrite: true, RTRRead: true, IRD: 16, ORD: 16}},
			reply: Frame{Reply: true, CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{PeerToPeer: true, RTRWrite: true, IRD: 16, ORD: 16}},
		},
		{
			name: "peer-to-peer by READ", ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{PeerToPeer: true, RTRSend: true, RTRRead: true, IRD: 16, ORD: 16}},
			reply: Frame{Reply: true, CRC: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{PeerToPeer: true, RTRRead: true, IRD: 16, ORD: 16}},
		},
		{name: "peer-to-peer by SEND", ask: Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{PeerToPeer: true, RTRSend: true, IRD: 16, ORD: 16}}, err: ErrRTR, tell: CodeRTR},
		{name: "revision 1", ask: Frame{Rev: 1, PrivateData: []byte("hi")}, reply: Frame{Reply: true, CRC: true, Rev: 1}},
		{name: "revision 0", ask: Frame{Rev: 0}, err: ErrRevision, refused: true},
		{name: "revision 3", ask: Frame{Rev: 3}, err: ErrRevision, refused: true},
		{name: "revision 2 where we have 1", s: Startup{Rev: 1}, ask: Frame{Rev: 2, IsEnhanced: true}, err: ErrRevision, refused: true},
		{name: "a Reply", ask: Frame{Reply: true, Rev: 2}, err: ErrKey},
		{
			name: "markers", ask: Frame{Markers: true, Rev: 1},
			reply: Frame{Reply: true, CRC: true, Rev: 1},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newSide(t, "b", nil)
			now := time.Unix(1000, 0)
			tc.s.Role = Responder
			tc.s.Early = tc.ask.Append(nil)[:5]
			if err := b.q.Start(now, tc.s); err != nil {
				t.Fatal(err)
			}
			err := b.feed(now, tc.ask.Append(nil)[5:])
			if err == nil {
				r, ok := b.q.Request()
				if !ok || b.q.Phase() != PhaseAsked || !bytes.Equal(r.PrivateData, tc.ask.PrivateData) {
					t.Fatalf("%v: %+v %t", b.q.Phase(), r, ok)
				}
				err = b.q.Reply(now, Reply{})
			}
			if !errors.Is(err, tc.err) {
				t.Fatalf("%v, want %v", err, tc.err)
			}
			b.transmit(now, 1<<20)
			switch {
			case err == nil:
				if want := tc.reply.Append(nil); !bytes.Equal(b.sent, want) || b.q.State() != rdma.QPRTS {
					t.Errorf("%v, Reply %x, want %x", b.q.State(), b.sent, want)
				}
				if b.q.tx.framing.Markers != tc.ask.Markers {
					t.Error("markers are sent, or not, as nobody asked for")
				}
			case tc.refused:
				if f, err := ParseFrame(b.sent); err != nil || !f.Reject {
					t.Errorf("%v: %x", err, b.sent)
				}
			case tc.tell != 0:
				if term := terminateOf(t, b.sent, true); term == nil || term.Code != tc.tell {
					t.Errorf("told %+v", term)
				}
			case len(b.sent) != 0:
				t.Errorf("sent %x", b.sent)
			}
		})
	}
}

// TestResponder_rejects gives the stream back: what follows the Request is not lost.
func TestResponder_rejects(t *testing.T) {
	p := newTwoSides(t)
	if err := p.b.q.Start(p.now, Startup{Role: Responder}); err != nil {
		t.Fatal(err)
	}
	ask := Frame{Rev: 1}
	if err := p.b.feed(p.now, append(ask.Append(nil), "plain words"...)); err != nil {
		t.Fatal(err)
	}
	if err := p.b.q.Reply(p.now, Reply{Reject: true, PrivateData: []byte("busy")}); err != nil {
		t.Fatal(err)
	}
	p.b.transmit(p.now, 1<<20)
	f, err := ParseFrame(p.b.sent)
	if err != nil || !f.Reject || string(f.PrivateData) != "busy" || string(p.b.q.Unread()) != "plain words" || p.b.q.TxEnded() {
		t.Errorf("%+v, %v, left %q", f, err, p.b.q.Unread())
	}
}

func TestStart_ends(t *testing.T) {
	now := time.Unix(1000, 0)
	for _, role := range []Role{Initiator, Responder} {
		a := newSide(t, "a", nil)
		if err := a.q.Start(now, Startup{Role: role, Timeout: time.Second}); err != nil {
			t.Fatal(err)
		}
		at, ok := a.q.NextTimeout()
		if !ok || at != now.Add(time.Second) {
			t.Fatalf("%v %t", at, ok)
		}
		a.q.HandleTimeout(at.Add(-1))
		if a.q.Phase() == PhaseFailed {
			t.Fatal("too early")
		}
		a.q.HandleTimeout(at)
		if !errors.Is(a.q.Err(), ErrTimeout) || a.q.State() != rdma.QPInit {
			t.Errorf("%v in %v", a.q.Err(), a.q.State())
		}
		for _, end := range []error{nil, io.ErrClosedPipe} {
			if err := a.q.Start(now, Startup{Role: role}); err != nil {
				t.Fatal(err)
			}
			a.q.HandleEnd(now, end)
			want := end
			if end == nil {
				want = ErrEnded
			}
			if !errors.Is(a.q.Err(), want) || a.q.Phase() != PhaseFailed {
				t.Errorf("%v in %v, want %v", a.q.Err(), a.q.Phase(), want)
			}
		}
	}
}

// TestQP_closingTakesTooLong has a peer that never ends its half.
func TestQP_closingTakesTooLong(t *testing.T) {
	p := newTwoSides(t)
	p.connect(Startup{}, Startup{})
	if err := p.a.q.Disconnect(p.now); err != nil {
		t.Fatal(err)
	}
	at, ok := p.a.q.NextTimeout()
	if !ok || at != p.now.Add(CloseTimeout) || p.a.q.Closed() || !p.a.q.TxEnded() {
		t.Fatalf("%v %t, %v", at, ok, p.a.q.Phase())
	}
	p.a.q.HandleTimeout(at)
	if !p.a.q.Closed() {
		t.Error(p.a.q.Phase())
	}
}
