// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// routedNet is two machines and a router, in network namespaces: each machine
// has two interfaces, each in a subnet of its own with the router. TCP uses the
// first.
//
//	client 10.91.0.1, 10.91.1.1 -- 10.91.x.254 router 10.92.x.254 -- server 10.92.0.1, 10.92.1.1
type routedNet struct {
	client, router, server string
	mac                    map[netip.Addr]rdma.MAC // of the router, by a machine's address
}

func routedAddr(machine, rail, host byte) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 91 + machine, rail, host})
}

func newRoutedNet(t *testing.T) *routedNet {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("ip"))
	var r [4]byte
	_, _ = rand.Read(r[:])
	id := "ks-" + hex.EncodeToString(r[:])
	n := &routedNet{client: id + "c", router: id + "r", server: id + "s", mac: map[netip.Addr]rdma.MAC{}}
	for _, ns := range []string{n.client, n.router, n.server} {
		runIP(t, "netns", "add", ns)
		t.Cleanup(func() { runIP(t, "netns", "del", ns) })
		runIP(t, "-n", ns, "link", "set", "lo", "up")
	}
	n.in(t, n.router, func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) })
	for m, ns := range []string{n.client, n.server} {
		for rail := range byte(2) {
			ours, router, dev := routedAddr(byte(m), rail, 1), routedAddr(byte(m), rail, 254), fmt.Sprintf("eth%d", rail)
			far := fmt.Sprintf("m%dr%d", m, rail)
			runIP(t, "-n", ns, "link", "add", dev, "type", "veth", "peer", "name", far, "netns", n.router)
			runIP(t, "-n", ns, "addr", "add", ours.String()+"/24", "dev", dev)
			runIP(t, "-n", n.router, "addr", "add", router.String()+"/24", "dev", far)
			runIP(t, "-n", n.router, "link", "set", far, "up")
			runIP(t, "-n", ns, "link", "set", dev, "up")
			runIP(t, "-n", ns, "route", "add", netip.PrefixFrom(routedAddr(1-byte(m), rail, 0), 24).String(), "via", router.String(), "dev", dev)
			n.mac[ours] = macOf(t, n.router, far)
		}
	}
	return n
}

func runIP(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func macOf(t *testing.T, ns, dev string) rdma.MAC {
	t.Helper()
	var links []struct{ Address string }
	if err := json.Unmarshal([]byte(runIP(t, "-n", ns, "-j", "link", "show", "dev", dev)), &links); err != nil {
		t.Fatal(err)
	}
	mac, err := net.ParseMAC(links[0].Address)
	if err != nil {
		t.Fatal(err)
	}
	return rdma.MAC(mac)
}

// in calls f on a thread that is in the named namespace.
func (n *routedNet) in(t *testing.T, name string, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		// The thread ends with the goroutine: nothing else runs there.
		runtime.LockOSThread()
		done <- func() error {
			ns, err := os.Open("/run/netns/" + name)
			if err != nil {
				return err
			}
			defer func() { _ = ns.Close() }()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			return f()
		}()
	}()
	if err := <-done; err != nil {
		t.Fatalf("in network namespace %s: %v", name, err)
	}
}

// route is Config.Route as the namespaces have it.
func (n *routedNet) route(src, dst netip.Addr) (clc.Route, error) {
	if src.As4()[2] != dst.As4()[2] {
		return clc.Route{}, nil // the rails are apart
	}
	return clc.Route{Found: true, Gateway: true, MAC: n.mac[src]}, nil
}

// stack starts a stack on machine 0 or 1 with a device on each rail.
func (n *routedNet) stack(t *testing.T, machine byte, rails int, edit ...func(*smcr.Config)) *smcr.Stack {
	t.Helper()
	ns := [2]string{n.client, n.server}[machine]
	var devices []rdma.Device
	for rail := range byte(rails) {
		var d *soft.Device
		n.in(t, ns, func() (err error) {
			d, err = soft.Open(soft.Config{Name: fmt.Sprintf("soft%d", rail), Addr: routedAddr(machine, rail, 1)})
			return err
		})
		t.Cleanup(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		waitFor(t, "port active", func() bool { return d.Port().State == rdma.PortActive })
		devices = append(devices, d)
	}
	return newStack(t, nil, append(edit, func(c *smcr.Config) {
		c.Devices, c.Route = devices, n.route
		c.Prefixes = []netip.Prefix{netip.PrefixFrom(routedAddr(machine, 0, 0), 24)}
	})...)
}

// dial opens a connection through the router and returns both ends.
func (n *routedNet) dial(t *testing.T, client, server *smcr.Stack) (c, s *smcr.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var l *smcr.Listener
	n.in(t, n.server, func() (err error) {
		l, err = smcr.Listen(ctx, server, "tcp", routedAddr(1, 0, 1).String()+":0")
		return err
	})
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		accepted <- c
	}()
	n.in(t, n.client, func() error {
		nc, err := (&smcr.Dialer{Stack: client}).DialContext(ctx, "tcp", l.Addr().String())
		if err == nil {
			c = nc.(*smcr.Conn)
		}
		return err
	})
	nc := <-accepted
	if nc == nil {
		t.FailNow()
	}
	return c, nc.(*smcr.Conn)
}

// TestStack_acrossRouter: both the TCP addresses and the RNICs of the two sides
// are in different subnets.
func TestStack_acrossRouter(t *testing.T) {
	n := newRoutedNet(t)
	t.Run("version 2", func(t *testing.T) {
		client, server := n.stack(t, 0, 1), n.stack(t, 1, 1)
		a, b := n.dial(t, client, server)
		if i := a.Info(); i.Mode != smcr.ModeSMCR || i.Version != 2 {
			t.Fatalf("%v because of %v, version %d", i.Mode, i.Reason, i.Version)
		}
		var wg sync.WaitGroup
		const size = 4 << 20
		for i, d := range [][2]*smcr.Conn{{a, b}, {b, a}} {
			wg.Go(func() {
				if k, err := d[0].ReadFrom(io.LimitReader(&pattern{seed: uint64(i)}, size)); err != nil || k != size {
					t.Errorf("sent %d: %v", k, err)
				}
				if err := d[0].CloseWrite(); err != nil {
					t.Error(err)
				}
			})
			wg.Go(func() {
				if k, err := d[1].WriteTo(&pattern{seed: uint64(i)}); err != nil || k != size {
					t.Errorf("received %d: %v", k, err)
				}
			})
		}
		wg.Wait()
		_, _ = a.Close(), b.Close()
	})
	t.Run("version 1 has no subnet in common", func(t *testing.T) {
		client, server := n.stack(t, 0, 1, versions(smcr.VersionsV1)), n.stack(t, 1, 1)
		a, b := n.dial(t, client, server)
		if i := a.Info(); i.Mode != smcr.ModeTCP || i.Reason != clc.ReasonDiffPrefix || !i.PeerDeclined {
			t.Errorf("%v because of %v, want TCP because of DIFFPREFIX", i.Mode, i.Reason)
		}
		exchange(t, a, b)
		_, _ = a.Close(), b.Close()
	})
	t.Run("two rails", func(t *testing.T) {
		client, server := n.stack(t, 0, 2), n.stack(t, 1, 2)
		a, b := n.dial(t, client, server)
		waitGroup(t, client, "SYMMETRIC", 2)
		g := waitGroup(t, server, "SYMMETRIC", 2)
		for _, l := range g.Links {
			if l.LocalGID.Addr().As4()[2] != l.PeerGID.Addr().As4()[2] {
				t.Errorf("link %d joins %v and %v, between which there is no route", l.ID, l.LocalGID, l.PeerGID)
			}
		}
		exchange(t, a, b)
		// The router loses packets of the link: neither port says so.
		lost := a.Info().LinkID
		for _, l := range client.LinkGroups()[0].Links {
			if l.ID == lost {
				rail := l.LocalGID.Addr().As4()[2]
				runIP(t, "-n", n.router, "route", "add", "blackhole", netip.PrefixFrom(routedAddr(1, rail, 1), 32).String())
			}
		}
		exchange(t, a, b)
		waitFor(t, "the link is lost", func() bool {
			gs := client.LinkGroups()
			return len(gs) == 1 && a.Info().LinkID != lost
		})
		exchange(t, a, b)
		_, _ = a.Close(), b.Close()
	})
}
