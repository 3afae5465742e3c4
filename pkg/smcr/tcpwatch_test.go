// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// Idle connections and links have no goroutines.
func TestConn_idleHasNoGoroutine(t *testing.T) {
	p := newPair(t, func(c *smcr.Config) { c.RMBESizeBytes = 16 << 10 })
	var conns []*smcr.Conn
	open := func(n int) {
		for range n {
			a, b := p.dial(t)
			exchange(t, a, b)
			conns = append(conns, a, b)
		}
	}
	open(1)
	before := runtime.NumGoroutine()
	open(300) // that is a second link group, too
	if n := p.client.Stats().Groups; n != 2 {
		t.Fatalf("%d link groups, want 2", n)
	}
	waitFor(t, fmt.Sprintf("%d goroutines", before), func() bool { return runtime.NumGoroutine() <= before })
	for _, c := range conns {
		_ = c.Close()
	}
}

// The end of the TCP connection resets the connection above it at once if it
// was a reset, after a while if it was in order.
func TestConn_followsTCP(t *testing.T) {
	for _, tc := range []struct {
		name     string
		end      func(*smcr.Conn)
		min, max time.Duration
	}{
		{"reset", smcr.BreakTCP, 0, time.Second},
		{"orderly end", smcr.EndTCP, time.Second, 10 * time.Second},
		{"data", smcr.SpoilTCP, 0, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t)
			a, b := p.dial(t)
			other, peer := p.dial(t)
			exchange(t, a, b)
			begin := time.Now()
			tc.end(a)
			if err := b.SetReadDeadline(begin.Add(20 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read: %v, want ECONNRESET", err)
			}
			if d := time.Since(begin); d < tc.min || d > tc.max {
				t.Errorf("it took %v, want %v to %v", d, tc.min, tc.max)
			}
			exchange(t, other, peer)
			for _, c := range []*smcr.Conn{a, b, other, peer} {
				_ = c.Close()
			}
		})
	}
}

// An end that SMC-R has announced before is no reset.
func TestConn_ordersBeforeTCP(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	exchange(t, a, b)
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatalf("read: %v, want EOF", err)
	}
	smcr.EndTCP(a)
	waitFor(t, "end of the TCP connection", func() bool { return smcr.EndGrace(b) })
	if _, err := b.Write([]byte("still open")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(a, make([]byte, 10)); err != nil {
		t.Error(err)
	}
	_, _ = a.Close(), b.Close()
}

// A peer that goes on speaking after the end of the TCP connection has not died: it
// has other things to say before the end of this connection.
func TestConn_waitsForPeerThatSpeaks(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	other, peer := p.dial(t)
	exchange(t, a, b)
	smcr.EndTCP(a)
	waitFor(t, "end of the TCP connection", func() bool { return smcr.InGrace(b) })
	for range 3 {
		exchange(t, other, peer)
		smcr.EndGrace(b)
	}
	if _, err := a.Write([]byte("late")); err != nil {
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(b); err != nil || string(got) != "late" {
		t.Errorf("read %q, %v", got, err)
	}
	_, _, _ = b.Close(), other.Close(), peer.Close()
}
