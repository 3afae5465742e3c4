// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// within returns what comes in time.
func within[T any](t *testing.T, what string, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(20 * time.Second):
		t.Fatalf("never: %s", what)
	}
	return v
}

// A program may start as many transfers as it likes before it waits for the first: one that is over takes no place of another.
func TestTransfer_manyBeforeWait(t *testing.T) {
	const many = 200 // more than wait at a time
	p := newPair(t, openIWARP)
	a, b := p.dial(t)
	buf := newBuffer(t, p.client, many)
	data := random(13, many)
	copy(buf.Bytes(), data)
	started := make(chan []*sdp.Transfer, 1)
	go func() {
		var under []*sdp.Transfer
		for i := range many {
			x, err := a.StartWrite(buf, i, 1)
			if err != nil {
				t.Error(err)
				break
			}
			under = append(under, x)
		}
		started <- under
	}()
	_ = b.SetReadDeadline(time.Now().Add(10 * time.Second)) // it has no error
	got := make([]byte, many)
	if _, err := io.ReadFull(b, got); err != nil || string(got) != string(data) {
		t.Errorf("other bytes arrived: %v", err)
	}
	for i, x := range within(t, "all writes are started", started) {
		if n, err := x.Wait(); n != 1 || err != nil {
			t.Errorf("write %d: %d bytes, %v", i, n, err)
		}
	}
	_, _ = a.Close(), b.Close()
}

// Close ends a transfer that waits to begin, too.
func TestTransfer_closeWhileStarting(t *testing.T) {
	const waiting = 128 // as many as may be
	p := newPair(t, openIWARP)
	a, b := p.dial(t)
	buf := newBuffer(t, p.client, waiting)
	var under []*sdp.Transfer
	for i := range waiting {
		x, err := a.StartRead(buf, i, 1, false)
		if err != nil {
			t.Fatal(err)
		}
		under = append(under, x)
	}
	more := make(chan error, 1)
	go func() {
		_, err := a.StartRead(buf, 0, 1, false)
		more <- err
	}()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := within(t, "the one that waits to begin ends", more); !errors.Is(err, net.ErrClosed) {
		t.Errorf("one more read: %v", err)
	}
	for _, x := range under {
		if n, err := x.Wait(); n != 0 || !errors.Is(err, net.ErrClosed) {
			t.Errorf("read of %d bytes: %v", n, err)
		}
	}
	_ = b.Close()
}
