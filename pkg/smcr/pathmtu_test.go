// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestPathMTUs(t *testing.T) {
	m := pathMTUs{}
	now := time.Unix(1000, 0)
	narrow, other := pathPeer{addr: testAddr(1)}, pathPeer{addr: testAddr(2)}
	if got := m.most(now, narrow); got != rdma.MTU4096 {
		t.Errorf("%v bytes where nothing is known", got)
	}
	m.lower(now, narrow, rdma.MTU1024)
	m.lower(now.Add(time.Minute), narrow, rdma.MTU2048) // of a link that was older
	for _, tc := range []struct {
		peer pathPeer
		at   time.Time
		want rdma.MTU
	}{
		{narrow, now.Add(time.Minute), rdma.MTU1024},
		{narrow, now.Add(pathMTUTime + time.Minute - 1), rdma.MTU1024},
		{narrow, now.Add(pathMTUTime + time.Minute), rdma.MTU4096},
		{other, now, rdma.MTU4096},
		{pathPeer{addr: testAddr(1), id: [8]byte{1}}, now, rdma.MTU4096},
	} {
		if got := m.most(tc.at, tc.peer); got != tc.want {
			t.Errorf("%v after %v: %v bytes, want %v", tc.peer, tc.at.Sub(now), got, tc.want)
		}
	}
	for i := range uint32(maxPathMTUs + 100) {
		m.lower(now.Add(time.Duration(i)), pathPeer{addr: testAddr(10 + i)}, rdma.MTU1024)
	}
	if len(m) > maxPathMTUs {
		t.Errorf("%d peers are remembered", len(m))
	}
	if last := (pathPeer{addr: testAddr(9 + maxPathMTUs + 100)}); m.most(now, last) != rdma.MTU1024 {
		t.Error("the last peer made place for others")
	}
	late := now.Add(2 * pathMTUTime)
	if m.lower(late, other, rdma.MTU1024); len(m) > 1 {
		t.Errorf("%d peers are remembered when their time is over", len(m))
	}
}

// TestPacketSizes: which losses say that the path is too narrow, and for what.
func TestPacketSizes(t *testing.T) {
	type write struct {
		bytes uint32
		msg   uint64
	}
	for _, tc := range []struct {
		name         string
		mtu          rdma.MTU
		writes       []write
		acknowledged uint64
		want         rdma.MTU
	}{
		{"nothing was written", rdma.MTU4096, nil, 5, 0},
		{"the first large one", rdma.MTU4096, []write{{65536, 6}}, 5, rdma.MTU4096},
		{"one of exactly the path MTU", rdma.MTU4096, []write{{4096, 6}}, 5, rdma.MTU4096},
		{"behind a small one that arrived", rdma.MTU4096, []write{{200, 5}, {65536, 6}}, 5, rdma.MTU4096},
		{"further ones behind it", rdma.MTU1024, []write{{1024, 6}, {1024, 7}, {4096, 8}}, 5, rdma.MTU1024},
		{"never a full one, but too large", rdma.MTU4096, []write{{1800, 6}}, 5, rdma.MTU2048},
		{"the same, and a full one behind it", rdma.MTU4096, []write{{1800, 6}, {65536, 7}}, 5, rdma.MTU2048},
		{"two before one message", rdma.MTU4096, []write{{1800, 6}, {65536, 6}}, 5, rdma.MTU4096},
		{"the smallest path MTU", rdma.MTU256, []write{{256, 6}}, 5, rdma.MTU256},
		{"a full one arrived before", rdma.MTU4096, []write{{4096, 5}, {65536, 6}}, 5, 0},
		{"a larger one arrived before", rdma.MTU4096, []write{{4096, 3}, {1800, 6}}, 5, 0},
		{"a small one was lost", rdma.MTU4096, []write{{1000, 6}}, 5, 0},
		{"a small one was lost, a large one behind it", rdma.MTU4096, []write{{64, 6}, {65536, 7}}, 5, 0},
		{"a message was lost, a large one behind it", rdma.MTU4096, []write{{65536, 8}}, 5, 0},
		{"nothing arrived ever", rdma.MTU4096, []write{{65536, 1}}, 0, 0},
		{"no larger than a message", rdma.MTU256, []write{{0, 6}, {128, 6}}, 5, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s packetSizes
			for _, w := range tc.writes {
				s.note(w.bytes, tc.mtu, w.msg)
			}
			if got := s.lost(tc.acknowledged, tc.mtu); got != tc.want {
				t.Errorf("lost are packets of %v bytes, want %v", got, tc.want)
			}
		})
	}
}

func TestMTUOf(t *testing.T) {
	for n, want := range map[uint32]rdma.MTU{
		0: 0, 128: 0, 129: rdma.MTU256, 256: rdma.MTU256, 257: rdma.MTU512, 1024: rdma.MTU1024, 1025: rdma.MTU2048,
		2048: rdma.MTU2048, 2049: rdma.MTU4096, 4096: rdma.MTU4096, 4097: rdma.MTU4096 + 1, 1<<32 - 1: 25,
	} {
		if got := mtuOf(n); got != want {
			t.Errorf("%d bytes: MTU number %d, want %d", n, got, want)
		}
	}
}

func TestPacketSizes_allocateNothing(t *testing.T) {
	var s packetSizes
	if n := testing.AllocsPerRun(100, func() { s.note(65536, rdma.MTU4096, 1) }); n != 0 {
		t.Errorf("%v allocations per WRITE", n)
	}
}
