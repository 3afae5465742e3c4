// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// RFC 7609 §4.5.2: small pieces may wait for others, and go by themselves at
// last; and none waits once the program does not want it.
func TestSection4_5_2_CoalesceTimer(t *testing.T) {
	const delay = 200 * time.Millisecond
	a, b := newPair(t, func(c *smcr.Config) { c.Coalesce = smcr.Coalesce{Bytes: 1000, Delay: delay} }).dial(t)
	defer func() { _, _ = a.Close(), b.Close() }()
	buf := make([]byte, 4096)
	write := func(n int) {
		t.Helper()
		if _, err := a.Write(buf[:n]); err != nil {
			t.Fatal(err)
		}
	}
	arrives := func(n int) {
		t.Helper()
		_ = b.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.ReadFull(b, buf[:n]); err != nil {
			t.Fatal(err)
		}
	}
	sent := func() uint64 { return a.Info().CDCSent }

	before, start := sent(), time.Now()
	for range 10 {
		write(10)
	}
	arrives(100)
	if n, took := sent()-before, time.Since(start); took < delay || n >= 10 {
		t.Errorf("the timer sent %d messages, the data took %v", n, took)
	}

	before, start = sent(), time.Now()
	for range 10 {
		write(10)
	}
	if err := a.Flush(); err != nil {
		t.Fatal(err)
	}
	arrives(100)
	if n, took := sent()-before, time.Since(start); n >= 10 && took < delay {
		t.Errorf("%d messages after %v", n, took)
	}

	write(900)
	write(100) // enough
	arrives(1000)

	write(10)
	if err := a.SetNoDelay(true); err != nil {
		t.Fatal(err)
	}
	arrives(10)
	start = time.Now()
	for range 50 {
		write(10)
		arrives(10)
	}
	if took := time.Since(start); took > 25*delay {
		t.Errorf("50 round trips without delay took %v", took)
	}
	if err := a.SetNoDelay(false); err != nil {
		t.Fatal(err)
	}
	write(10)
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(b); len(got) != 10 || err != nil {
		t.Errorf("%d bytes before the end, %v", len(got), err)
	}
}

// A stream in pieces of all sizes through a small window does not get stuck.
func TestConn_coalesceStream(t *testing.T) {
	a, b := newPair(t, func(c *smcr.Config) {
		small(c)
		c.Coalesce = smcr.Coalesce{Bytes: 3000, Delay: time.Millisecond}
	}).dial(t)
	defer func() { _, _ = a.Close(), b.Close() }()
	const total = 600_000
	go func() {
		buf := make([]byte, 20_000)
		for left, n := total, 1; left > 0; left, n = left-n, n*7%19_997+1 {
			n = min(n, left)
			if _, err := a.Write(buf[:n]); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	_ = b.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := io.ReadFull(b, make([]byte, total)); err != nil {
		t.Errorf("after %d of %d bytes: %v", n, total, err)
	}
}

func TestConfig_coalesce(t *testing.T) {
	for _, tt := range []struct {
		c    smcr.Coalesce
		want string
	}{
		{smcr.Coalesce{Bytes: 1, Delay: time.Millisecond}, "Coalesce.Bytes 1"},
		{smcr.Coalesce{Bytes: 8193, Delay: time.Millisecond}, "Coalesce.Bytes 8193"},
		{smcr.Coalesce{Delay: time.Millisecond}, "Coalesce.Bytes 0"},
		{smcr.Coalesce{Bytes: 100}, "Coalesce.Delay 0s"},
		{smcr.Coalesce{Bytes: 100, Delay: time.Second}, "Coalesce.Delay 1s"},
	} {
		d := newFakeFabric().device("c", 1)
		if err := (smcr.Config{Devices: []rdma.Device{d}, Coalesce: tt.c}).Validate(); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.c, err, tt.want)
		}
	}
}
