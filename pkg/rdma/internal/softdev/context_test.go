// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// objects are one object of a context of each kind.
type objects struct {
	pd rdma.PD
	cq rdma.CQ
	mr rdma.MR
	qp rdma.QP
}

func (c *deviceContext) objects(t *testing.T) (o objects) {
	t.Helper()
	var errs [4]error
	o.pd, errs[0] = c.AllocPD()
	o.cq, errs[1] = c.CreateCQ(4)
	o.mr, errs[2] = o.pd.AllocMR(4096, 0)
	o.qp, errs[3] = o.pd.CreateQP(rdma.QPConfig{SendCQ: o.cq, RecvCQ: o.cq, MaxSendWR: 4, MaxRecvWR: 4})
	if err := errors.Join(errs[:]...); err != nil {
		t.Fatal(err)
	}
	return o
}

// A completion queue has at least one entry and at most maxCQE.
func TestContext_CreateCQ(t *testing.T) {
	c := silent(t)
	for depth, want := range map[int]error{-1: rdma.ErrInvalid, 0: rdma.ErrInvalid, 1: nil, MaxCQE: nil, MaxCQE + 1: rdma.ErrInvalid} {
		if _, err := c.CreateCQ(depth); !errors.Is(err, want) {
			t.Errorf("depth %d: %v, want %v", depth, err, want)
		}
	}
}

// An object that other objects use cannot be closed before they are.
func TestContext_closeInUse(t *testing.T) {
	c := silent(t)
	o, two := c.objects(t), c.objects(t)
	for _, step := range []struct {
		name  string
		close func() error
		want  error
	}{
		{"domain with both", o.pd.Close, rdma.ErrBusy},
		{"completion queue of a queue pair", o.cq.Close, rdma.ErrBusy},
		{"queue pair", o.qp.Close, nil},
		{"domain with a region", o.pd.Close, rdma.ErrBusy},
		{"completion queue", o.cq.Close, nil},
		{"region", o.mr.Close, nil},
		{"domain", o.pd.Close, nil},
		{"region of another one", two.mr.Close, nil},
		{"domain with a queue pair", two.pd.Close, rdma.ErrBusy},
	} {
		if err := step.close(); !errors.Is(err, step.want) {
			t.Errorf("close the %s: %v, want %v", step.name, err, step.want)
		}
	}
	if _, err := o.pd.AllocMR(4096, 0); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("a region of a closed domain: %v", err)
	}
}

// Close closes every object of the context, in whatever order they were made, and leaves nothing at the
// device. A second Close does nothing.
func TestContext_Close(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	two := c.objects(t)
	for range 2 {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	if _, open := <-c.Events(); open {
		t.Error("events go on")
	}
	d := c.dev
	if len(c.pds)+len(c.cqs)+len(d.contexts)+d.qps.used+d.lkeys.used+d.rkeys.used != 0 {
		t.Errorf("%d domains, %d completion queues, %d contexts, %d queue pairs, %d and %d keys are left",
			len(c.pds), len(c.cqs), len(d.contexts), d.qps.used, d.lkeys.used, d.rkeys.used)
	}
	_, errPD := c.AllocPD()
	_, errCQ := c.CreateCQ(1)
	_, errQP := o.pd.CreateQP(rdma.QPConfig{SendCQ: o.cq, RecvCQ: o.cq, MaxSendWR: 1, MaxRecvWR: 1})
	_, errPoll := two.cq.Poll(make([]rdma.WC, 1))
	for what, err := range map[string]error{"AllocPD": errPD, "CreateCQ": errCQ, "CreateQP": errQP, "Poll": errPoll} {
		if !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
}

// A user that closes its context because the device is being closed waits for that: nothing of the user's is called
// afterwards, and nothing is in use any more.
func TestContext_closeDuringDeviceClose(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	if err := o.mr.Close(); err != nil { // which waits for the owners of queue pairs in any case
		t.Fatal(err)
	}
	q := o.qp.(*silentQP)
	q.Lock()
	gone := make(chan struct{})
	go func() {
		c.dev.Close()
		close(gone)
	}()
	if ev := <-c.Events(); ev.Kind != rdma.EventDeviceFatal {
		t.Errorf("event %v", ev)
	}
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	select {
	case err := <-closed:
		t.Errorf("closed while a queue pair is in use: %v", err)
	case <-time.After(50 * time.Millisecond):
		q.Unlock()
		if err := <-closed; err != nil {
			t.Error(err)
		}
	}
	<-gone
}

// shut leaves the memory mapped, because the user may be reading it, but takes the peers' access away.
func TestContext_shutKeepsMemory(t *testing.T) {
	c := silent(t)
	o := c.objects(t)
	if !c.dev.Close() || c.dev.Close() {
		t.Error("the device is not closed once")
	}
	o.mr.Bytes()[0] = 1 // would fault
	if _, err := o.pd.AllocMR(4096, 0); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("a region of a device that is closed: %v", err)
	}
	if c.dev.lkeys.used+c.dev.rkeys.used != 0 || c.dev.qps.used != 0 {
		t.Errorf("%d and %d keys, %d queue pairs are left", c.dev.lkeys.used, c.dev.rkeys.used, c.dev.qps.used)
	}
	if err := c.Close(); err != nil || len(c.pds) != 0 {
		t.Errorf("close: %v, %d domains are left", err, len(c.pds))
	}
}
