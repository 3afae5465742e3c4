// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// softPeer is a stack on several software devices, any of which can be lost.
type softPeer struct {
	*smcr.Stack
	devices []*soft.Device
}

func newSoftPeer(tb testing.TB, f *softtest.Fabric, v smcr.VersionSet, addrs []string, edit ...func(*smcr.Config)) *softPeer {
	tb.Helper()
	p := &softPeer{}
	for _, a := range addrs {
		p.devices = append(p.devices, f.Open(tb, soft.Config{Name: "soft-" + a, Addr: netip.MustParseAddr(a), MTU: rdma.MTU4096}))
	}
	p.Stack = newStack(tb, p.devices[0], append(edit, versions(v), func(c *smcr.Config) {
		c.Devices = nil
		for _, d := range p.devices {
			c.Devices = append(c.Devices, d)
		}
	})...)
	return p
}

// multiPair is two such peers and a listener.
func multiPair(tb testing.TB, f *softtest.Fabric, v smcr.VersionSet, client, server []string) (c, s *softPeer, p *pair) {
	tb.Helper()
	c, s = newSoftPeer(tb, f, v, client), newSoftPeer(tb, f, v, server)
	p = &pair{client: c.Stack, server: s.Stack}
	p.listen(tb)
	return c, s, p
}

// waitGroup waits until the stack's only group is as told.
func waitGroup(tb testing.TB, s *smcr.Stack, redundancy string, links int) smcr.GroupInfo {
	tb.Helper()
	var last []smcr.GroupInfo
	waitFor(tb, fmt.Sprintf("one group %s with %d links", redundancy, links), func() bool {
		last = s.LinkGroups()
		return len(last) == 1 && last[0].Redundancy == redundancy && len(last[0].Links) == links
	})
	return last[0]
}

var (
	oneClient  = []string{"192.0.2.1"}
	twoClients = []string{"192.0.2.1", "198.51.100.1"}
	oneServer  = []string{"192.0.2.2"}
	twoServers = []string{"192.0.2.2", "198.51.100.2"}
)

func TestGroup_redundancy(t *testing.T) { eachVersion(t, testRedundancy) }

func testRedundancy(t *testing.T, v smcr.VersionSet) {
	for _, tc := range []struct {
		name             string
		client, server   []string
		atClient         string
		atServer         string
		links            int
		firstContactTime time.Duration
	}{
		{"one RNIC each", oneClient, oneServer, "SINGLE", "SINGLE", 1, time.Second},
		{"two RNICs each", twoClients, twoServers, "SYMMETRIC", "SYMMETRIC", 2, time.Second},
		{"two at the client", twoClients, oneServer, "ASYMMETRIC PEER", "ASYMMETRIC LOCAL", 2, time.Second},
		{"two at the server", oneClient, twoServers, "ASYMMETRIC LOCAL", "ASYMMETRIC PEER", 2, time.Second},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, _, p := multiPair(t, softtest.NewFabric(t, 1), v, tc.client, tc.server)
			start := time.Now()
			a, b := p.dial(t)
			if d := time.Since(start); d > tc.firstContactTime {
				t.Errorf("first contact took %v", d)
			}
			exchange(t, a, b)
			waitGroup(t, p.client, tc.atClient, tc.links)
			waitGroup(t, p.server, tc.atServer, tc.links)
			if a.Mode() != smcr.ModeSMCR {
				t.Error("not SMC-R")
			}
			_, _ = a.Close(), b.Close()
		})
	}
}

// TestGroup_survivesDevice loses each device in turn while several
// connections stream in both directions.
func TestGroup_survivesDevice(t *testing.T) { eachVersion(t, testSurvivesDevice) }

func testSurvivesDevice(t *testing.T, v smcr.VersionSet) {
	for side := range 2 {
		for lost := range 2 {
			t.Run(fmt.Sprintf("side %d device %d", side, lost), func(t *testing.T) {
				c, s, p := multiPair(t, softtest.NewFabric(t, 1), v, twoClients, twoServers)
				first, firstPeer := p.dial(t)
				waitGroup(t, p.client, "SYMMETRIC", 2)
				waitGroup(t, p.server, "SYMMETRIC", 2)
				const conns, size = 4, 8 << 20
				var wg sync.WaitGroup
				pairs := [][2]*smcr.Conn{{first, firstPeer}}
				for len(pairs) < conns {
					a, b := p.dial(t)
					pairs = append(pairs, [2]*smcr.Conn{a, b})
				}
				half := make(chan struct{}, 2*conns)
				for i, pr := range pairs {
					for k := range 2 {
						from, to, seed := pr[k], pr[1-k], uint64(2*i+k)
						wg.Go(func() {
							if n, err := from.ReadFrom(io.LimitReader(randomReader(seed), size)); err != nil || n != size {
								t.Errorf("stream %d: sent %d: %v", seed, n, err)
							}
							if err := from.CloseWrite(); err != nil {
								t.Errorf("stream %d: %v", seed, err)
							}
						})
						wg.Go(func() {
							want := randomReader(seed)
							buf, exp := make([]byte, 64<<10), make([]byte, 64<<10)
							for total := 0; ; {
								n, err := to.Read(buf)
								_, _ = io.ReadFull(want, exp[:n])
								if string(buf[:n]) != string(exp[:n]) {
									t.Errorf("stream %d differs within %d bytes after %d", seed, n, total)
									return
								}
								if total < size/2 && total+n >= size/2 {
									half <- struct{}{}
								}
								total += n
								if errors.Is(err, io.EOF) && total == size {
									return
								}
								if err != nil {
									t.Errorf("stream %d after %d: %v", seed, total, err)
									return
								}
							}
						})
					}
				}
				ended := make(chan struct{})
				go func() {
					wg.Wait()
					close(ended)
				}()
				select {
				case <-half: // some are under way, some have not begun
				case <-ended:
					t.Fatal("nothing is under way when the device goes")
				}
				dev := [2]*softPeer{c, s}[side].devices[lost]
				if err := dev.Close(); err != nil {
					t.Error(err)
				}
				<-ended
				// The device that is left carries both links.
				asym := [2]string{"ASYMMETRIC LOCAL", "ASYMMETRIC PEER"}
				waitGroup(t, p.client, asym[side], 2)
				waitGroup(t, p.server, asym[1-side], 2)
				for _, pr := range pairs {
					_, _ = pr[0].Close(), pr[1].Close()
				}
			})
		}
	}
}

// TestGroup_cuts cuts the first link in each way while a dialogue goes on, and
// restores it. The dialogue must not end, and must not stand still for long.
func TestGroup_cuts(t *testing.T) { eachVersion(t, testCuts) }

func testCuts(t *testing.T, v smcr.VersionSet) {
	client, server := netip.MustParseAddr(twoClients[0]), netip.MustParseAddr(twoServers[0])
	for _, tc := range []struct {
		name string
		cut  func(f *softtest.Fabric, on bool)
		gap  time.Duration // the longest that is all right, with room for a busy machine
		left string
	}{
		{"client's port down", func(f *softtest.Fabric, on bool) { f.SetLink(client, !on) }, 200 * time.Millisecond, "ASYMMETRIC LOCAL"},
		{"server's port down", func(f *softtest.Fabric, on bool) { f.SetLink(server, !on) }, 200 * time.Millisecond, "ASYMMETRIC PEER"},
		{"nothing to the server", func(f *softtest.Fabric, on bool) { f.Cut(client, server, on) }, time.Second, ""},
		{"nothing to the client", func(f *softtest.Fabric, on bool) { f.Cut(server, client, on) }, time.Second, ""},
		{"blackhole", func(f *softtest.Fabric, on bool) { f.Cut(client, server, on); f.Cut(server, client, on) }, time.Second, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := softtest.NewFabric(t, 1)
			_, _, p := multiPair(t, f, v, twoClients, twoServers)
			a, b := p.dial(t)
			waitGroup(t, p.client, "SYMMETRIC", 2)
			waitGroup(t, p.server, "SYMMETRIC", 2)
			stop, done := make(chan struct{}), make(chan struct{})
			var worst time.Duration
			rounds := 0
			go func() { // the server echoes
				buf := make([]byte, 64)
				for {
					if _, err := io.ReadFull(b, buf); err != nil {
						return
					}
					if _, err := b.Write(buf); err != nil {
						t.Errorf("echo: %v", err)
						return
					}
				}
			}()
			go func() {
				defer close(done)
				buf, got := make([]byte, 64), make([]byte, 64)
				for ; ; rounds++ {
					select {
					case <-stop:
						return
					default:
					}
					buf[0], buf[1] = byte(rounds), byte(rounds>>8)
					start := time.Now()
					if _, err := a.Write(buf); err != nil {
						t.Errorf("round %d: %v", rounds, err)
						return
					}
					if _, err := io.ReadFull(a, got); err != nil || string(got) != string(buf) {
						t.Errorf("round %d: got %x, %v", rounds, got[:2], err)
						return
					}
					worst = max(worst, time.Since(start))
				}
			}()
			tc.cut(f, true)
			waitFor(t, "the group notices the cut", func() bool {
				gs := p.client.LinkGroups()
				return len(gs) == 1 && gs[0].Redundancy != "SYMMETRIC"
			})
			if tc.left != "" {
				waitGroup(t, p.client, tc.left, 2)
			}
			tc.cut(f, false)
			if tc.left != "" { // a port that comes back says so; for the others the group tries again later
				waitGroup(t, p.client, "SYMMETRIC", 2)
				waitGroup(t, p.server, "SYMMETRIC", 2)
			}
			close(stop)
			<-done
			t.Logf("%d rounds, the longest took %v", rounds, worst)
			if worst > tc.gap {
				t.Errorf("a round took %v, want at most %v", worst, tc.gap)
			}
			_, _ = a.Close(), b.Close()
		})
	}
}

// fullAccount has no bytes left for small things once it is full, but for large ones.
type fullAccount struct {
	smcr.TestAccount
	full atomic.Bool
}

func (a *fullAccount) Take(client netip.Addr, n int) error {
	if n < 4096 && a.full.Load() {
		return errors.New("full")
	}
	return a.TestAccount.Take(client, n)
}

// The messages about another link take no memory of their own: where that is used up, the link over which they go, which is
// the only one, and its connections stay.
func TestGroup_addsLinkWithoutMemory(t *testing.T) {
	for side, name := range []string{"client", "server"} {
		t.Run(name, func(t *testing.T) {
			f, full := softtest.NewFabric(t, 1), &fullAccount{TestAccount: smcr.TestAccount{Left: 1 << 30}}
			var stacks [2]*smcr.Stack
			for i, addrs := range [][]string{twoClients, twoServers} {
				stacks[i] = newSoftPeer(t, f, smcr.VersionsV2, addrs, func(c *smcr.Config) {
					if i == side {
						c.Account = full
					}
				}).Stack
			}
			p := &pair{client: stacks[0], server: stacks[1]}
			p.listen(t)
			set := func(up bool) {
				for _, addr := range []string{twoClients[1], twoServers[1]} {
					f.SetLink(netip.MustParseAddr(addr), up)
				}
			}
			a, b := p.dial(t)
			waitGroup(t, p.client, "SYMMETRIC", 2)
			waitGroup(t, p.server, "SYMMETRIC", 2)
			set(false)
			if c, s := waitGroup(t, p.client, "SINGLE", 1), waitGroup(t, p.server, "SINGLE", 1); !c.Degraded || !s.Degraded {
				t.Errorf("degraded %t and %t after the loss of a link", c.Degraded, s.Degraded)
			}
			exchange(t, a, b)
			full.full.Store(true)
			set(true)
			waitGroup(t, p.client, "SYMMETRIC", 2)
			waitGroup(t, p.server, "SYMMETRIC", 2)
			exchange(t, a, b)
			_, _ = a.Close(), b.Close()
		})
	}
}

// TestStack_noDeviceLeft: the reason is told, and the connection is TCP.
func TestStack_noDeviceLeft(t *testing.T) {
	_, s, p := multiPair(t, softtest.NewFabric(t, 1), smcr.VersionsBoth, oneClient, oneServer)
	a, b := p.dial(t)
	if err := s.devices[0].Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the server's group is over", func() bool { return len(p.server.LinkGroups()) == 0 })
	_, _ = a.Close(), b.Close()
	c, d := p.dial(t)
	if i := c.Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonNoDevR || !i.PeerDeclined {
		t.Errorf("%v because of %v, peer declined %v; want TCP because of %v of the peer", i.Mode, i.Reason, i.PeerDeclined, clc.ReasonNoDevR)
	}
	exchange(t, c, d)
	_, _ = c.Close(), d.Close()
}
