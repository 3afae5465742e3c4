// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

// pipes returns a way to dial a server, and how many connections were opened and closed.
func pipes(t *testing.T) (dial DialFunc, opened, ended *atomic.Int64) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		Serve(l, new(Held))
	}()
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		<-served
	})
	opened, ended = new(atomic.Int64), new(atomic.Int64)
	return func(ctx context.Context) (net.Conn, func() error, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
		opened.Add(1)
		return c, func() error { ended.Add(1); return nil }, err
	}, opened, ended
}

// Round trips are made on all connections, and each counts.
func TestLoad_Run_echo(t *testing.T) {
	for _, tt := range []struct {
		name        string
		conns, want int
	}{
		{"no number", 0, 1},
		{"one", 1, 1},
		{"several", 5, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dial, opened, ended := pipes(t)
			l := Load{Kind: Echo, SizeBytes: 100, Conns: tt.conns, Duration: 20 * time.Millisecond}
			r, err := l.Run(t.Context(), dial)
			if err != nil {
				t.Fatal(err)
			}
			if n := opened.Load(); n != int64(tt.want) || ended.Load() != n {
				t.Errorf("%d connections were opened and %d closed, want %d", n, ended.Load(), tt.want)
			}
			if r.Ops < tt.want || r.Bytes != int64(r.Ops)*100 || r.Elapsed < l.Duration {
				t.Errorf("it gave %+v", r)
			}
			if r.P50 <= 0 || r.P99 < r.P50 {
				t.Errorf("p50 is %v, p99 %v", r.P50, r.P99)
			}
		})
	}
}

// A connection that cannot be made ends the load, and is told.
func TestLoad_Run_echoFails(t *testing.T) {
	good, _, ended := pipes(t)
	failed := errors.New("made to fail")
	var n atomic.Int64
	dial := func(ctx context.Context) (net.Conn, func() error, error) {
		if n.Add(1) == 2 {
			return nil, nil, failed
		}
		return good(ctx)
	}
	_, err := Load{Kind: Echo, SizeBytes: 8, Conns: 3, Duration: time.Millisecond}.Run(t.Context(), dial)
	if !errors.Is(err, failed) {
		t.Errorf("error: %v", err)
	}
	if ended.Load() != 2 {
		t.Errorf("%d connections were closed, want the other 2", ended.Load())
	}
}

// Long messages need no hundred turns before they count.
func TestLoad_turns(t *testing.T) {
	for size, want := range map[int]int{64: warmTurns, 64 << 10: 64, 1 << 20: 4} {
		var n int
		times, took, err := Load{SizeBytes: size}.turns(func() error { n++; return nil })
		if err != nil || n != want || len(times) != 0 || took != 0 {
			t.Errorf("%d bytes: %d turns before, want %d; %d counted in %v; %v", size, n, want, len(times), took, err)
		}
	}
}
