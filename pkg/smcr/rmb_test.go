// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// RFC 7609 §3.5.2, §4.4: on an existing group connections come and go without
// an LLC exchange, and nobody waits for one although RMBs are added and deleted.
func TestGroup_setupNeedsNoLLC(t *testing.T) {
	for _, elements := range []int{1, 2, 8} {
		t.Run(fmt.Sprintf("%d RMBEs in an RMB", elements), func(t *testing.T) {
			p := newPair(t, func(c *smcr.Config) {
				c.RMBESizeBytes, c.RMBEsPerRMB = 16<<10, elements
				c.LinksPerGroup = 1 // a second link, which cannot be had here, is asked for again each second
			})
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
			// so many RMBs do for n connections: each has as many elements as
			// those before, and half of what the next one has is always free.
			want := func(n int) int {
				rmbs, all := 0, 0
				next := func() int { return min(max(all, 2), elements) }
				for used := 1; used <= n; used++ {
					for all < used || 2*(all-used) < next() {
						all += next()
						rmbs++
					}
				}
				return rmbs
			}

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
			// One connection is left: the RMB of its element stays, and up to two RMBs with
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

// RFC 7609 §4.6, §4.4.1: a peer may have missed our acknowledgement on a lost link. Then it writes the same
// data again into the RMBE of a connection that has ended. No other connection gets this RMBE for a while,
// and the RMBE is zeroed before.
func TestGroup_holdsRMBEsAfterLoss(t *testing.T) {
	_, s, p := multiPair(t, softtest.NewFabric(t, 1), smcr.VersionsV1, twoClients, twoServers) // whose first RMBEs have one size
	first, firstPeer := p.dial(t)
	waitGroup(t, p.client, "SYMMETRIC", 2)
	waitGroup(t, p.server, "SYMMETRIC", 2)
	a, b := p.dial(t)
	exchange(t, a, b)
	mem := smcr.RMBE(b)
	_, _ = a.Close(), b.Close()
	waitFor(t, "end of a connection", func() bool { return p.server.Stats().Conns == 1 })
	lost := time.Now()
	if err := s.devices[1].Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "loss of a link", func() bool {
		for _, l := range p.server.LinkGroups()[0].Links {
			if l.Device == "soft-"+twoServers[1] {
				return false
			}
		}
		return true
	})
	heard := time.Now()
	for i := range mem { // the peer writes again, over the other link
		mem[i] = 0xee
	}

	var conns []*smcr.Conn
	taken := func() bool {
		c, d := p.dial(t)
		conns = append(conns, c, d)
		return &smcr.RMBE(d)[0] == &mem[0]
	}
	again := false
	for range 2 {
		if again = taken(); again && time.Since(lost) < linkgroup.RMBEHold {
			t.Fatalf("the RMBE was given to a connection %v after the loss", time.Since(lost))
		}
		if again {
			break // on a slow machine the quarantine is over by now
		}
	}
	// The quarantine began when the group heard of the loss.
	waitFor(t, "end of the quarantine", func() bool { return time.Since(heard) > 3*linkgroup.RMBEHold/2 })
	for ; !again; again = taken() {
		if len(conns) > 40 {
			t.Fatal("nobody gets the RMBE any more")
		}
	}
	if i := bytes.IndexByte(mem, 0xee); i >= 0 {
		t.Errorf("its new connection finds byte %d of the old one", i)
	}
	for _, c := range append(conns, first, firstPeer) {
		_ = c.Close()
	}
}

// The first connections of a link group have rings of the configured sizes, and further ones smaller rings, of which
// each side tells the other. Nobody waits for the RMB of another size.
func TestGroup_ringsBecomeSmaller(t *testing.T) {
	p := newPair(t, func(c *smcr.Config) { c.LinksPerGroup = 1 })
	for n := range 20 {
		a, b := p.dial(t)
		defer func() { _, _ = a.Close(), b.Close() }()
		exchange(t, a, b)
		want := 512 << 10
		switch {
		case n >= 16:
			want = 128 << 10
		case n >= 8:
			want = 256 << 10
		}
		for _, c := range []*smcr.Conn{a, b} {
			if i := c.Info(); i.RMBE != want || i.PeerRMBE != want || i.SendBuffer != want {
				t.Errorf("connection %d: RMBEs of %d and %d bytes, send buffer of %d, want %d", n, i.RMBE, i.PeerRMBE, i.SendBuffer, want)
			}
		}
		waitFor(t, "RMBs that the peer knows", func() bool {
			for _, s := range []*smcr.Stack{p.client, p.server} {
				if k, g := smcr.KnownRMBs(s); k != g {
					return false
				}
				// The next size is there before several connections at once would wait for it, and no more of the largest
				// one than connections have.
				if n == 4 && s.LinkGroups()[0].RMBBytes != 8*(512<<10)+8*(256<<10) {
					return false
				}
			}
			return true
		})
	}
	for _, s := range []*smcr.Stack{p.client, p.server} {
		if n := s.Stats().RMBWaits; n != 0 {
			t.Errorf("%d rendezvous waited for CONFIRM RKEY", n)
		}
	}
}

// On devices in software the first connections of a link group of version 2 have larger rings than the RFC's largest, if the
// configured ones are that large and there is plenty of memory.
func TestGroup_ringsBecomeLarger(t *testing.T) {
	const kib = 1 << 10
	for _, tt := range []struct {
		name     string
		edit     func(*smcr.Config)
		versions smcr.VersionSet
		rmbe     []int // KiB, by connection
		send     []int
	}{
		{"plenty", func(*smcr.Config) {}, smcr.VersionsBoth, []int{2048, 2048, 1024, 1024, 512, 512, 512, 512, 256}, []int{2048, 2048, 1024, 1024, 512, 512, 512, 512, 256}},
		{"version 1", func(*smcr.Config) {}, smcr.VersionsV1, []int{512, 512}, []int{512, 512}},
		{"smaller ones are configured", func(c *smcr.Config) { c.RMBESizeBytes, c.SendBufferBytes = 256*kib, 512*kib }, smcr.VersionsBoth, []int{256, 256, 256}, []int{2048, 2048, 1024}},
		{"a quarter in use", func(c *smcr.Config) { c.MemoryBytes = 64 * kib * kib }, smcr.VersionsBoth, []int{2048, 2048, 512, 512}, []int{2048, 2048, 512, 512}},
		{"little memory", func(c *smcr.Config) { c.MemoryBytes = 24 * kib * kib }, smcr.VersionsBoth, []int{512, 512}, []int{512, 512}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newSoftPair(t, rdma.MTU4096, tt.edit, versions(tt.versions), func(c *smcr.Config) { c.LinksPerGroup = 1 })
			for n := range tt.rmbe {
				a, b := p.dial(t)
				defer func() { _, _ = a.Close(), b.Close() }()
				exchange(t, a, b)
				for _, c := range []*smcr.Conn{a, b} {
					if i := c.Info(); i.RMBE != tt.rmbe[n]*kib || i.PeerRMBE != tt.rmbe[n]*kib || i.SendBuffer != tt.send[n]*kib {
						t.Errorf("connection %d: RMBEs of %d and %d bytes, send buffer of %d, want %d and %d KiB", n, i.RMBE, i.PeerRMBE, i.SendBuffer, tt.rmbe[n], tt.send[n])
					}
				}
			}
		})
	}
}

// Who shares an account in which there is no room for the largest rings gets others, and is not declined.
func TestGroup_ringsOfAFullAccount(t *testing.T) {
	p := newSoftPair(t, rdma.MTU4096, func(c *smcr.Config) { c.LinksPerGroup, c.Account = 1, &hopefulAccount{smcr.TestAccount{Left: 3 << 20}} })
	a, b := p.dial(t)
	defer func() { _, _ = a.Close(), b.Close() }()
	exchange(t, a, b)
	for _, c := range []*smcr.Conn{a, b} {
		if i := c.Info(); i.Mode != smcr.ModeSMCR || i.RMBE != 512<<10 {
			t.Errorf("%v with an RMBE of %d bytes", i.Mode, i.RMBE)
		}
	}
}

// hopefulAccount tells of more than it has, as one from which others take meanwhile.
type hopefulAccount struct{ smcr.TestAccount }

func (a *hopefulAccount) Spare() int { return 1 << 30 }

// A connection for whose rings there is no memory gets rings of another size that are free: what its device would give
// the first connections of a link group, too.
func TestGroup_ringsOfAnotherSize(t *testing.T) {
	for _, tt := range []struct {
		name   string
		pair   func(t *testing.T, budget int) *pair
		budget int
		ends   int // so many of the first connections
		want   int // RMBE
	}{
		{"RNIC", func(t *testing.T, budget int) *pair {
			return newPair(t, func(c *smcr.Config) { c.LinksPerGroup, c.MemoryBytes = 1, budget })
		}, 12 << 20, 2, 512 << 10},
		{"software", func(t *testing.T, budget int) *pair {
			return newSoftPair(t, rdma.MTU4096, func(c *smcr.Config) { c.LinksPerGroup, c.MemoryBytes = 1, budget })
		}, 64 << 20, 1, 2 << 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := tt.pair(t, tt.budget)
			var conns [][2]*smcr.Conn
			dial := func() int {
				t.Helper()
				a, b := p.dial(t)
				exchange(t, a, b)
				conns = append(conns, [2]*smcr.Conn{a, b})
				return a.Info().RMBE
			}
			full := uint64(tt.budget - 2*(128<<10))
			for p.client.Stats().MemoryBytes < full || p.server.Stats().MemoryBytes < full {
				dial()
			}
			t.Logf("%d connections", len(conns))
			for _, c := range conns[:tt.ends] {
				_, _ = c[0].Close(), c[1].Close()
			}
			waitFor(t, "the end of the first connections", func() bool {
				return p.client.Stats().Conns == len(conns)-tt.ends && p.server.Stats().Conns == len(conns)-tt.ends
			})
			conns = conns[tt.ends:]
			var got []int
			for range 2 {
				got = append(got, dial())
			}
			if !slices.Contains(got, tt.want) {
				t.Errorf("RMBEs of %d bytes, want one of %d that became free", got, tt.want)
			}
			for _, c := range conns {
				_, _ = c[0].Close(), c[1].Close()
			}
		})
	}
}
