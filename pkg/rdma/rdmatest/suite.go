// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"errors"
	"slices"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Net is two devices that reach each other.
type Net struct {
	A, B    rdma.Device
	Connect Connector // nil: ConnectByPath
	// Timeout is [Options.Timeout] where a case does not say another one; 0: its default. A device in an emulated
	// machine may answer nothing for longer than all retries take.
	Timeout uint8
}

// Pair makes an end of each device and connects them.
func (n Net) Pair(t testing.TB, o Options) (x, y *End) {
	t.Helper()
	if o.Timeout == 0 {
		o.Timeout = n.Timeout
	}
	x, y = NewEnd(t, n.A, o), NewEnd(t, n.B, o)
	n.connect(t, x, y)
	return x, y
}

func (n Net) connect(t testing.TB, x, y *End) {
	t.Helper()
	if n.Connect == nil {
		n.Connect = ConnectByPath
	}
	n.Connect(t, x, y)
}

// stream reports whether queue pairs are connected by their provider. Then PSN, path MTU,
// retries and a receiver that is not ready are nothing that a case could ask for.
func (n Net) stream() bool { return n.A.Attr().Stream }

// mtu returns a path MTU that both devices have, at most the one given. Streams have none:
// it says then around which sizes a case is to look.
func (n Net) mtu(most rdma.MTU) rdma.MTU {
	if n.stream() {
		return most
	}
	return min(most, n.A.Port().ActiveMTU, n.B.Port().ActiveMTU)
}

// Case is one case of the conformance suite. Run starts no subtests.
type Case struct {
	Name string
	Run  func(t *testing.T, net Net)
}

// TestProvider runs the conformance suite. open makes two devices that reach
// each other and closes them with the test.
func TestProvider(t *testing.T, open func(t *testing.T) Net) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Run(t, open(t)) })
	}
}

// Cases returns the conformance suite.
func Cases() []Case {
	return slices.Concat([]Case{
		{"Attributes", testAttributes},
		{"States", testStates},
		{"IllegalTransitions", testIllegalTransitions},
		{"ResetAndReconnect", testResetAndReconnect},
		{"Destruction", testDestruction},
	}, opCases, faultCases, rightCases, queueCases)
}

func testAttributes(t *testing.T, net Net) {
	for _, d := range []rdma.Device{net.A, net.B} {
		at, p := d.Attr(), d.Port()
		if d.Name() == "" || at.Provider == "" {
			t.Errorf("device %q of provider %q has no name", d.Name(), at.Provider)
		}
		if at.MaxQP < 1 || at.MaxCQE < 1 || at.MaxMRBytes < 1<<20 || at.MaxSGE < 1 || at.MaxSendWR < 16 || at.MaxRecvWR < 16 {
			t.Errorf("capabilities are too small: %+v", at)
		}
		if p.State != rdma.PortActive || !at.Stream && (!p.ActiveMTU.Valid() || p.MaxMTU < p.ActiveMTU) {
			t.Errorf("port %+v", p)
		}
		if at.RDMARead != (at.MaxReadsServed > 0 && at.MaxReadsAsked > 0) {
			t.Errorf("READ: %t, with %d served and %d asked", at.RDMARead, at.MaxReadsServed, at.MaxReadsAsked)
		}
		if n := testing.AllocsPerRun(100, func() { d.Attr() }); n != 0 {
			t.Errorf("asking for the attributes allocates %v times", n)
		}
		g := d.GIDs()
		if len(g) == 0 || g[0].GID.IsZero() || !slices.Contains(at.GIDTypes, g[0].Type) {
			t.Errorf("GID table %+v does not fit types %v", g, at.GIDTypes)
		}
		e := NewEnd(t, d, Options{MRBytes: 100})
		if e.Ctx.Device() != d {
			t.Error("the context has another device")
		}
		if n := len(e.MR.Bytes()); n < 100 || n%4096 != 0 {
			t.Errorf("region has %d bytes, want whole pages", n)
		}
		if slices.ContainsFunc(e.MR.Bytes(), func(c byte) bool { return c != 0 }) {
			t.Error("a new region is not zeroed")
		}
		if n := e.QP.Num(); n < 2 && !at.Stream || n > rdma.MaxQPN { // 0 and 1 are what IBTA has for itself
			t.Errorf("queue pair number %v", n)
		}
	}
}

func testStates(t *testing.T, net Net) {
	if net.stream() {
		testStreamStates(t, net)
		return
	}
	x, y := NewEnd(t, net.A, Options{}), NewEnd(t, net.B, Options{})
	recv := []rdma.RecvWR{{ID: 1, SGE: x.SGE(0, 64)}}
	send := []rdma.SendWR{{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 4)}}}
	want := []struct {
		state      rdma.QPState
		recv, send bool
	}{{rdma.QPReset, false, false}, {rdma.QPInit, true, false}, {rdma.QPRTR, true, false}, {rdma.QPRTS, true, true}}
	attrs := x.Attrs(y)
	for i, w := range want {
		if i > 0 {
			if err := x.QP.Modify(attrs[i-1]); err != nil {
				t.Fatalf("modify to %v: %v", w.state, err)
			}
		}
		if got := x.QP.State(); got != w.state {
			t.Fatalf("state %v, want %v", got, w.state)
		}
		if n, err := x.QP.PostRecv(recv); (n == 1 && err == nil) != w.recv || !w.recv && !errors.Is(err, rdma.ErrState) {
			t.Errorf("post receive in %v: %d, %v", w.state, n, err)
		}
		if w.state == rdma.QPRTS {
			break
		}
		if n, err := x.QP.PostSend(send); n != 0 || !errors.Is(err, rdma.ErrState) {
			t.Errorf("post send in %v: %d, %v", w.state, n, err)
		}
	}
	if err := x.QP.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatalf("modify to ERR: %v", err)
	}
	for _, w := range Await(t, x.RecvCQ, 3) {
		if w.Status != rdma.StatusFlushed {
			t.Errorf("receive ended with %v in ERR", w.Status)
		}
	}
	x.Send(t, send[0])
	AwaitOne(t, x.SendCQ, 2, rdma.StatusFlushed)
	x.Recv(t, 5, 0, 4)
	AwaitOne(t, x.RecvCQ, 5, rdma.StatusFlushed)
}

// testStreamStates: queue pairs on a connection go RESET, INIT, RTS, ERR, and only their
// provider takes them to RTS.
func testStreamStates(t *testing.T, net Net) {
	x, y := NewEnd(t, net.A, Options{}), NewEnd(t, net.B, Options{})
	recv := []rdma.RecvWR{{ID: 1, SGE: x.SGE(0, 64)}}
	send := []rdma.SendWR{{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 4)}}}
	refuses := func(want rdma.QPState) {
		t.Helper()
		for _, s := range []rdma.QPState{rdma.QPRTR, rdma.QPRTS} {
			if err := x.QP.Modify(rdma.QPAttr{State: s}); !errors.Is(err, rdma.ErrNotSupported) {
				t.Errorf("%v to %v: %v, want ErrNotSupported", want, s, err)
			}
		}
		if s := x.QP.State(); s != want {
			t.Errorf("state %v, want %v", s, want)
		}
	}
	refuses(rdma.QPReset)
	if n, err := x.QP.PostRecv(recv); n != 0 || !errors.Is(err, rdma.ErrState) {
		t.Errorf("post receive in RESET: %d, %v", n, err)
	}
	x.Init(t)
	refuses(rdma.QPInit)
	if n, err := x.QP.PostRecv(recv); n != 1 || err != nil {
		t.Errorf("post receive in INIT: %d, %v", n, err)
	}
	if n, err := x.QP.PostSend(send); n != 0 || !errors.Is(err, rdma.ErrState) {
		t.Errorf("post send in INIT: %d, %v", n, err)
	}
	net.connect(t, x, y)
	refuses(rdma.QPRTS)
	if err := x.QP.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatalf("modify to ERR: %v", err)
	}
	AwaitOne(t, x.RecvCQ, 1, rdma.StatusFlushed)
	x.Send(t, send[0])
	AwaitOne(t, x.SendCQ, 2, rdma.StatusFlushed)
}

func testIllegalTransitions(t *testing.T, net Net) {
	if net.stream() {
		return // testStreamStates has what there is
	}
	x, y := NewEnd(t, net.A, Options{}), NewEnd(t, net.B, Options{})
	attrs := x.Attrs(y)
	to := map[rdma.QPState]rdma.QPAttr{
		rdma.QPInit: attrs[0], rdma.QPRTR: attrs[1], rdma.QPRTS: attrs[2],
	}
	refuse := func(states ...rdma.QPState) {
		t.Helper()
		was := x.QP.State()
		for _, s := range states {
			if err := x.QP.Modify(to[s]); !errors.Is(err, rdma.ErrState) {
				t.Errorf("%v to %v: %v, want ErrState", was, s, err)
			}
			if now := x.QP.State(); now != was {
				t.Errorf("%v to %v was refused and changed the state to %v", was, s, now)
			}
		}
	}
	must := func(a rdma.QPAttr) {
		t.Helper()
		if err := x.QP.Modify(a); err != nil {
			t.Fatalf("modify to %v: %v", a.State, err)
		}
	}
	refuse(rdma.QPRTR, rdma.QPRTS)
	must(to[rdma.QPInit])
	refuse(rdma.QPRTS)
	bad := to[rdma.QPRTR]
	bad.MTU = 9
	if err := x.QP.Modify(bad); !errors.Is(err, rdma.ErrInvalid) {
		t.Errorf("path MTU 9: %v, want ErrInvalid", err)
	}
	must(to[rdma.QPRTR])
	refuse(rdma.QPInit)
	must(to[rdma.QPRTS])
	refuse(rdma.QPInit, rdma.QPRTR)
	must(rdma.QPAttr{State: rdma.QPError})
	refuse(rdma.QPInit, rdma.QPRTR, rdma.QPRTS)
	must(rdma.QPAttr{State: rdma.QPReset})
	if got := x.QP.State(); got != rdma.QPReset {
		t.Errorf("state %v after reset", got)
	}
}

func testResetAndReconnect(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	for round := range 3 {
		y.Recv(t, 1, 0, 64)
		x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 5+round)}})
		if w := AwaitOne(t, y.RecvCQ, 1, rdma.StatusSuccess); w.Bytes != uint32(5+round) {
			t.Errorf("round %d: %d bytes", round, w.Bytes)
		}
		AwaitOne(t, x.SendCQ, 2, rdma.StatusSuccess)
		for _, e := range []*End{x, y} {
			if err := e.QP.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil {
				t.Fatalf("reset: %v", err)
			}
		}
		net.connect(t, x, y)
	}
}

func testDestruction(t *testing.T, net Net) {
	x := NewEnd(t, net.A, Options{})
	if err := x.PD.Close(); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("close PD in use: %v, want ErrBusy", err)
	}
	if err := x.SendCQ.Close(); !errors.Is(err, rdma.ErrBusy) {
		t.Errorf("close CQ in use: %v, want ErrBusy", err)
	}
	for range 2 {
		if err := x.QP.Close(); err != nil {
			t.Errorf("close QP: %v", err)
		}
		if err := x.MR.Close(); err != nil {
			t.Errorf("close MR: %v", err)
		}
	}
	if _, err := x.QP.PostSend([]rdma.SendWR{{}}); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("post to a closed QP: %v, want ErrClosed", err)
	}
	if err := x.PD.Close(); err != nil {
		t.Errorf("close PD: %v", err)
	}
	if err := x.SendCQ.Close(); err != nil {
		t.Errorf("close CQ: %v", err)
	}
	if _, err := x.SendCQ.Poll(make([]rdma.WC, 1)); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("poll a closed CQ: %v, want ErrClosed", err)
	}
	if _, err := x.PD.AllocMR(10, rdma.LocalWrite); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("allocate in a closed PD: %v, want ErrClosed", err)
	}
	if err := x.Ctx.Close(); err != nil {
		t.Errorf("close context: %v", err)
	}
	if _, open := <-x.Ctx.Events(); open {
		t.Error("the event channel is open after Close")
	}
	if _, err := x.Ctx.AllocPD(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("allocate PD in a closed context: %v, want ErrClosed", err)
	}
}
