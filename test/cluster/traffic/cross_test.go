// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestCross: a socket that connects to its own port opens the connection from both sides.
func TestCross(t *testing.T) {
	cross := func(at time.Time, host, after string) (said string, err error) {
		for range 20 { // a port that was free may be somebody else's, and this machine may be busy
			l := listen(t)
			_, port, _ := net.SplitHostPort(l.Addr().String())
			_ = l.Close()
			var out strings.Builder
			err = run(t.Context(), []string{"cross", net.JoinHostPort(host, port) + after, fmt.Sprintf("--at=%d", at.UnixMilli())}, &out)
			said = out.String()
			if late := err != nil && time.Since(at) < time.Minute; !late && !strings.HasPrefix(said, syscall.EADDRINUSE.Error()) {
				break
			}
			at = time.Now().Add(50 * time.Millisecond)
		}
		return said, err
	}
	at := time.Now().Add(200 * time.Millisecond)
	said, err := cross(at, "127.0.0.1", "/100ms")
	if err != nil || !strings.HasPrefix(said, "connected after ") {
		t.Errorf("to itself: %q, %v", said, err)
	}
	if time.Now().Before(at.Truncate(time.Millisecond).Add(100 * time.Millisecond)) {
		t.Error("it did not wait")
	}
	said, err = cross(time.Now(), "127.0.0.2", "")
	if err != nil || !strings.HasPrefix(said, "connection refused after ") {
		t.Errorf("to nobody: %q, %v", said, err)
	}
	if said, err = cross(time.Now().Add(-time.Hour), "127.0.0.1", ""); err == nil || !strings.Contains(err.Error(), "too late") {
		t.Errorf("after the moment to connect: %q, %v, want that it is too late", said, err)
	}
}

// TestGreet: who is connected to somebody else than it thinks says so.
func TestGreet(t *testing.T) {
	l := listen(t)
	go func() {
		if c, err := l.Accept(); err == nil {
			_, _ = io.WriteString(c, "192.0.2.1:7\n")
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if err := greet(c); err == nil || !strings.Contains(err.Error(), "192.0.2.1:7 is who speaks") {
		t.Errorf("%v, want that another one speaks", err)
	}
}
