// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// sums starts a client and returns what it writes.
func sums(t *testing.T, args ...string) <-chan Sum {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, args, w)
		_ = w.Close()
	}()
	out := make(chan Sum)
	go func() {
		defer close(out)
		for d := json.NewDecoder(r); ; {
			var s Sum
			if d.Decode(&s) != nil {
				return
			}
			select {
			case out <- s:
			case <-ctx.Done(): // the writer must not be kept
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("traffic %v: %v", args, err)
		}
		for range out {
		}
	})
	return out
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func TestClients_tellLoss(t *testing.T) {
	// A server that answers the first message of a connection only.
	once := listen(t)
	go func() {
		for {
			c, err := once.Accept()
			if err != nil {
				return
			}
			_, _ = io.CopyN(c, c, 10)
			_ = c.Close()
		}
	}()
	for _, tt := range []struct {
		name, command string
		want          func(Sum) bool
	}{
		{"load has no failure", "load", func(s Sum) bool { return s.OK > 2 && s.Failed == 0 && !s.Ended }},
		{"hold sees the end", "hold", func(s Sum) bool { return s.OK == 1 && s.Failed == 1 && s.Reset == 1 && s.Ended && len(s.Errors) == 1 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			timeout := time.After(10 * time.Second)
			var s Sum
			for lines := sums(t, tt.command, once.Addr().String(), "--bytes=10"); !tt.want(s); {
				select {
				case s = <-lines:
				case <-timeout:
					t.Fatalf("the last line is %+v", s)
				}
			}
		})
	}
}

func TestServe(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	l := listen(t)
	address := l.Addr().String()
	_ = l.Close() // a port that is free
	done := make(chan error, 1)
	go func() { done <- run(ctx, []string{"serve", address}, io.Discard) }()
	c := client{size: 100_000}
	deadline := time.Now().Add(10 * time.Second)
	for {
		conn, err := (&client{address: address}).dial(ctx)
		if err == nil {
			err = c.exchange(conn)
			_ = conn.Close()
		}
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond) // polls the server that starts
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestConnect: connect says what became of it, on all kinds of sockets.
func TestConnect(t *testing.T) {
	open := listen(t)
	closed := listen(t)
	_ = closed.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	busy := listen(t)
	_, port, _ := net.SplitHostPort(busy.Addr().String())
	_ = busy.Close() // a port that is free
	go func() { done <- run(ctx, []string{"full", ":" + port}, io.Discard) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	said := func(address string, flags ...string) string {
		t.Helper()
		var out strings.Builder
		if err := run(t.Context(), append([]string{"connect", address}, flags...), &out); err != nil {
			t.Fatal(err)
		}
		what, _, _ := strings.Cut(out.String(), " after ")
		return what
	}
	for _, kind := range []string{"--blocking=false", "--blocking", "--mapped"} {
		if got := said(open.Addr().String(), kind); got != "connected" {
			t.Errorf("%s: %s, want connected", kind, got)
		}
		if got := said(closed.Addr().String(), kind); got != "connection refused" {
			t.Errorf("%s: %s, want connection refused", kind, got)
		}
		deadline := time.Now().Add(10 * time.Second)
		for got := ""; got != "own timeout"; {
			if got = said("127.0.0.1:"+port, kind, "--timeout=100ms"); time.Now().After(deadline) {
				t.Fatalf("%s to a full backlog: %s", kind, got)
			}
		}
	}
}
