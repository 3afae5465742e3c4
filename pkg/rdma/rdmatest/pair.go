// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// patience is how long a test waits for what must come.
const patience = 30 * time.Second

// Options describe the ends that [Pair] makes; zero values are useful.
type Options struct {
	SendWR, RecvWR int // 0: 64
	SGE            int // 0: the device's most
	CQDepth        int // 0: 256
	MRBytes        int // 0: 1 MiB
	MTU            rdma.MTU
	Access         rdma.Access // of the queue pair and region; 0: all
	Timeout        uint8       // 0: 14, which is 67 ms
	RetryCount     uint8       // 0: 7
	RNRRetry       uint8       // 0: 7, without end
	MinRNRTimer    uint8       // 0: 1, which is 0.01 ms
	NoRetry        bool        // RetryCount 0
	SQPSN          rdma.PSN
}

func (o Options) withDefaults(d rdma.Device) Options {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	def8 := func(p *uint8, v uint8) {
		if *p == 0 {
			*p = v
		}
	}
	def(&o.SendWR, 64)
	def(&o.RecvWR, 64)
	def(&o.SGE, d.Attr().MaxSGE)
	def(&o.CQDepth, 256)
	def(&o.MRBytes, 1<<20)
	def8(&o.Timeout, 14)
	def8(&o.RNRRetry, 7)
	def8(&o.MinRNRTimer, 1)
	def8(&o.RetryCount, 7)
	if o.NoRetry {
		o.RetryCount = 0
	}
	if o.Access == 0 {
		o.Access = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	}
	return o
}

// End is one end of a connection and what belongs to it.
type End struct {
	Dev            rdma.Device
	Ctx            rdma.Context
	PD             rdma.PD
	SendCQ, RecvCQ rdma.CQ
	QP             rdma.QP
	MR             rdma.MR
	opt            Options
}

// NewEnd makes a context with one of everything; the queue pair is in RESET.
func NewEnd(t testing.TB, d rdma.Device, o Options) *End {
	t.Helper()
	o = o.withDefaults(d)
	e := &End{Dev: d, opt: o}
	var err error
	check := func(what string) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	e.Ctx, err = d.Open()
	check("open context")
	t.Cleanup(func() {
		if err := e.Ctx.Close(); err != nil {
			t.Errorf("close context: %v", err)
		}
	})
	e.PD, err = e.Ctx.AllocPD()
	check("allocate PD")
	e.SendCQ, err = e.Ctx.CreateCQ(o.CQDepth)
	check("create send CQ")
	e.RecvCQ, err = e.Ctx.CreateCQ(o.CQDepth)
	check("create receive CQ")
	e.MR, err = e.PD.AllocMR(o.MRBytes, o.Access)
	check("allocate MR")
	e.QP, err = e.PD.CreateQP(rdma.QPConfig{
		SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, MaxSendWR: o.SendWR, MaxRecvWR: o.RecvWR, MaxSGE: o.SGE,
	})
	check("create QP")
	return e
}

// Connector connects the queue pairs of two ends, which are in RESET or, where a test posted
// receives before, in INIT; afterwards both are in RTS.
type Connector func(t testing.TB, x, y *End)

// ConnectByPath is the connector of devices whose queue pairs are connected by Modify.
func ConnectByPath(t testing.TB, x, y *End) {
	t.Helper()
	x.Connect(t, y)
	y.Connect(t, x)
}

// Pair makes two ends and connects them by path.
func Pair(t testing.TB, a, b rdma.Device, o Options) (x, y *End) {
	t.Helper()
	return Net{A: a, B: b}.Pair(t, o)
}

// Init takes the queue pair from RESET, or INIT, to INIT: a [Connector] of streams does
// that first.
func (e *End) Init(t testing.TB) {
	t.Helper()
	if err := e.QP.Modify(rdma.QPAttr{State: rdma.QPInit, Access: e.opt.Access}); err != nil {
		t.Fatalf("modify to INIT: %v", err)
	}
}

// Connect takes the queue pair from RESET to RTS towards a peer.
func (e *End) Connect(t testing.TB, peer *End) {
	t.Helper()
	for _, a := range e.Attrs(peer) {
		if err := e.QP.Modify(a); err != nil {
			t.Fatalf("modify to %v: %v", a.State, err)
		}
	}
}

// Attrs returns the three transitions of Connect.
func (e *End) Attrs(peer *End) [3]rdma.QPAttr {
	mtu := e.opt.MTU
	if mtu == 0 {
		mtu = min(e.Dev.Port().ActiveMTU, peer.Dev.Port().ActiveMTU)
	}
	psn := func(e *End) rdma.PSN { return (e.opt.SQPSN + rdma.PSN(e.QP.Num())) & rdma.PSNMask }
	dst := peer.Dev.GIDs()[0]
	return [3]rdma.QPAttr{
		{State: rdma.QPInit, Access: e.opt.Access},
		{
			State: rdma.QPRTR, DestQPN: peer.QP.Num(), RQPSN: psn(peer), MTU: mtu, MinRNRTimer: e.opt.MinRNRTimer,
			Path: rdma.Path{SGIDIndex: e.Dev.GIDs()[0].Index, DGID: dst.GID, DMAC: dst.MAC, HopLimit: 64},
		},
		{
			State: rdma.QPRTS, SQPSN: psn(e), Timeout: e.opt.Timeout,
			RetryCount: e.opt.RetryCount, RNRRetry: e.opt.RNRRetry,
		},
	}
}

// SGE returns a piece of the region.
func (e *End) SGE(off, n int) rdma.SGE {
	return rdma.SGE{Addr: e.MR.Addr() + uint64(off), Length: uint32(n), LKey: e.MR.LKey()}
}

// Send posts one work request.
func (e *End) Send(t testing.TB, w rdma.SendWR) {
	t.Helper()
	if n, err := e.QP.PostSend([]rdma.SendWR{w}); n != 1 || err != nil {
		t.Fatalf("post %v: %d, %v", w.Op, n, err)
	}
}

// solicited returns the flag of solicited sends, if the device has it.
func (e *End) solicited() rdma.SendFlags {
	if e.Dev.Attr().Solicited {
		return rdma.SendSolicited
	}
	return 0
}

// Recv posts one receive buffer.
func (e *End) Recv(t testing.TB, id uint64, off, n int) {
	t.Helper()
	if k, err := e.QP.PostRecv([]rdma.RecvWR{{ID: id, SGE: e.SGE(off, n)}}); k != 1 || err != nil {
		t.Fatalf("post receive: %d, %v", k, err)
	}
}

// Write returns a work request that writes n bytes at off to the same offset
// of the peer's region.
func (e *End) Write(id uint64, peer *End, off, n int) rdma.SendWR {
	return rdma.SendWR{
		ID: id, Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.SGE(off, n)},
		RemoteAddr: peer.MR.Addr() + uint64(off), RKey: peer.MR.RKey(),
	}
}

// Await polls n completions, and waits for them as the package rdma says.
func Await(t testing.TB, q rdma.CQ, n int) []rdma.WC {
	t.Helper()
	out := make([]rdma.WC, 0, n)
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	armed := false
	for {
		got, err := q.Poll(out[len(out):n])
		if err != nil {
			t.Fatalf("poll: %v", err)
		}
		out = out[:len(out)+got]
		switch {
		case len(out) == n:
			return out
		case got > 0:
			continue
		case !armed:
			armed = true
			if err := q.Arm(false); err != nil {
				t.Fatalf("arm: %v", err)
			}
			continue
		}
		armed = false
		select {
		case <-q.Notify():
		case <-deadline.C:
			t.Fatalf("%d of %d completions after %v: %+v", len(out), n, patience, out)
		}
	}
}

// AwaitOne polls one completion with the given status.
func AwaitOne(t testing.TB, q rdma.CQ, id uint64, s rdma.Status) rdma.WC {
	t.Helper()
	w := Await(t, q, 1)[0]
	if w.ID != id || w.Status != s {
		t.Fatalf("completion %+v (%v), want ID %d with %v", w, w.Status, id, s)
	}
	return w
}

// AwaitEvent waits for an event of a kind and passes over others.
func AwaitEvent(t testing.TB, c rdma.Context, k rdma.EventKind) rdma.AsyncEvent {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	for {
		select {
		case e, ok := <-c.Events():
			if !ok {
				t.Fatalf("events closed before %v", k)
			}
			if e.Kind == k {
				return e
			}
		case <-deadline.C:
			t.Fatalf("no event %v after %v", k, patience)
		}
	}
}
