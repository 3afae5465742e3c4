// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"context"
	"errors"
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
