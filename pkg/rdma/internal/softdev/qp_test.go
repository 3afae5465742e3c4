// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// rtr is what Modify to RTR needs.
func rtr(to string) rdma.QPAttr {
	return rdma.QPAttr{
		State: rdma.QPRTR, Path: rdma.Path{DGID: rdma.GIDFromAddr(netip.MustParseAddr(to))}, DestQPN: 7, MTU: rdma.MTU1024, MinRNRTimer: 12,
	}
}

// connected moves a queue pair to RTS.
func connected(t *testing.T, q rdma.QP) *silentQP {
	t.Helper()
	for _, a := range []rdma.QPAttr{{State: rdma.QPInit}, rtr("192.0.2.2"), {State: rdma.QPRTS, Timeout: 14, RetryCount: 7}} {
		if err := q.Modify(a); err != nil {
			t.Fatal(err)
		}
	}
	return q.(*silentQP)
}

func TestPD_CreateQP(t *testing.T) {
	c := silent(t)
	o, strange := c.objects(t), silent(t).objects(t)
	closed, err := c.CreateCQ(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		edit func(*rdma.QPConfig)
		want error
	}{
		{"least", func(*rdma.QPConfig) {}, nil},
		{"most", func(q *rdma.QPConfig) {
			q.MaxSendWR, q.MaxRecvWR, q.MaxSGE = rocev2.MaxQueue, rocev2.MaxQueue, rocev2.MaxSGE
		}, nil},
		{"no completion queue", func(q *rdma.QPConfig) { q.SendCQ = nil }, rdma.ErrInvalid},
		{"a stranger's send queue", func(q *rdma.QPConfig) { q.SendCQ = strange.cq }, rdma.ErrInvalid},
		{"a stranger's receive queue", func(q *rdma.QPConfig) { q.RecvCQ = strange.cq }, rdma.ErrInvalid},
		{"a closed send queue", func(q *rdma.QPConfig) { q.SendCQ = closed }, rdma.ErrClosed},
		{"a closed receive queue", func(q *rdma.QPConfig) { q.RecvCQ = closed }, rdma.ErrClosed},
		{"no sends", func(q *rdma.QPConfig) { q.MaxSendWR = 0 }, rdma.ErrInvalid},
		{"no receives", func(q *rdma.QPConfig) { q.MaxRecvWR = 0 }, rdma.ErrInvalid},
		{"too many sends", func(q *rdma.QPConfig) { q.MaxSendWR = rocev2.MaxQueue + 1 }, rdma.ErrInvalid},
		{"too many receives", func(q *rdma.QPConfig) { q.MaxRecvWR = rocev2.MaxQueue + 1 }, rdma.ErrInvalid},
		{"too many pieces", func(q *rdma.QPConfig) { q.MaxSGE = rocev2.MaxSGE + 1 }, rdma.ErrInvalid},
		{"less than no pieces", func(q *rdma.QPConfig) { q.MaxSGE = -1 }, rdma.ErrInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := rdma.QPConfig{SendCQ: o.cq, RecvCQ: o.cq, MaxSendWR: 1, MaxRecvWR: 1}
			tt.edit(&cfg)
			before := c.dev.qps.used
			q, err := o.pd.CreateQP(cfg)
			if !errors.Is(err, tt.want) || (err == nil) != (tt.want == nil) {
				t.Fatalf("error %v, want %v", err, tt.want)
			}
			if err != nil {
				if c.dev.qps.used != before {
					t.Error("a queue pair that was refused is there")
				}
				return
			}
			if c.dev.Find(q.Num()) != q || q.Num() < FirstQPN || q.State() != rdma.QPReset {
				t.Errorf("queue pair %v in %v", q.Num(), q.State())
			}
			if err := q.Close(); err != nil {
				t.Error(err)
			}
			if c.dev.qps.used != before {
				t.Error("a queue pair that was closed is there")
			}
		})
	}
}

// What the carrier refuses the machine does not see.
func TestQP_checkModify(t *testing.T) {
	q := silent(t).objects(t).qp.(*silentQP)
	q.refuse = rdma.ErrNotSupported
	if err := q.Modify(rdma.QPAttr{State: rdma.QPInit}); !errors.Is(err, rdma.ErrNotSupported) || q.State() != rdma.QPReset {
		t.Errorf("%v, state %v", err, q.State())
	}
}

// A reset has the carrier forget what it has, and a region that is closed what is of memory;
// a queue pair that is closed is not asked any more.
func TestQP_carrierForgets(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	q := connected(t, o.qp)
	if err := q.Modify(rdma.QPAttr{State: rdma.QPReset}); err != nil || q.dropped != 1 {
		t.Errorf("reset: %v, dropped %d times", err, q.dropped)
	}
	if err := o.mr.Close(); err != nil || q.forgot != 1 {
		t.Errorf("close region: %v, forgot %d times", err, q.forgot)
	}
	m, err := o.pd.AllocMR(4096, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := q.Close(); err != nil || q.dropped != 2 {
		t.Errorf("close: %v, dropped %d times", err, q.dropped)
	}
	if err := m.Close(); err != nil || q.forgot != 1 {
		t.Errorf("close region: %v, forgot %d times", err, q.forgot)
	}
}

// The wire that was full is tried again, when the protocol waits for nothing, too.
func TestQP_retry(t *testing.T) {
	q := connected(t, silent(t).objects(t).qp)
	q.Lock()
	q.full = time.Now().Add(time.Hour)
	q.Step(time.Now())
	at := q.timeout.deadline.Load()
	q.full = time.Time{}
	q.Step(time.Now())
	q.Unlock()
	if at == 0 || q.timeout.deadline.Load() != 0 {
		t.Errorf("timer at %d with a full wire, %d without", at, q.timeout.deadline.Load())
	}
}

// A send that is put into the ring while somebody else owns the queue pair cannot be
// refused later: what the machine would refuse is refused at once, as it does.
func TestQP_busyRefusesTheSame(t *testing.T) {
	sgl := func(sizes ...uint32) (l []rdma.SGE) {
		for _, n := range sizes {
			l = append(l, rdma.SGE{Length: n})
		}
		return l
	}
	o := silent(t).objects(t)
	r, err := o.pd.CreateQP(rdma.QPConfig{SendCQ: o.cq, RecvCQ: o.cq, MaxSendWR: 1, MaxRecvWR: 1, MaxSGE: 2})
	if err != nil {
		t.Fatal(err)
	}
	q := connected(t, r)
	for _, c := range []struct {
		name string
		w    rdma.SendWR
		ok   bool
	}{
		{"empty send", rdma.SendWR{Op: rdma.OpSend}, true},
		{"as many pieces as may be", rdma.SendWR{Op: rdma.OpSend, SGL: sgl(0, 0)}, true},
		{"one piece more", rdma.SendWR{Op: rdma.OpSend, SGL: sgl(0, 0, 0)}, false},
		{"no operation", rdma.SendWR{Op: rdma.OpRead + 1}, false},
		{"read into one piece", rdma.SendWR{Op: rdma.OpRead, SGL: sgl(0)}, true},
		{"read into two pieces", rdma.SendWR{Op: rdma.OpRead, SGL: sgl(0, 0)}, false},
		{"inline", rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendInline, Inline: make([]byte, MaxInline)}, true},
		{"inline too long", rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendInline, Inline: make([]byte, MaxInline+1)}, false},
		{
			"inline too long with what is gathered",
			rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendInline, Inline: make([]byte, 60), SGL: sgl(4, 1)},
			false,
		},
		{"inline, with what is gathered and would fit", rdma.SendWR{Flags: rdma.SendInline, SGL: sgl(8)}, false},
		{"inline bytes without the flag", rdma.SendWR{Inline: make([]byte, 8)}, false},
		{"unknown flag", rdma.SendWR{Flags: 1 << 7}, false},
		{"longer than a message may be", rdma.SendWR{SGL: sgl(1<<31, 1)}, false},
		{"inline pieces whose sum wraps", rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendInline, SGL: sgl(1<<31, 1<<31)}, false},
		{"inline read", rdma.SendWR{Op: rdma.OpRead, Flags: rdma.SendInline}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := q.limits.Check(&c.w); (err == nil) != c.ok {
				t.Errorf("check: %v, want good: %t", err, c.ok)
			}
			if c.ok {
				return
			}
			_, direct := q.PostSend([]rdma.SendWR{c.w})
			q.Lock()
			n, err := q.PostSend([]rdma.SendWR{{Op: rdma.OpSend}, c.w, {Op: rdma.OpSend}})
			empty := len(q.sends.front())
			q.sends.pop(empty)
			q.Unlock()
			if n != 1 || empty != 1 || !errors.Is(err, rdma.ErrInvalid) || !errors.Is(direct, rdma.ErrInvalid) {
				t.Errorf("%d of 3 posted, %d in the ring, %v; without an owner: %v", n, empty, err, direct)
			}
		})
	}
}

// Posting while somebody else owns the queue pair needs the same state, and room in the
// ring; whoever owns it does the rest.
func TestQP_postToRing(t *testing.T) {
	o := silent(t).objects(t)
	q := o.qp.(*silentQP)
	three := make([]rdma.SendWR, 3)
	recvs := make([]rdma.RecvWR, 3)
	owned := func(f func() (int, error), want int, is error) {
		t.Helper()
		q.Lock()
		n, err := f()
		q.Unlock()
		if n != want || !errors.Is(err, is) || (err == nil) != (is == nil) {
			t.Errorf("in %v: %d, %v, want %d, %v", q.State(), n, err, want, is)
		}
	}
	owned(func() (int, error) { return q.PostSend(three) }, 0, rdma.ErrState)
	owned(func() (int, error) { return q.PostRecv(recvs) }, 0, rdma.ErrState)
	connected(t, q)
	owned(func() (int, error) { return q.PostRecv(recvs) }, 3, nil)
	owned(func() (int, error) { return q.PostRecv(recvs) }, 3, nil) // 4 in the queue, 2 in the ring, which has 4 places
	owned(func() (int, error) { return q.PostRecv(recvs) }, 2, rdma.ErrQueueFull)
	owned(func() (int, error) { return q.PostSend(three) }, 3, nil)
	owned(func() (int, error) { return q.PostSend(three) }, 3, nil)
	owned(func() (int, error) { return q.PostSend(three) }, 2, rdma.ErrQueueFull)
	if err := q.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
}

// An owner that has read what the peer sent hands receives that were posted meanwhile to the
// machine first.
func TestQP_TakeRecvs(t *testing.T) {
	o := silent(t).objects(t)
	q := connected(t, o.qp)
	q.Lock()
	defer q.Unlock()
	if n, err := q.PostRecv(make([]rdma.RecvWR, 3)); n != 3 || err != nil {
		t.Fatalf("posted %d, %v", n, err)
	}
	q.TakeRecvs()
	// The machine's queue has four places.
	if n, err := q.m.PostRecv(make([]rdma.RecvWR, 4)); n != 1 || !errors.Is(err, rdma.ErrQueueFull) {
		t.Errorf("the machine has room for %d, %v; want 1", n, err)
	}
}

// narrowQP is a queue pair with two places for sends. They leave them without a completion when its wire takes them.
type narrowQP struct {
	silentQP
	taken, sent int
	full        bool // the wire is
}

// narrowMachine is its protocol.
type narrowMachine struct {
	Machine
	q *narrowQP
}

func (q *narrowQP) Machine() Machine { return narrowMachine{q.m, q} }

func (q *narrowQP) Transmit(time.Time) {
	if !q.full {
		q.taken, q.sent = 0, q.sent+q.taken
	}
}

func (m narrowMachine) PostSend(_ time.Time, wrs []rdma.SendWR) (int, error) {
	n := min(len(wrs), 2-m.q.taken)
	m.q.taken += n
	if n < len(wrs) {
		return n, rdma.ErrQueueFull
	}
	return n, nil
}

// Sends that are not signaled make room without a completion, when the wire takes them: those that wait in the ring are sent,
// too.
func TestQP_Step_unsignaled(t *testing.T) {
	d := &silentDevice{}
	d.Device = New(Config{Device: d, NewQP: func(c QPConfig) (Carrier, error) {
		s, err := newSilentQP(c)
		return &narrowQP{silentQP: silentQP{m: s.(*silentQP).m}, full: true}, err
	}})
	defer d.Close()
	c, err := d.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	q := c.(*deviceContext).objects(t).qp.(*narrowQP)
	for _, a := range []rdma.QPAttr{{State: rdma.QPInit}, rtr("192.0.2.2"), {State: rdma.QPRTS, Timeout: 14, RetryCount: 7}} {
		if err := q.Modify(a); err != nil {
			t.Fatal(err)
		}
	}
	q.Lock()
	defer q.Unlock()
	if n, err := q.PostSend(make([]rdma.SendWR, 4)); n != 4 || err != nil { // all into the ring
		t.Fatalf("posted %d, %v", n, err)
	}
	if q.Step(time.Now()); q.Drained() || q.taken != 2 {
		t.Fatalf("%d of 4 sends have a place, want 2", q.taken)
	}
	q.full = false
	if q.Step(time.Now()); !q.Drained() || q.sent != 4 {
		t.Errorf("%d of 4 sends are sent, the ring is empty: %t", q.sent, q.Drained())
	}
}

// Each receive and send comes back once, in its order, when the queue pair fails, also
// those that wait in the rings. One queue of completions has room for all.
func TestQP_errorFlushesRings(t *testing.T) {
	o := silent(t).objects(t)
	big, err := o.pd.(*pd).ctx.CreateCQ(64)
	if err != nil {
		t.Fatal(err)
	}
	r, err := o.pd.CreateQP(rdma.QPConfig{SendCQ: big, RecvCQ: big, MaxSendWR: 2, MaxRecvWR: 2})
	if err != nil {
		t.Fatal(err)
	}
	q := connected(t, r)
	q.Lock()
	_, errRecv := q.PostRecv([]rdma.RecvWR{{ID: 1}, {ID: 2}})
	_, errSend := q.PostSend([]rdma.SendWR{{ID: 3}, {ID: 4}})
	q.Unlock()
	if err := errors.Join(errRecv, errSend, q.Modify(rdma.QPAttr{State: rdma.QPError})); err != nil {
		t.Fatal(err)
	}
	wcs := make([]rdma.WC, 8)
	n, err := big.Poll(wcs)
	if err != nil {
		t.Fatal(err)
	}
	got := map[uint64]rdma.Status{}
	for _, w := range wcs[:n] {
		got[w.ID] = w.Status
	}
	flushed := rdma.StatusFlushed
	if d := cmp.Diff(map[uint64]rdma.Status{1: flushed, 2: flushed, 3: flushed, 4: flushed}, got); d != "" || n != 4 {
		t.Errorf("%d completions:\n%s", n, d)
	}
}

// A completion queue that overruns ends its queue pairs, which say so once.
func TestQP_overrun(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	small, err := c.CreateCQ(2)
	if err != nil {
		t.Fatal(err)
	}
	r, err := o.pd.CreateQP(rdma.QPConfig{SendCQ: o.cq, RecvCQ: small, MaxSendWR: 4, MaxRecvWR: 4})
	if err != nil {
		t.Fatal(err)
	}
	q := connected(t, r)
	if _, err := q.PostRecv(make([]rdma.RecvWR, 4)); err != nil {
		t.Fatal(err)
	}
	if err := q.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	if _, err := small.Poll(make([]rdma.WC, 4)); !errors.Is(err, rdma.ErrCQOverrun) || q.State() != rdma.QPError {
		t.Errorf("poll: %v, state %v", err, q.State())
	}
	var e rdma.AsyncEvent
	select {
	case e = <-c.Events():
	case <-time.After(5 * time.Second):
		t.Fatal("no event")
	}
	if e.Kind != rdma.EventQPFatal || e.QPN != q.num || !errors.Is(e.Err, rdma.ErrCQOverrun) {
		t.Errorf("event %+v", e)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	for e := range c.Events() {
		t.Errorf("another event %+v", e)
	}
}

// Nobody posts to a queue pair that is closed, nor changes it. Close may come twice.
func TestQP_closed(t *testing.T) {
	q := connected(t, silent(t).objects(t).qp)
	if _, err := q.PostSend([]rdma.SendWR{{Op: rdma.OpSend}}); err != nil || q.timeout.deadline.Load() == 0 {
		t.Fatalf("%v; a send without an answer has no timer", err)
	}
	for range 2 {
		if err := q.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	_, errSend := q.PostSend(make([]rdma.SendWR, 1))
	_, errRecv := q.PostRecv(make([]rdma.RecvWR, 1))
	for what, err := range map[string]error{
		"PostSend": errSend, "PostRecv": errRecv, "Modify": q.Modify(rdma.QPAttr{State: rdma.QPReset}),
	} {
		if !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if n := q.sendCQ.users.Load(); n != 0 {
		t.Errorf("the completion queue has %d users", n)
	}
	if q.timeout.deadline.Load() != 0 {
		t.Error("a closed queue pair has a timer")
	}
}
