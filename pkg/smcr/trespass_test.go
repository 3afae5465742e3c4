// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"
)

func testAddr(i uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, 10<<24|i)))
}

func TestTrespassers(t *testing.T) {
	ts := trespassers{}
	now := time.Unix(1000, 0)
	bad := testAddr(1)
	for i := range trespassLimit - 1 {
		if ts.note(now, bad); ts.isBarred(now, bad) {
			t.Fatalf("barred after %d", i+1)
		}
	}
	late := now.Add(trespassWindow + 1)
	if ts.note(late, bad); ts.isBarred(late, bad) {
		t.Error("barred for what was long ago")
	}
	for range trespassLimit - 1 {
		ts.note(late, bad)
	}
	if !ts.isBarred(late, bad) || ts.isBarred(late, testAddr(2)) || ts.isBarred(late.Add(barTime), bad) {
		t.Error("want this address barred, no other one, and not for ever")
	}
	for i := range uint32(3 * maxTrespassers) {
		ts.note(late, testAddr(10+i))
	}
	if len(ts) > maxTrespassers {
		t.Errorf("%d addresses are remembered", len(ts))
	}
	ts.note(late.Add(2*trespassWindow), testAddr(5))
	if len(ts) > 1+maxTrespassers/2 {
		t.Errorf("%d addresses are remembered when their time is over", len(ts))
	}
}

func TestEndedLinks(t *testing.T) {
	var e endedLinks
	for i := range uint32(2 * len(e.list)) {
		e.add(5, testAddr(i))
	}
	e.add(6, testAddr(99))
	if a, ok := e.take(6); !ok || a != testAddr(99) {
		t.Errorf("got %v, %v", a, ok)
	}
	if a, ok := e.take(6); ok {
		t.Errorf("got %v twice", a)
	}
	if a, ok := e.take(0); ok {
		t.Errorf("got %v for a queue pair that was never there", a)
	}
}
