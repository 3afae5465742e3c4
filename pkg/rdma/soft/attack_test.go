// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"math/bits"
	"slices"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// TestAttack_memory has the cases of the conformance suite that are attacks of a peer with
// a queue pair of its own on memory that is not meant for it.
func TestAttack_memory(t *testing.T) {
	attacks := []string{"WrongKeys", "Permissions", "DomainIsolation", "AddressesTellNothing", "RegionClosedUnderWrites"}
	for _, c := range rdmatest.Cases() {
		if i := slices.Index(attacks, c.Name); i >= 0 {
			attacks = slices.Delete(attacks, i, i+1)
			t.Run(c.Name, func(t *testing.T) {
				a, b := loopback(t)
				c.Run(t, a, b)
			})
		}
	}
	if len(attacks) > 0 {
		t.Errorf("the suite has no cases %v", attacks)
	}
}

// TestAttack_keysAreRandom: no bit of a key or queue pair number is told by another one,
// so that who knows some of them has to guess all the bits of the others: 32 of a key, 24
// of a queue pair number, one less where two devices share the address.
func TestAttack_keysAreRandom(t *testing.T) {
	const draws = 4000
	end := func(t *testing.T, share bool) *rdmatest.End {
		return rdmatest.NewEnd(t, openUDP(t, soft.Config{Addr: loopA, Port: testPort, Share: share}), rdmatest.Options{MRBytes: 4096})
	}
	region := func(t *testing.T, e *rdmatest.End) rdma.MR {
		t.Helper()
		m, err := e.PD.RegMR(e.MR, rdma.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		return m
	}
	queuePair := func(t *testing.T, e *rdmatest.End) uint32 {
		t.Helper()
		q, err := e.PD.CreateQP(rdma.QPConfig{SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, MaxSendWR: 1, MaxRecvWR: 1})
		if err != nil {
			t.Fatal(err)
		}
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		return uint32(q.Num())
	}
	for _, c := range []struct {
		name  string
		share bool
		width int // random bits
		most  int
		draw  func(t *testing.T, e *rdmatest.End) uint32
	}{
		{"RKey", false, 32, 32, func(t *testing.T, e *rdmatest.End) uint32 { return uint32(region(t, e).RKey()) }},
		{"LKey", false, 32, 32, func(t *testing.T, e *rdmatest.End) uint32 { return uint32(region(t, e).LKey()) }},
		{"QPN", false, 24, 24, queuePair},
		{"QPN of a shared address", true, 23, 24, queuePair},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := end(t, c.share)
			var ones [32]int
			var last uint32
			steps := make(map[uint32]int)
			for range draws {
				k := c.draw(t, e)
				if bits.Len32(k) > c.most {
					t.Fatalf("%#x has more than %d bits", k, c.most)
				}
				for b := range c.width {
					ones[b] += int(k >> b & 1)
				}
				steps[(k-last)&(1<<12-1)]++ // of what an index would be in
				last = k
			}
			for b, n := range ones[:c.width] {
				if n < draws*2/5 || n > draws*3/5 { // 12 standard deviations
					t.Errorf("bit %d is set in %d of %d", b, n, draws)
				}
			}
			for step, n := range steps {
				if n > draws/100 {
					t.Errorf("%d of %d come %d after the one before, in their low bits", n, draws, step)
				}
			}
		})
	}
}
