// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"fmt"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// RFC 7609 §3.5.2, §4.4: on an existing group connections come and go without
// an LLC exchange, and nobody waits for one although RMBs are added and deleted.
func TestGroup_setupNeedsNoLLC(t *testing.T) {
	for _, elements := range []int{1, 2, 8} {
		t.Run(fmt.Sprintf("%d RMBEs in an RMB", elements), func(t *testing.T) {
			p := newPair(t, func(c *smcr.Config) { c.RMBESizeBytes, c.RMBEsPerRMB = 16<<10, elements })
			stacks := []*smcr.Stack{p.client, p.server}
			llc := func() uint64 { return p.client.Stats().LLCSent + p.server.Stats().LLCSent }
			first, other := p.dial(t)
			exchange(t, first, other)
			closeBoth := func(a, b *smcr.Conn) {
				t.Helper()
				before := [2]int{p.client.Stats().Conns, p.server.Stats().Conns}
				if err := a.Close(); err != nil {
					t.Error(err)
				}
				if err := b.Close(); err != nil {
					t.Error(err)
				}
				waitFor(t, "end of a connection", func() bool {
					return p.client.Stats().Conns == before[0]-1 && p.server.Stats().Conns == before[1]-1
				})
			}
			confirmed := func(n int) {
				t.Helper()
				waitFor(t, fmt.Sprintf("%d RMBs that the peer knows", n), func() bool {
					for _, s := range stacks {
						if k, g := smcr.KnownRMBs(s); k != n || g != n {
							return false
						}
					}
					return true
				})
			}
			// so many RMBs do for n connections: half of one, rounded up, is
			// always free.
			want := func(n int) int { return (n + (elements+1)/2 + elements - 1) / elements }

			a, b := p.dial(t)
			confirmed(want(2))
			closeBoth(a, b)
			before := llc()
			for range 20 {
				a, b := p.dial(t)
				exchange(t, a, b)
				closeBoth(a, b)
			}
			if n := llc() - before; n != 0 {
				t.Errorf("20 connections that came and went took %d LLC messages", n)
			}

			var conns [][2]*smcr.Conn
			for n := 2; n <= 20; n++ {
				a, b := p.dial(t)
				exchange(t, a, b)
				conns = append(conns, [2]*smcr.Conn{a, b})
				confirmed(max(want(n), want(2)))
			}
			for _, c := range conns {
				closeBoth(c[0], c[1])
			}
			for i, s := range stacks {
				if n := s.Stats().RMBWaits; n != 0 {
					t.Errorf("stack %d: %d rendezvous waited for CONFIRM RKEY", i, n)
				}
			}
			// One connection is left: the RMB that it is in, and up to two with
			// an element that is free.
			waitFor(t, "deletion of RMBs", func() bool {
				for _, s := range stacks {
					if _, n := smcr.KnownRMBs(s); n > 3 {
						return false
					}
				}
				return true
			})
			closeBoth(first, other)
		})
	}
}
