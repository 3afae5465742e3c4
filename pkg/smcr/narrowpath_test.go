// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// narrowPair is two stacks on a fabric whose path may be narrower than their ports, and what their hooks said.
type narrowPair struct {
	pair
	fabric *softtest.Fabric

	mu   sync.Mutex // guards told
	told [2][]smcr.PathMTU
}

func newNarrowPair(t *testing.T, mtu rdma.MTU, v smcr.VersionSet, client, server []string) *narrowPair {
	t.Helper()
	p := &narrowPair{fabric: softtest.NewFabric(t, 1)}
	open := func(side int, addrs []string) *smcr.Stack {
		var devices []rdma.Device
		for _, a := range addrs {
			devices = append(devices, p.fabric.Open(t, soft.Config{Name: a, Addr: netip.MustParseAddr(a), MTU: mtu}))
		}
		return newStack(t, nil, versions(v), func(c *smcr.Config) {
			c.Devices = devices
			c.Hooks.PathMTU = func(m smcr.PathMTU) {
				p.mu.Lock()
				defer p.mu.Unlock()
				p.told[side] = append(p.told[side], m)
			}
		})
	}
	p.client, p.server = open(clientSide, client), open(serverSide, server)
	p.listen(t)
	return p
}

const (
	clientSide = iota
	serverSide
)

// hears returns what the hook of a side said.
func (p *narrowPair) hears(side int) []smcr.PathMTU {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.told[side])
}

// dialAnew opens a connection that makes a link group. One side may still have a group that the other has lost: the connections
// until it knows are TCP.
func (p *narrowPair) dialAnew(t *testing.T) (client, server *smcr.Conn) {
	t.Helper()
	waitFor(t, "a new link group", func() bool {
		client, server = p.dial(t)
		i := client.Info()
		again := i.Mode == smcr.ModeTCP && i.Reason == clc.ReasonSyncErr || i.Mode == smcr.ModeSMCR && !i.FirstContact
		if again {
			_, _ = client.Close(), server.Close()
		}
		return !again
	})
	return client, server
}

// checkMTU checks the path MTU of the connection's links, and that messages pass.
func (p *narrowPair) checkMTU(t *testing.T, c, s *smcr.Conn, want rdma.MTU) {
	t.Helper()
	if i := c.Info(); i.Mode != smcr.ModeSMCR {
		t.Fatalf("%v because of %v", i.Mode, i.Reason)
	}
	for _, at := range []*smcr.Stack{p.client, p.server} {
		other := func(l smcr.LinkInfo) bool { return l.MTU != want }
		has := func(g smcr.GroupInfo) bool {
			return g.Conns == 1 && len(g.Links) > 0 && !slices.ContainsFunc(g.Links, other)
		}
		if gs := at.LinkGroups(); !slices.ContainsFunc(gs, has) {
			t.Fatalf("no group with a path MTU of %v in %+v", want, gs)
		}
	}
	exchange(t, c, s)
}

// carryLarge sends 1 MiB and waits for the answer to it. An error ends the connection.
func carryLarge(t *testing.T, from, to *smcr.Conn) error {
	t.Helper()
	_ = errors.Join(from.SetDeadline(time.Time{}), to.SetDeadline(time.Time{}))
	want, _ := io.ReadAll(io.LimitReader(randomReader(7), 1<<20))
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		got := make([]byte, len(want))
		if _, err := io.ReadFull(to, got); err != nil {
			return // the sender has one too
		}
		if !bytes.Equal(got, want) {
			t.Error("other bytes arrived")
		}
		_, _ = to.Write([]byte{1})
	})
	_, err := from.Write(want)
	if err == nil {
		_, err = io.ReadFull(from, make([]byte, 1))
	}
	if err != nil {
		_, _ = from.Abort(), to.Abort()
	}
	return err
}

// loseLarge is carryLarge over a link that is lost by that.
func loseLarge(t *testing.T, from, to *smcr.Conn) {
	t.Helper()
	if err := carryLarge(t, from, to); !errors.Is(err, smcr.ErrLinkGroupLost) {
		t.Fatalf("1 MiB over a path that does not carry it: %v", err)
	}
}

// TestNarrowPath: all ports carry 4096 bytes, the paths between them 1024. Each end finds out about one half, and what the one has
// found out does for both.
func TestNarrowPath(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name           string
		version        smcr.VersionSet
		client, server []string
	}{
		{"v1", smcr.VersionsV1, oneClient, oneServer},
		{"v2", smcr.VersionsV2, oneClient, oneServer},
		{"two RNICs", smcr.VersionsBoth, twoClients, twoServers},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			testNarrowPath(t, newNarrowPair(t, rdma.MTU4096, tc.version, tc.client, tc.server))
		})
	}
}

func testNarrowPath(t *testing.T, p *narrowPair) {
	p.fabric.SetFaults(softtest.Faults{MaxBytes: 1500 - 28})
	c, s := p.dialAnew(t)
	p.checkMTU(t, c, s, rdma.MTU4096)
	loseLarge(t, c, s)
	c, s = p.dialAnew(t)
	p.checkMTU(t, c, s, rdma.MTU2048)
	loseLarge(t, s, c)
	c, s = p.dialAnew(t)
	p.checkMTU(t, c, s, rdma.MTU1024)
	if err := errors.Join(carryLarge(t, c, s), carryLarge(t, s, c)); err != nil {
		t.Errorf("1 MiB over a path that carries it: %v", err)
	}
	_, _ = c.Close(), s.Close()
	for side, want := range []smcr.PathMTU{
		clientSide: {PeerGID: rdma.GIDFromAddr(netip.MustParseAddr(oneServer[0])), Device: oneClient[0], Lost: rdma.MTU4096, Next: rdma.MTU2048},
		serverSide: {PeerGID: rdma.GIDFromAddr(netip.MustParseAddr(oneClient[0])), Device: oneServer[0], Lost: rdma.MTU2048, Next: rdma.MTU1024},
	} {
		want.Peer = netip.MustParseAddr("127.0.0.1")
		got := p.hears(side)
		if len(p.client.LinkGroups()[0].Links) > 1 && len(got) > 0 { // whichever of them was the last
			want.PeerGID, want.Device = got[0].PeerGID, got[0].Device
		}
		if len(got) != 1 || got[0] != want {
			t.Errorf("side %d was told %+v, want %+v once", side, got, want)
		}
	}
}

// TestNarrowPath_smallest: where the smallest path MTU is too large, the next connection is TCP.
func TestNarrowPath_smallest(t *testing.T) {
	t.Parallel()
	p := newNarrowPair(t, rdma.MTU256, smcr.VersionsBoth, oneClient, oneServer)
	p.fabric.SetFaults(softtest.Faults{MaxBytes: 256})
	c, s := p.dialAnew(t)
	p.checkMTU(t, c, s, rdma.MTU256)
	loseLarge(t, c, s)
	c, s = p.dialAnew(t)
	if i := c.Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonNoActLink || i.PeerDeclined {
		t.Errorf("%v because of %v, of the peer %t", i.Mode, i.Reason, i.PeerDeclined)
	}
	if err := carryLarge(t, c, s); err != nil {
		t.Error(err)
	}
	_, _ = c.Close(), s.Close()
}

// TestNarrowPath_ordinaryLoss: a path that carries nothing any more takes links with it, and not the path MTU.
func TestNarrowPath_ordinaryLoss(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		first, last func(t *testing.T, c, s *smcr.Conn) // before the path is lost, and while it is
	}{
		{"after large packets", func(t *testing.T, c, s *smcr.Conn) {
			if err := carryLarge(t, c, s); err != nil {
				t.Fatal(err)
			}
		}, func(*testing.T, *smcr.Conn, *smcr.Conn) {}},
		{"large packets behind a small one", func(*testing.T, *smcr.Conn, *smcr.Conn) {}, func(t *testing.T, c, _ *smcr.Conn) {
			if _, err := c.Write([]byte("small")); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "its message", func() bool { return c.Info().CDCSent > 1 })
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := newNarrowPair(t, rdma.MTU4096, smcr.VersionsBoth, oneClient, oneServer)
			cut := func(on bool) {
				client, server := netip.MustParseAddr(oneClient[0]), netip.MustParseAddr(oneServer[0])
				p.fabric.Cut(client, server, on)
				p.fabric.Cut(server, client, on)
			}
			c, s := p.dialAnew(t)
			p.checkMTU(t, c, s, rdma.MTU4096)
			tc.first(t, c, s)
			cut(true)
			tc.last(t, c, s)
			loseLarge(t, c, s)
			cut(false)
			c, s = p.dialAnew(t)
			p.checkMTU(t, c, s, rdma.MTU4096)
			_, _ = c.Close(), s.Close()
			if got := append(p.hears(clientSide), p.hears(serverSide)...); len(got) > 0 {
				t.Errorf("told: %+v", got)
			}
		})
	}
}

// TestNarrowPath_lostRequest: that a link runs out of retries at its first large WRITE tells of the path, and at a message behind it,
// when the WRITE itself may have arrived, it does not.
func TestNarrowPath_lostRequest(t *testing.T) {
	for _, tc := range []struct {
		op   rdma.Opcode
		told int
	}{{rdma.OpWrite, 1}, {rdma.OpSend, 0}} {
		t.Run(tc.op.String(), func(t *testing.T) {
			told := make(chan smcr.PathMTU, 1)
			p := newPair(t, func(c *smcr.Config) { c.Hooks.PathMTU = func(m smcr.PathMTU) { told <- m } })
			c, s := p.dial(t)
			exchange(t, c, s)
			p.fabric.hold(true)
			if _, err := c.Write(make([]byte, 16<<10)); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "the request", func() bool { return p.fabric.exhaust(p.client, tc.op) })
			waitFor(t, "the end of the link group", func() bool { return len(p.client.LinkGroups()) == 0 })
			if len(told) != tc.told {
				t.Errorf("told %d times, want %d", len(told), tc.told)
			}
			_, _ = c.Abort(), s.Abort()
		})
	}
}

// exhaust has the retries of a stack's oldest request of a kind run out, and reports whether there is one.
func (f *fakeFabric) exhaust(s *smcr.Stack, op rdma.Opcode) bool {
	num := s.LinkGroups()[0].Links[0].LocalQPN
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.qps[num]
	i := slices.IndexFunc(q.waiting, func(w fakeSend) bool { return w.wr.Op == op })
	if i < 0 {
		return false
	}
	q.state = rdma.QPError
	q.scq.push(rdma.WC{ID: q.waiting[i].wr.ID, Op: rdma.OpSend, Status: rdma.StatusRetryExceeded, QPN: num})
	return true
}
