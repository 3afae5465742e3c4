// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// sendsDevice is a fake device that counts how often the queue of its SENDs is
// armed. A mute one never calls for it, and SENDs take a while to complete.
type sendsDevice struct {
	rdma.Device
	arms atomic.Int32
	mute bool
	last atomic.Int64           // when something was posted
	post atomic.Pointer[func()] // nil: nobody wants to know that something is posted
	call func()                 // by a queue, of the stack
}

// sendTime is how long SENDs take on a mute device.
const sendTime = 5 * time.Millisecond

func (d *sendsDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return sendsContext{c, d}, err
}

type sendsContext struct {
	rdma.Context
	d *sendsDevice
}

func (c sendsContext) CreateCQ(n int) (rdma.CQ, error) {
	q, err := c.Context.CreateCQ(n)
	return &sendsCQ{CQ: q, d: c.d}, err
}

func (c sendsContext) AllocPD() (rdma.PD, error) {
	p, err := c.Context.AllocPD()
	return sendsPD{p, c.d}, err
}

type sendsPD struct {
	rdma.PD
	d *sendsDevice
}

func (p sendsPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	send, recv := cfg.SendCQ.(*sendsCQ), cfg.RecvCQ.(*sendsCQ)
	send.sends.Store(true)
	cfg.SendCQ, cfg.RecvCQ = send.CQ, recv.CQ
	q, err := p.PD.CreateQP(cfg)
	return sendsQP{q, p.d}, err
}

type sendsQP struct {
	rdma.QP
	d *sendsDevice
}

func (q sendsQP) PostSend(wrs []rdma.SendWR) (int, error) {
	q.d.last.Store(time.Now().UnixNano())
	if f := q.d.post.Load(); f != nil {
		(*f)()
	}
	return q.QP.PostSend(wrs)
}

type sendsCQ struct {
	rdma.CQ
	d     *sendsDevice
	sends atomic.Bool // it is the queue of SENDs
}

func (q *sendsCQ) OnNotify(f func()) {
	q.d.call = f
	q.CQ.OnNotify(f)
}

func (q *sendsCQ) Arm(solicited bool) error {
	if q.sends.Load() {
		q.d.arms.Add(1)
		if q.d.mute {
			return nil
		}
	}
	return q.CQ.Arm(solicited)
}

func (q *sendsCQ) Poll(wcs []rdma.WC) (int, error) {
	if q.sends.Load() && q.d.mute && time.Since(time.Unix(0, q.d.last.Load())) < sendTime {
		return 0, nil
	}
	return q.CQ.Poll(wcs)
}

// connectedBy returns both ends of a connection whose client has the device d.
func connectedBy(t *testing.T, d *sendsDevice) (a, b *smcr.Conn) {
	t.Helper()
	f := newFakeFabric()
	d.Device = f.device("c", 1)
	p := &pair{fabric: f, client: newStack(t, d), server: newStack(t, f.device("s", 2))}
	var err error
	if p.l, err = smcr.Listen(t.Context(), p.server, "tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.l.Close() })
	a, b = p.dial(t)
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

// In a dialogue nobody waits to hear that a message was delivered: the answer
// says so.
func TestStack_dialogueDoesNotAwaitItsSends(t *testing.T) {
	var d sendsDevice
	a, b := connectedBy(t, &d)
	exchange(t, a, b)
	before := d.arms.Load()
	for range 100 {
		exchange(t, a, b)
	}
	if n := d.arms.Load() - before; n > 10 { // a pause of the machine may be one
		t.Errorf("the queue of SENDs was armed %d times for 100 round trips", n)
	}
	sent := make(chan error, 1)
	go func() {
		_, err := a.Write(make([]byte, 8<<20))
		sent <- err
	}()
	if _, err := io.CopyN(io.Discard, b, 8<<20); err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if d.arms.Load() == before {
		t.Error("a stream did not await its SENDs")
	}
}

// What was sent is looked for also if the device does not call: it may lose one
// call, and soft RoCE tells only in its queue that a queue pair gave up.
func TestStack_findsSendsThatNobodyCalledFor(t *testing.T) {
	d := sendsDevice{mute: true}
	a, b := connectedBy(t, &d)
	const size = 8 << 20 // 16 times the send buffer
	done := make(chan error, 1)
	go func() {
		if _, err := a.Write(make([]byte, size)); err != nil {
			done <- err
			return
		}
		done <- a.CloseWrite()
	}()
	if err := b.SetReadDeadline(time.Now().Add(8 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, b); n != size || err != nil {
		t.Fatalf("received %d bytes: %v", n, err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
