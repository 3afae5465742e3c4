// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMemory(t *testing.T) {
	m, err := MapMemory(1)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(m.Bytes()); n != os.Getpagesize() || m.All().Addr() == 0 || m.All().Addr()%uint64(n) != 0 {
		t.Errorf("%d bytes at %#x", n, m.All().Addr())
	}
	if !m.Retain() {
		t.Error("cannot be held while it is mapped")
	}
	for range 2 {
		m.Bytes()[0] = 1 // the memory stays mapped until it is dropped for the last region
		if err := m.Drop(); err != nil {
			t.Fatal(err)
		}
	}
	if m.Retain() {
		t.Error("can be held after the last drop")
	}
}

func TestPart(t *testing.T) {
	m, err := MapMemory(8192)
	if err != nil {
		t.Fatal(err)
	}
	all := m.All()
	for _, c := range []struct {
		name        string
		off, length int
		want        int // bytes; 0: refused
	}{
		{"all", 0, 0, 8192},
		{"all by its length", 0, 8192, 8192},
		{"last byte", 8191, 1, 1},
		{"in the middle", 5000, 100, 100},
		{"one too far", 1, 8192, 0},
		{"nothing behind", 8192, 0, 0},
		{"nothing inside", 5, 0, 0},
		{"behind", 8193, 1, 0},
		{"before", -1, 5, 0},
		{"negative length", 5, -1, 0},
		{"wraps", 1, int(^uint(0) >> 1), 0},
	} {
		p, err := all.Part(c.off, c.length)
		if c.want == 0 {
			if !errors.Is(err, rdma.ErrInvalid) {
				t.Errorf("%s: %v, want ErrInvalid", c.name, err)
			}
			continue
		}
		if err != nil || len(p.Bytes()) != c.want || cap(p.Bytes()) != c.want || p.Addr() != all.Addr()+uint64(c.off) {
			t.Errorf("%s: %d bytes at %#x of %#x, %v", c.name, len(p.Bytes()), p.Addr(), all.Addr(), err)
		}
		if got := p.IOVA() % 4096; got != uint64(c.off%4096) {
			t.Errorf("%s: address %#x in its page", c.name, got)
		}
		if inner, err := p.Part(0, 1); err != nil || inner.Addr() != p.Addr() || inner.Drop() != nil {
			t.Errorf("%s: first byte of it at %#x, %v", c.name, inner.Addr(), err)
		}
		if err := p.Drop(); err != nil {
			t.Error(err)
		}
	}
	if err := all.Drop(); err != nil {
		t.Fatal(err)
	}
	if _, err := all.Part(0, 0); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("part of unmapped memory: %v", err)
	}
}

func TestValidAccess(t *testing.T) {
	for a, want := range map[rdma.Access]bool{
		0: true, rdma.LocalWrite: true, rdma.RemoteRead: true, rdma.RemoteWrite | rdma.LocalWrite: true,
		rdma.RemoteWrite: false, rdma.RemoteWrite | rdma.RemoteRead: false,
		rdma.StableRead | rdma.RemoteRead: true, rdma.StableRead: false, rdma.StableRead | rdma.LocalWrite: false, 16: false,
	} {
		if got := ValidAccess(a); got != want {
			t.Errorf("access %#x: %v, want %v", a, got, want)
		}
	}
}

func event(k rdma.EventKind, n rdma.QPN) rdma.AsyncEvent { return rdma.AsyncEvent{Kind: k, QPN: n} }

func all(e *Events) (out []rdma.AsyncEvent) {
	for {
		synctest.Wait()
		select {
		case ev, ok := <-e.Out():
			if !ok {
				return out
			}
			out = append(out, ev)
		default:
			return out
		}
	}
}

func TestEvents_keepsQueuePairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := NewEvents()
		defer e.Close()
		// One event is in the channel and one in the sender's hand; these two are not counted below.
		e.Post(event(rdma.EventPortDown, 0))
		synctest.Wait()
		e.Post(event(rdma.EventPortActive, 0))
		synctest.Wait()
		e.Post(event(rdma.EventQPFatal, 7))
		e.Post(event(rdma.EventQPFatal, 8))
		e.Post(event(rdma.EventQPFatal, 7)) // told already
		e.Post(event(rdma.EventPathDown, 7))
		for range portEvents {
			e.Post(event(rdma.EventPortDown, 0))
		}
		e.Post(event(rdma.EventGIDChange, 0)) // instead of the oldest
		e.Forget(8)
		got := all(e)[2:]
		want := []rdma.AsyncEvent{event(rdma.EventQPFatal, 7), event(rdma.EventPathDown, 7)}
		for range portEvents - 1 {
			want = append(want, event(rdma.EventPortDown, 0))
		}
		want = append(want, event(rdma.EventGIDChange, 0))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// TestEvents_keepsAccusation: the reason why a queue pair failed may become known only after the failure.
func TestEvents_keepsAccusation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := NewEvents()
		defer e.Close()
		for range 2 { // one is in the channel and one in hand
			e.Post(event(rdma.EventPortDown, 0))
			synctest.Wait()
		}
		flushed := rdma.AsyncEvent{Kind: rdma.EventQPFatal, QPN: 7, Err: errors.New("flushed")}
		accused := rdma.AsyncEvent{Kind: rdma.EventQPFatal, QPN: 7, Err: rdma.ErrPeerAccess}
		e.Post(flushed)
		e.Post(accused)
		e.Post(flushed)
		if got := all(e)[2:]; len(got) != 1 || !errors.Is(got[0].Err, rdma.ErrPeerAccess) {
			t.Errorf("events %v, want the one that accuses the peer", got)
		}
	})
}

// TestEvents_fatalComesLast: however many events the reader has not taken, the event about the device's end comes
// after Close.
func TestEvents_fatalComesLast(t *testing.T) {
	for before := range 5 {
		synctest.Test(t, func(t *testing.T) {
			e := NewEvents()
			for i := range before {
				e.Post(event(rdma.EventQPFatal, rdma.QPN(i+2)))
				synctest.Wait()
			}
			fatal := rdma.AsyncEvent{Kind: rdma.EventDeviceFatal, Err: errors.New("gone")}
			e.Post(fatal)
			e.Close()
			got := all(e)
			if len(got) == 0 || got[len(got)-1].Kind != rdma.EventDeviceFatal {
				t.Errorf("after %d events: %+v, the fatal one is missing", before, got)
			}
			if _, open := <-e.Out(); open {
				t.Error("the channel is open")
			}
		})
	}
}

// A closed queue pair has no more events, except one that accuses its peer.
func TestEvents_forget(t *testing.T) {
	e := &Events{out: make(chan rdma.AsyncEvent, 1), kick: make(chan struct{}, 1), done: make(chan struct{})}
	e.Post(rdma.AsyncEvent{Kind: rdma.EventPathDown, QPN: 5})
	e.Post(rdma.AsyncEvent{Kind: rdma.EventQPFatal, QPN: 5, Err: fmt.Errorf("NAK: %w", rdma.ErrPeerAccess)})
	e.Post(rdma.AsyncEvent{Kind: rdma.EventQPFatal, QPN: 6, Err: rdma.ErrCQOverrun})
	e.Forget(5)
	e.Forget(6)
	if len(e.queue) != 1 || e.queue[0].QPN != 5 || e.queue[0].Kind != rdma.EventQPFatal {
		t.Errorf("left: %+v", e.queue)
	}
}
