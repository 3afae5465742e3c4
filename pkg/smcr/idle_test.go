// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// A link group without connections gives its memory back, but for the slots of its
// queue pairs, and the next connection works without a first contact.
func TestGroup_idleGivesMemoryBack(t *testing.T) {
	const rmbe = 512 << 10
	p := newPair(t)
	var conns []*smcr.Conn
	for range 5 {
		a, b := p.dial(t)
		exchange(t, a, b)
		conns = append(conns, a, b)
	}
	for _, s := range []*smcr.Stack{p.client, p.server} {
		if n := s.Stats().MemoryBytes; n < 10*rmbe {
			t.Fatalf("%d bytes for five connections", n)
		}
	}
	for _, c := range conns {
		_ = c.Close()
	}
	waitFor(t, "less memory", func() bool {
		return p.client.Stats().MemoryBytes < 64<<10 && p.server.Stats().MemoryBytes < 64<<10
	})
	a, b := p.dial(t)
	if i := a.Info(); i.Mode != smcr.ModeSMCR || i.FirstContact {
		t.Errorf("the next connection: %v, first contact %v", i.Mode, i.FirstContact)
	}
	exchange(t, a, b)
	_, _ = a.Close(), b.Close()
}

// Idle link groups give way where memory is short: a server may have more clients
// one after the other than it has memory for at once.
func TestStack_idleGroupsGiveWay(t *testing.T) {
	const rmbe = 512 << 10
	f := newFakeFabric()
	server := newStack(t, f.device("s", 200), func(c *smcr.Config) { c.MemoryBytes = 6 * rmbe })
	for i := range 16 { // the links of groups that gave way linger for a moment: 28 KiB each
		p := &pair{fabric: f, client: newStack(t, f.device(fmt.Sprint("c", i), byte(i+1))), server: server}
		p.listen(t)
		a, b := p.dial(t)
		if a.Mode() != smcr.ModeSMCR {
			t.Fatalf("client %d is on %v: %v", i, a.Mode(), a.Reason())
		}
		exchange(t, a, b)
		_, _ = a.Close(), b.Close()
		waitFor(t, "end of the connection", func() bool { return server.Stats().Conns == 0 })
		if n := server.Stats().MemoryBytes; n > 6*rmbe {
			t.Fatalf("%d bytes are registered", n)
		}
	}
	if st := server.Stats(); st.GroupsGaveWay == 0 {
		t.Error("no group gave way")
	}
}

// fairAccount is an account in which no client may have more than so many bytes, and link groups over a device.
type fairAccount struct {
	bytes, qps int
	full       atomic.Bool // there is no more memory for anybody

	mu   sync.Mutex // guards used
	used map[netip.Addr]*[2]int
}

func (a *fairAccount) add(client netip.Addr, kind, n, most int) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	u := a.used[client]
	if u == nil {
		u = &[2]int{}
		a.used[client] = u
	}
	if n > 0 && u[kind]+n > most {
		return smcr.ErrClientShare
	}
	u[kind] += n
	return nil
}

func (a *fairAccount) Take(client netip.Addr, n int) error {
	if a.full.Load() {
		return errors.New("no more")
	}
	return a.add(client, 0, n, a.bytes)
}

func (a *fairAccount) Give(client netip.Addr, n int)            { _ = a.add(client, 0, -n, 0) }
func (a *fairAccount) Spare() int                               { return 0 }
func (a *fairAccount) TakeQP(client netip.Addr, _ string) error { return a.add(client, 1, 1, a.qps) }
func (a *fairAccount) GiveQP(client netip.Addr, _ string)       { _ = a.add(client, 1, -1, 0) }

// For a client that has its share of memory, or of queue pairs, only its own idle link groups give way.
func TestStack_othersDoNotGiveWay(t *testing.T) {
	const rmbe = 512 << 10
	for _, tt := range []struct {
		name       string
		bytes, qps int
		full       bool // the memory, when the client comes that has its share
	}{
		{"memory", 4 * rmbe, 100, false},
		{"queue pairs", 1 << 30, 2, false},
		{"queue pairs, where memory is short", 1 << 30, 2, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fair := &fairAccount{bytes: tt.bytes, qps: tt.qps, used: map[netip.Addr]*[2]int{}}
			f := newFakeFabric()
			server := newStack(t, f.device("s", 200), func(c *smcr.Config) { c.Account, c.QueuePairs = fair, fair })
			visit := func(i int, from string) (a, b *smcr.Conn) {
				p := &pair{fabric: f, client: newStack(t, f.device(fmt.Sprint("c", i), byte(i+1))), server: server, dialFrom: netip.MustParseAddr(from)}
				p.listen(t)
				return p.dial(t)
			}
			leave := func(a, b *smcr.Conn) {
				_, _ = a.Close(), b.Close()
				waitFor(t, "end of the connection", func() bool { return server.Stats().Conns == 0 })
			}
			a, b := visit(0, "127.0.0.1")
			other := b.Info().GroupID
			leave(a, b)
			a, b = visit(1, "127.0.0.9")
			fair.full.Store(tt.full)
			if c, d := visit(2, "127.0.0.9"); c.Mode() != smcr.ModeTCP || d.Reason() != clc.ReasonMem {
				t.Errorf("beyond the client's share: %v because of %v", c.Mode(), d.Reason())
			} else {
				_, _ = c.Close(), d.Close()
			}
			if st := server.Stats(); st.GroupsGaveWay != 0 {
				t.Errorf("%d groups gave way", st.GroupsGaveWay)
			}
			fair.full.Store(false)
			leave(a, b)
			n := 3
			waitFor(t, "place of the client's own", func() bool {
				a, b := visit(n, "127.0.0.9")
				n++
				defer func() { _, _ = a.Close(), b.Close() }()
				return a.Mode() == smcr.ModeSMCR
			})
			if !slices.ContainsFunc(server.LinkGroups(), func(g smcr.GroupInfo) bool { return g.ID == other }) {
				t.Error("the other client's group gave way")
			}
		})
	}
}

// Many peers that leave at once leave no more idle groups behind than a stack keeps, even
// if no other peer comes: those that have been idle for the longest time end.
func TestStack_idleGroupsAreBounded(t *testing.T) {
	const more = 20
	p := newPair(t, func(c *smcr.Config) {
		c.RMBESizeBytes, c.SendBufferBytes, c.RMBEsPerRMB = 16<<10, 16<<10, 1
	})
	var conns [][2]*smcr.Conn
	first := map[uint32]bool{} // the server's groups that become idle before the others, on both sides
	for i := range smcr.MaxIdleGroups + more {
		p.dialFrom = netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}) // a TCP address is a peer
		a, b := p.dial(t)
		conns = append(conns, [2]*smcr.Conn{a, b})
		if i < more {
			first[b.Info().GroupID] = true
		}
	}
	if n := p.server.Stats().Groups; n != smcr.MaxIdleGroups+more {
		t.Fatalf("%d link groups in use, want %d", n, smcr.MaxIdleGroups+more)
	}
	for i, c := range conns {
		if i == more {
			waitFor(t, "end of the first connections, on both sides: each ends groups in the order that it saw", func() bool {
				return p.server.Stats().Conns == smcr.MaxIdleGroups && p.client.Stats().Conns == smcr.MaxIdleGroups
			})
		}
		_, _ = c[0].Close(), c[1].Close()
	}
	waitFor(t, "fewer idle groups", func() bool {
		return p.server.Stats().Groups <= smcr.MaxIdleGroups && p.client.Stats().Groups <= smcr.MaxIdleGroups
	})
	waitFor(t, "end of the groups that were idle before the others", func() bool {
		return !slices.ContainsFunc(p.server.LinkGroups(), func(g smcr.GroupInfo) bool { return first[g.ID] })
	})
}

// A group that has a connection again, of which its client has not confirmed anything
// yet, does not give way: the connection would lose its memory.
func TestStack_groupsInUseDoNotGiveWay(t *testing.T) {
	const rmbe = 512 << 10
	f := newFakeFabric()
	server := newStack(t, f.device("s", 200), func(c *smcr.Config) { c.MemoryBytes = 4 * rmbe })
	p := &pair{fabric: f, client: newStack(t, f.device("c", 1), versions(smcr.VersionsV2)), server: server}
	p.listen(t)
	a, b := p.dial(t)
	group := b.Info().GroupID
	_, _ = a.Close(), b.Close()
	waitFor(t, "end of the connection", func() bool { return server.Stats().Conns == 0 })

	// It comes again, and its Confirm is held up on the way.
	release := make(chan struct{})
	p.dialTo = newProxy(t, p.l.Addr().String(), unchanged, func([]byte) { <-release }).addr
	again := make(chan net.Conn, 1)
	go func() {
		c, err := (&smcr.Dialer{Stack: p.client}).DialContext(t.Context(), "tcp", p.dialTo)
		if err != nil {
			t.Error(err)
		}
		again <- c
	}()
	waitFor(t, "the connection", func() bool { return server.Stats().Conns == 1 })

	other := newStack(t, f.device("o", 2))
	c, err := (&smcr.Dialer{Stack: other}).DialContext(t.Context(), "tcp", p.l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if i := c.(*smcr.Conn).Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonMem {
		t.Errorf("another client, for which there is no memory: %v, %v", i.Mode, i.Reason)
	}
	if n := server.Stats().GroupsGaveWay; n != 0 {
		t.Errorf("%d groups gave way", n)
	}
	taken, err := p.l.Accept() // the other client's
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Close(), taken.Close()
	close(release)
	x, err := p.l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	y := <-again
	if id := x.(*smcr.Conn).Info().GroupID; id != group {
		t.Errorf("it is in the link group %d, want %d", id, group)
	}
	exchange(t, x, y)
	_, _ = x.Close(), y.Close()
}
