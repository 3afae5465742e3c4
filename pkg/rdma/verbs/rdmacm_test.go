// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// An event that came before the end of the connection is heard of, whoever looks when.
func TestCMID_await(t *testing.T) {
	for range 100 { // select takes either of two
		i := &cmID{events: make(chan cmEvent, 1), ended: make(chan struct{})}
		i.handle(cmEvent{kind: eventEstablished})
		i.handle(cmEvent{kind: eventDisconnected})
		if e, err := i.await(t.Context(), eventEstablished); err != nil || e.kind != eventEstablished {
			t.Fatalf("established and ended: %v, %v", e.kind, err)
		}
		if _, err := i.await(t.Context(), eventEstablished); !errors.Is(err, rdma.ErrClosed) {
			t.Fatalf("ended: %v, want %v", err, rdma.ErrClosed)
		}
	}
	i := &cmID{events: make(chan cmEvent, 1), ended: make(chan struct{})}
	i.handle(cmEvent{kind: eventUnreachable, status: -113})
	if _, err := i.await(t.Context(), eventEstablished); err == nil || err.Error() != "unreachable: no route to host" {
		t.Errorf("another event: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("given up")
	cancel(cause)
	if _, err := i.await(ctx, eventEstablished); !errors.Is(err, cause) {
		t.Errorf("given up: %v", err)
	}
}

// testManager is a manager whose commands go into a pipe, and a function that returns what came out of that.
func testManager(t *testing.T) (*manager, func() []byte) {
	t.Helper()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWaiter(int(in.Fd()), "commands")
	if err := errors.Join(err, in.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.Close() })
	return &manager{w: w, page: make([]byte, 4096), ids: make(map[uint32]*cmID)}, func() []byte {
		t.Helper()
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(out)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
}

// The kernel is not told to connect a queue pair that is closed meanwhile, whose number another one may have.
func TestQP_closedBeforeItConnects(t *testing.T) {
	m, told := testManager(t)
	i := m.add(1, 1)
	w := &IWARP{Device: &Device{}, m: m}
	q := &qp{pd: &pd{ctx: &deviceContext{dev: w.Device}}, ibv: &ibvQP{}}
	q.state.Store(uint32(rdma.QPInit))
	if _, err := w.ready(q, i); err != nil {
		t.Fatal(err)
	}
	if err := i.command(cmResolveRoute, words(i.id, 1)); err != nil {
		t.Fatal(err)
	}
	q.ibv = nil // nothing to destroy
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	if err := i.command(cmConnect, words(i.id)); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("connect: %v, want %v", err, rdma.ErrClosed)
	}
	q.ibv, q.cm = &ibvQP{}, nil // as while it is being closed
	if _, err := w.ready(q, m.add(2, 2)); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("connect anew: %v, want %v", err, rdma.ErrClosed)
	}
	if b, want := told(), []byte{cmResolveRoute, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0}; !bytes.Equal(b, want) {
		t.Errorf("the kernel is told %x, want %x", b, want)
	}
}

// Nothing is done with an ID that is destroyed, whose number another one may have.
func TestCMID_destroyed(t *testing.T) {
	m, told := testManager(t)
	i := m.add(1, 1)
	i.close()
	other := m.add(1, 2)
	if err := i.command(cmDisconnect, words(i.id, 0)); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("disconnect: %v, want %v", err, rdma.ErrClosed)
	}
	if _, _, err := i.addrs(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("addresses: %v, want %v", err, rdma.ErrClosed)
	}
	if m.ids[1] != other {
		t.Error("the other one is forgotten")
	}
	if b := told(); len(b) < 4 || b[0] != cmDestroy || len(b) != 8+16 {
		t.Errorf("the kernel is told %x, want to destroy it", b)
	}
}
