// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"slices"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// isEmpty reports whether memory has nothing but zeros, as pages have that were given back.
func isEmpty(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// send sends bytes from a to b, which reads them.
func send(tb testing.TB, a, b *smcr.Conn, bytesToSend []byte) {
	tb.Helper()
	go func() { _, _ = a.Write(bytesToSend) }() // the reader sees what counts
	got := make([]byte, len(bytesToSend))
	if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, bytesToSend) {
		tb.Fatalf("other bytes arrived, %v", err)
	}
	waitFor(tb, "delivery", func() bool { return smcr.Delivered(a) })
}

// The buffers of a connection on which nothing moves give their pages back, on devices that do not pin
// them, whatever went through them, and the connection goes on.
func TestStack_idleBuffersHaveNoPages(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024, small)
	a, b := p.dial(t)
	for round, size := range []int{1, 100_000, 3, 16 << 10, 5000} {
		send(t, a, b, bytes.Repeat([]byte{byte(round + 1)}, size))
		if isEmpty(smcr.SendBuffer(a)) || isEmpty(smcr.RMBE(b)) {
			t.Error("the bytes were not in the buffers")
		}
		smcr.CoolDown(smcr.StackOf(a))
		smcr.CoolDown(smcr.StackOf(b))
		if !isEmpty(smcr.SendBuffer(a)) {
			t.Errorf("after %d bytes the send buffer has pages", size)
		}
		if !isEmpty(smcr.RMBE(b)) {
			t.Errorf("after %d bytes the RMBE has pages", size)
		}
	}
}

// What the peer wrote and did not announce yet stays in the RMBE, and so do its pages after a
// WRITE that was made twice.
func TestStack_unannouncedBytesStay(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024, small)
	a, b := p.dial(t)
	send(t, a, b, []byte("hello"))
	rkey, addr := smcr.RMBToken(b)
	smcr.WriteSilently(a, rkey, addr+5, []byte("late"))
	at := func() []byte { return smcr.RMBE(b)[5:9] }
	waitFor(t, "the bytes", func() bool { return string(at()) == "late" })
	smcr.CoolDown(smcr.StackOf(b))
	if string(at()) != "late" {
		t.Fatalf("what was written and not announced is %q", at())
	}
	send(t, a, b, []byte("late"))
	smcr.CoolDown(smcr.StackOf(b))
	if string(at()) != "late" {
		t.Error("the pages were given back, though it is not known whether something is in them")
	}
}

// Another connection's bytes in the same RMB do not matter, and those of a connection that had the
// RMBE before do not either.
func TestStack_idleBuffersOfOne(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024, small)
	for range 20 {
		a, b := p.dial(t)
		c, d := p.dial(t)
		send(t, c, d, make([]byte, 5000))
		go func() { _, _ = c.Write(make([]byte, 100)) }() // and it is not read
		send(t, a, b, []byte("hello"))
		smcr.CoolDown(smcr.StackOf(a))
		smcr.CoolDown(smcr.StackOf(b))
		if !isEmpty(smcr.RMBE(b)) || !isEmpty(smcr.SendBuffer(a)) {
			t.Fatal("the buffers have pages")
		}
		for _, e := range []*smcr.Conn{a, b, c, d} {
			_ = e.Close()
		}
	}
}

// A connection that has no pages takes none when it ends: nothing has to be wiped.
func TestStack_wipesWhatCameLast(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024, small)
	a, b := p.dial(t)
	for _, size := range []int{10_000, 10_000, 5_000} { // it wraps
		send(t, a, b, bytes.Repeat([]byte{1}, size))
		smcr.CoolDown(smcr.StackOf(a))
		smcr.CoolDown(smcr.StackOf(b))
	}
	send(t, a, b, bytes.Repeat([]byte{2}, 9000))
	rmbe, buf := smcr.RMBE(b), smcr.SendBuffer(a)
	_, _ = a.Close(), b.Close()
	c, d := p.dial(t) // by then the memory may be its
	waitFor(t, "wiped buffers", func() bool { return isEmpty(rmbe) && isEmpty(buf) })
	send(t, c, d, []byte("hello"))
}

// pages is how many pages of these bytes are in memory, by proc_pid_pagemap(5).
func pages(t *testing.T, b []byte) int {
	t.Helper()
	var addr int64
	if _, err := fmt.Sscanf(fmt.Sprintf("%p", b), "0x%x", &addr); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	const entry, present = 8, 1 << 63
	page := os.Getpagesize()
	entries := make([]byte, len(b)/page*entry)
	if _, err := f.ReadAt(entries, addr/int64(page)*entry); err != nil {
		t.Fatal(err)
	}
	n := 0
	for e := range slices.Chunk(entries, entry) {
		if binary.NativeEndian.Uint64(e)&present != 0 {
			n++
		}
	}
	return n
}

// After a reset all of the RMBE has to be wiped, whatever the peer has announced. It takes no page for that, of
// which a large one has many.
func TestStack_wipesAfterReset(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024)
	first, firstPeer := p.dial(t) // keeps the link group
	defer func() { _, _ = first.Close(), firstPeer.Close() }()
	a, b := p.dial(t)
	rmbe := smcr.RMBE(b)
	if _, err := a.Write(bytes.Repeat([]byte{1}, 10_000)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "bytes that nobody reads", func() bool { return pages(t, rmbe) > 2 })
	_ = a.Abort()
	_ = b.Close()
	waitFor(t, "an RMBE without pages", func() bool { return pages(t, rmbe) == 0 })
	if !isEmpty(rmbe) {
		t.Error("the next connection finds bytes of this one")
	}
}

// It happens by itself, of more connections than are looked at in one turn.
func TestStack_manyIdleBuffers(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024, small)
	const conns = 2*smcr.CoolBatch + 1
	var all []*smcr.Conn
	for range conns {
		a, b := p.dial(t)
		send(t, a, b, []byte("hello"))
		all = append(all, a, b)
	}
	waitFor(t, "all buffers to be empty", func() bool {
		for i := 0; i < len(all); i += 2 {
			if !isEmpty(smcr.SendBuffer(all[i])) || !isEmpty(smcr.RMBE(all[i+1])) {
				return false
			}
		}
		return true
	})
}
