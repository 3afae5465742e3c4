// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"fmt"
	"net"
	"slices"
	"testing"
	"time"
)

// TestAttack_silentScrapers: a source whose connections are silent gets a share of the places. Neither other
// sources nor good connections of the same source wait until its silent ones time out.
func TestAttack_silentScrapers(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := Listener(inner, nil)
	dial := func(from string) net.Conn {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: 10 * time.Second}
		c, err := d.DialContext(t.Context(), "tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	// As a server that serves each connection until its end.
	accepted := make(chan net.Conn)
	go func() {
		defer close(accepted)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	next := func(from string) net.Conn {
		t.Helper()
		dial(from)
		select {
		case c := <-accepted:
			t.Cleanup(func() { c.Close() })
			return c
		case <-time.After(10 * time.Second):
			t.Fatalf("no place for %s", from)
			return nil
		}
	}
	t.Cleanup(func() {
		ln.Close()
		for c := range accepted {
			c.Close()
		}
	})
	var stranger []net.Conn
	for range 2 * maxConns {
		stranger = append(stranger, next("127.0.0.2"))
	}
	next("127.0.0.3")
	fair := ln.(*fairListener)
	fair.mu.Lock()
	sources, share := len(fair.open), len(fair.open[sourceOf("127.0.0.2:1")])
	fair.mu.Unlock()
	if share != maxSourceConns || sources != 2 {
		t.Errorf("%d connections of the stranger, want %d; %d sources, want 2", share, maxSourceConns, sources)
	}
	for i, c := range stranger {
		err := c.SetDeadline(time.Time{}) // fails if it is closed
		if last := i >= len(stranger)-maxSourceConns; (err == nil) != last {
			t.Errorf("connection %d of %d: %v", i, len(stranger), err)
		}
	}
	// So many other sources that together they take all places.
	var others []net.Conn
	for i := range 2 * maxConns {
		others = append(others, next(fmt.Sprintf("127.0.0.%d", 10+i%(2*maxConns/maxSourceConns))))
	}
	scraper := next("127.0.0.4")
	for range maxConns {
		others = append(others, next("127.0.0.5"))
	}
	if err := scraper.SetDeadline(time.Time{}); err != nil {
		t.Errorf("the only connection of its source ended for strangers': %v", err)
	}
	for _, c := range slices.Concat(stranger, others) {
		c.Close()
	}
	scraper.Close()
	fair.mu.Lock()
	defer fair.mu.Unlock()
	if len(fair.open) > 1 || fair.all != len(fair.open[sourceOf("127.0.0.3:1")]) {
		t.Errorf("%d connections of %d sources are known after all but one have gone", fair.all, len(fair.open))
	}
}
