// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Numbers that are reserved, and that of multicast, are drawn again.
func TestDevice_drawQPN(t *testing.T) {
	d := silent(t).dev
	numbers := []rdma.QPN{0, FirstQPN - 1, rdma.MaxQPN, FirstQPN, 77}
	d.cfg.DrawQPN = func(*rand.Rand) rdma.QPN {
		n := numbers[0]
		numbers = numbers[1:]
		return n
	}
	for _, want := range []rdma.QPN{FirstQPN, 77} {
		if got := d.drawQPN(); got != want {
			t.Errorf("number %v, want %v", got, want)
		}
	}
}

// Contexts hear of the end of their device, once, and there are no new ones.
func TestDevice_Close(t *testing.T) {
	c := silent(t)
	if !c.dev.Close() || c.dev.Close() {
		t.Error("a device closes once")
	}
	if e := <-c.Events(); e.Kind != rdma.EventDeviceFatal || !errors.Is(e.Err, rdma.ErrClosed) {
		t.Errorf("event %v: %v", e.Kind, e.Err)
	}
	if _, err := c.dev.Open(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("open a closed device: %v", err)
	}
}

// An event of the port reaches all contexts.
func TestDevice_Tell(t *testing.T) {
	c := silent(t)
	other, err := c.dev.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	c.dev.Tell(rdma.EventPortDown)
	for _, ctx := range []rdma.Context{c, other} {
		if e := <-ctx.Events(); e.Kind != rdma.EventPortDown {
			t.Errorf("event %v", e.Kind)
		}
	}
}

// A receiver looks again at once as long as the context whose completions came last wants it to,
// and not for longer than maxPoll.
func TestPoller(t *testing.T) {
	c := silent(t)
	p := c.dev.Poller()
	if p.Idle() {
		t.Error("polls although nothing was delivered")
	}
	busy := true
	c.OnIdle(func() bool { return busy })
	c.dev.recent.Store(c)
	for range 2 {
		if !p.Idle() {
			t.Error("waits although the context is busy")
		}
	}
	p.since = time.Now().Add(-maxPoll)
	if p.Idle() || !p.since.IsZero() || c.dev.recent.Load() != nil {
		t.Error("polls for longer than it may")
	}
	c.dev.recent.Store(c)
	if busy = false; p.Idle() {
		t.Error("polls although the context is not busy")
	}
}
