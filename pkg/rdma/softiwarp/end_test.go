// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// Who waits for the end of a connection hears of it when both halves have ended, and not before.
func TestDevice_AwaitEnd(t *testing.T) {
	x, _ := connected(t, softiwarp.ConnectOptions{}, 4096)
	d := x.Dev.(*softiwarp.Device)
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := d.AwaitEnd(soon, x.QP); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("connection stands: %v", err)
	}
	later, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	others := make(chan error, 2)
	for range cap(others) { // who gives up does not make the others wait for ever
		go func() { others <- d.AwaitEnd(later, x.QP) }()
	}
	if err := d.AwaitEnd(soon, x.QP); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("connection stands: %v", err)
	}
	if err := d.Disconnect(x.QP); err != nil {
		t.Fatal(err)
	}
	for range 2 { // also one that has ended before
		if err := d.AwaitEnd(later, x.QP); err != nil {
			t.Error(err)
		}
	}
	for range cap(others) {
		if err := <-others; err != nil {
			t.Errorf("one of several who wait: %v", err)
		}
	}
	if err := x.QP.Close(); err != nil {
		t.Error(err)
	}
	if err := d.AwaitEnd(later, x.QP); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("queue pair is closed: %v", err)
	}
}

// TestMR_closedUnderWrite: a region is closed under WRITEs to a peer that takes nothing more. The program hears at once that
// they have failed, and the connection ends although the peer neither reads nor says anything.
func TestMR_closedUnderWrite(t *testing.T) {
	x, a, _ := connectToHand(t, softiwarp.ConnectOptions{Streamed: true}) // it sends at once
	const writes, size = 16, 8 << 20                                      // more than all buffers of TCP
	mr, err := x.PD.AllocMR(size, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range writes {
		wr := rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{{Addr: mr.Addr(), Length: size, LKey: mr.LKey()}}}
		if _, err := x.QP.PostSend([]rdma.SendWR{wr}); err != nil {
			t.Fatal(err)
		}
	}
	<-time.After(50 * time.Millisecond) // polls nothing: whoever waits for room in the socket has looked once
	if err := mr.Close(); err != nil {
		t.Fatal(err)
	}
	if st := x.QP.State(); st != rdma.QPError {
		t.Fatalf("the queue pair is in %v", st)
	}
	var wcs [writes + 1]rdma.WC
	n, err := x.SendCQ.Poll(wcs[:])
	if err != nil || n != writes || wcs[n-1].Status != rdma.StatusFlushed {
		t.Errorf("%d completions, %v: %v", n, err, wcs[:n])
	}
	if err := a.AwaitEnd(within(t), x.QP); err != nil {
		t.Errorf("the connection goes on: %v", err)
	}
}
