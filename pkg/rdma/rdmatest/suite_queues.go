// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// queueCases are about completion queues.
var queueCases = []Case{
	{"Overrun", testOverrun},
	{"Resize", testResize},
	{"Notify", testNotify},
	{"NotifySolicited", testNotifySolicited},
	{"NotifyNeverLost", testNotifyNeverLost},
	{"OnNotify", testOnNotify},
	{"IdlePoll", testIdlePoll},
	{"IdlePollAlone", testIdlePollAlone},
}

func testOverrun(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{CQDepth: 4, SendWR: 64, RecvWR: 64})
	for i := range uint64(32) {
		if _, err := x.QP.PostSend([]rdma.SendWR{x.Write(i, y, 0, 8)}); err != nil && !errors.Is(err, rdma.ErrState) {
			t.Fatalf("post: %v", err)
		}
	}
	e := AwaitEvent(t, x.Ctx, rdma.EventQPFatal)
	if e.QPN != x.QP.Num() {
		t.Errorf("event %+v", e)
	}
	for range 3 {
		if n, err := x.SendCQ.Poll(make([]rdma.WC, 2)); n != 0 || !errors.Is(err, rdma.ErrCQOverrun) {
			t.Errorf("poll after overrun: %d, %v", n, err)
		}
	}
	if s := x.QP.State(); s != rdma.QPError {
		t.Errorf("state %v, want ERR", s)
	}
}

// testResize gives a queue more room while completions wait in it: they stay, and those that come then overrun nothing.
func testResize(t *testing.T, net Net) {
	const few, many = 4, 256
	x, y := net.Pair(t, Options{CQDepth: few, SendWR: many + 1, RecvWR: 64})
	post := func(from, to uint64) {
		for i := from; i < to; i++ {
			if _, err := x.QP.PostSend([]rdma.SendWR{x.Write(i, y, 0, 8)}); err != nil {
				t.Fatalf("post: %v", err)
			}
		}
	}
	post(0, few)
	err := x.SendCQ.Resize(many + 1)
	if at := x.Dev.Attr(); at.Provider == "verbs" && at.Stream && errors.Is(err, rdma.ErrNotSupported) {
		t.Logf("resize: %v", err) // siw of Linux
		return
	}
	if err != nil {
		t.Fatalf("resize: %v", err)
	}
	if err := x.SendCQ.Resize(few); err != nil {
		t.Errorf("less room than there is: %v", err)
	}
	post(few, many)
	y.Recv(t, 0, 0, 8)
	x.Send(t, rdma.SendWR{ID: many, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 8)}})
	AwaitOne(t, y.RecvCQ, 0, rdma.StatusSuccess) // the WRITEs are through
	for i := range uint64(many + 1) {
		AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess)
	}
	for _, depth := range []int{0, -1, x.Ctx.Device().Attr().MaxCQE + 1} {
		if err := x.SendCQ.Resize(depth); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("resize to %d: %v, want ErrInvalid", depth, err)
		}
	}
}

// notified waits for the notification; quiet asserts that there is none now.
func notified(t *testing.T, q rdma.CQ) {
	t.Helper()
	select {
	case <-q.Notify():
	case <-time.After(patience):
		t.Fatal("no notification")
	}
}

func quiet(t *testing.T, q rdma.CQ, why string) {
	t.Helper()
	select {
	case <-q.Notify():
		t.Errorf("a notification %s", why)
	default:
	}
}

func testNotify(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	send := func(id uint64) {
		y.Recv(t, id, 0, 64)
		x.Send(t, rdma.SendWR{ID: id, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 4)}})
		AwaitOne(t, x.SendCQ, id, rdma.StatusSuccess)
		x.awaitArrival(t, y) // so it has arrived
		for len(x.SendCQ.Notify()) > 0 {
			<-x.SendCQ.Notify()
		}
	}
	send(1)
	quiet(t, y.RecvCQ, "without Arm")
	if err := y.RecvCQ.Arm(false); err != nil {
		t.Fatal(err)
	}
	quiet(t, y.RecvCQ, "for a completion before Arm")
	send(2)
	notified(t, y.RecvCQ)
	send(3)
	quiet(t, y.RecvCQ, "for the second completion after one Arm")
	if n := len(Await(t, y.RecvCQ, 3)); n != 3 {
		t.Errorf("%d completions", n)
	}
}

func testNotifySolicited(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	send := func(id uint64, f rdma.SendFlags) {
		y.Recv(t, id, 0, 64)
		x.Send(t, rdma.SendWR{ID: id, Op: rdma.OpSend, Flags: rdma.SendSignaled | f, SGL: []rdma.SGE{x.SGE(0, 4)}})
		AwaitOne(t, x.SendCQ, id, rdma.StatusSuccess)
		x.awaitArrival(t, y)
	}
	marks, minds := net.A.Attr().Solicited, net.B.Attr().Solicited
	if !marks {
		n, err := x.QP.PostSend([]rdma.SendWR{{Op: rdma.OpSend, Flags: rdma.SendSolicited}})
		if n != 0 || !errors.Is(err, rdma.ErrNotSupported) {
			t.Errorf("post a solicited send: %d, %v, want ErrNotSupported", n, err)
		}
	}
	if marks || !minds { // else nothing that the peer sends ends a wait for what is solicited
		if err := y.RecvCQ.Arm(true); err != nil {
			t.Fatal(err)
		}
		if minds { // else every receive wakes
			send(1, 0)
			quiet(t, y.RecvCQ, "for a completion that was not solicited")
		}
		send(2, x.solicited())
		notified(t, y.RecvCQ)
	}
	if !net.B.Attr().SolicitedErrors {
		return
	}
	if err := y.RecvCQ.Arm(true); err != nil {
		t.Fatal(err)
	}
	y.Recv(t, 3, 0, 1)
	if err := y.QP.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	notified(t, y.RecvCQ)
}

// testIdlePoll lets the provider poll: it asks after a completion, and what
// comes meanwhile arrives.
func testIdlePoll(t *testing.T, net Net) {
	x, y := net.Pair(t, Options{})
	p, ok := y.Ctx.(rdma.IdlePoller)
	if !ok {
		t.Log("this provider does not poll")
		return
	}
	var got atomic.Int32
	asked, all := make(chan struct{}, 1), make(chan struct{})
	take := func() {
		var wcs [4]rdma.WC
		for {
			n, err := y.RecvCQ.Poll(wcs[:])
			if err != nil && !errors.Is(err, rdma.ErrClosed) { // after the last message the test ends
				t.Error(err)
			}
			if n == 0 {
				return
			}
			if got.Add(int32(n)) == 2 {
				close(all)
			}
		}
	}
	y.RecvCQ.OnNotify(func() {
		if err := y.RecvCQ.Arm(false); err != nil && !errors.Is(err, rdma.ErrClosed) {
			t.Error(err)
		}
		take()
	})
	p.OnIdle(func() bool {
		select {
		case asked <- struct{}{}:
		default:
		}
		return got.Load() == 1
	})
	if err := y.RecvCQ.Arm(false); err != nil {
		t.Fatal(err)
	}
	wait := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(patience):
			t.Fatal("waited in vain for " + what)
		}
	}
	y.Recv(t, 1, 0, 64)
	y.Recv(t, 2, 64, 64)
	send := rdma.SendWR{Op: rdma.OpSend, SGL: []rdma.SGE{x.SGE(0, 4)}}
	x.Send(t, send)
	wait("the provider's question", asked)
	x.Send(t, send)
	wait("the message that came while it polled", all)
}

// testIdlePollAlone has completions come to both queues of a context at once: the provider asks by one
// goroutine at a time.
func testIdlePollAlone(t *testing.T, net Net) {
	const rounds = 300
	x, y := net.Pair(t, Options{})
	p, ok := y.Ctx.(rdma.IdlePoller)
	if !ok {
		t.Log("this provider does not poll")
		return
	}
	var inside, calls atomic.Int32
	p.OnIdle(func() bool {
		calls.Add(1)
		if inside.Add(1) > 1 {
			t.Error("two goroutines ask at a time")
		}
		for range 50 { // lets others run
			runtime.Gosched()
		}
		inside.Add(-1)
		return false
	})
	came := make(chan struct{}, 2*rounds)
	arm := func(cq rdma.CQ) {
		if err := cq.Arm(false); err != nil && !errors.Is(err, rdma.ErrClosed) { // after the last message the test ends
			t.Error(err)
		}
	}
	for _, cq := range []rdma.CQ{y.SendCQ, y.RecvCQ} {
		cq.OnNotify(func() {
			arm(cq)
			var wcs [4]rdma.WC
			for n := 1; n > 0; {
				n, _ = cq.Poll(wcs[:]) // closed: likewise
				for range n {
					came <- struct{}{}
				}
			}
		})
		arm(cq)
	}
	for i := range uint64(rounds) {
		x.Recv(t, i, 0, 64)
		y.Recv(t, i, 0, 64)
		for _, e := range []*End{x, y} {
			e.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.SGE(128, 44)}})
		}
		for range 2 {
			select {
			case <-came:
			case <-time.After(patience):
				t.Fatalf("round %d: waited in vain for a completion", i)
			}
		}
		AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess)
		AwaitOne(t, x.RecvCQ, i, rdma.StatusSuccess)
	}
	if calls.Load() == 0 {
		t.Error("the provider never asked")
	}
}

// testNotifyNeverLost plays ping-pong with waits on both sides: one lost
// notification stops it.
func testNotifyNeverLost(t *testing.T, net Net) {
	const rounds = 3000
	x, y := net.Pair(t, Options{})
	player := func(e *End, serve bool) {
		for i := range uint64(rounds) {
			if serve || i > 0 {
				// The receive was posted a round earlier.
				AwaitOne(t, e.RecvCQ, i, rdma.StatusSuccess)
			}
			e.Recv(t, i+1, 0, 64)
			e.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled | e.solicited(), SGL: []rdma.SGE{e.SGE(128, 44)}})
			AwaitOne(t, e.SendCQ, i, rdma.StatusSuccess)
		}
	}
	y.Recv(t, 0, 0, 64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		player(y, true)
	}()
	player(x, false)
	<-done
}

// testOnNotify answers every message from the call itself.
func testOnNotify(t *testing.T, net Net) {
	const rounds = 500
	x, y := net.Pair(t, Options{})
	wcs := make([]rdma.WC, 16)
	answer := func() {
		for armed := false; ; armed = !armed {
			n, err := y.RecvCQ.Poll(wcs)
			if errors.Is(err, rdma.ErrClosed) {
				return // by the end of the test, during a call
			}
			if err != nil {
				t.Errorf("poll: %v", err)
				return
			}
			for _, w := range wcs[:n] {
				if w.Status != rdma.StatusSuccess {
					return // flushed by the end of the test
				}
				if k, err := y.QP.PostRecv([]rdma.RecvWR{{SGE: y.SGE(0, 64)}}); k != 1 || err != nil {
					t.Errorf("post receive in the call: %d, %v", k, err)
				}
				if k, err := y.QP.PostSend([]rdma.SendWR{{Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{y.SGE(64, int(w.Bytes))}}}); k != 1 || err != nil {
					t.Errorf("post in the call: %d, %v", k, err)
				}
			}
			if n > 0 {
				armed = true // becomes false
				continue
			}
			if armed {
				return
			}
			if err := y.RecvCQ.Arm(false); err != nil && !errors.Is(err, rdma.ErrClosed) {
				t.Errorf("arm: %v", err)
			}
		}
	}
	y.RecvCQ.OnNotify(answer)
	if err := y.RecvCQ.Arm(false); err != nil {
		t.Fatal(err)
	}
	y.Recv(t, 0, 0, 64)
	for i := range uint64(rounds) {
		x.Recv(t, i, 0, 64)
		x.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(128, 1+int(i%60))}})
		if w := AwaitOne(t, x.RecvCQ, i, rdma.StatusSuccess); w.Bytes != uint32(1+i%60) {
			t.Fatalf("answer %d has %d bytes", i, w.Bytes)
		}
		AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess)
		AwaitOne(t, y.SendCQ, 0, rdma.StatusSuccess)
	}
}
