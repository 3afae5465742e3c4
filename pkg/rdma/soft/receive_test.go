// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"
)

// In the midst of a stream the receiver looks for more before it sleeps: whoever it asks then is asked more than once.
func TestUDPWire_looksForMore(t *testing.T) {
	cfg := Config{Addr: netip.MustParseAddr("127.93.0.1"), Port: 14793, SocketBufferBytes: 1 << 20}
	w, err := openUDP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	var asked, most atomic.Int32 // since the last arrival, and the most ever
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = w.Receive(func([]Message) { asked.Store(0) }, func() bool {
			if n := asked.Add(1); n > most.Load() {
				most.Store(n)
			}
			return false
		})
	}()
	defer func() { _ = w.Close(); <-done }()
	from, err := net.Dial("udp4", netip.AddrPortFrom(cfg.Addr, cfg.Port).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = from.Close() }()
	const patience = 10 * time.Second // on a machine that is slow at each step
	for end := time.Now().Add(patience); most.Load() < 5; {
		if time.Now().After(end) {
			t.Fatalf("it looked %d times", most.Load())
		}
		if _, err := from.Write(make([]byte, streamBytes)); err != nil {
			t.Fatal(err)
		}
	}
}
