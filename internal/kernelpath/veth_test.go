// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func inet(local, net string) linux.Inet {
	return linux.Inet{Local: netip.MustParseAddr(local), Net: netip.MustParsePrefix(net)}
}

func addrs(texts ...string) (out []netip.Addr) {
	for _, t := range texts {
		out = append(out, netip.MustParseAddr(t))
	}
	return out
}

// Of the RNICs that serves pods with a veth that does already, else one in a known physical network, else the first.
func TestChoose(t *testing.T) {
	port := func(name, pnet string) rnic {
		return rnic{device: name, port: 1, active: true, pnet: pnet, inets: []linux.Inet{inet("10.1.0.1", "10.1.0.0/16")}, gids: addrs("10.1.0.1")}
	}
	down, without, foreign := port("a0", "NET"), port("a1", "NET"), port("a2", "NET")
	down.active, without.gids, foreign.gids = false, nil, addrs("10.1.0.9")
	// The address of ours that is left there is no GID of the node's.
	ours := port("a3", "NET")
	ours.inets = []linux.Inet{inet("10.1.0.1", "10.0.0.0/8")}
	for _, tt := range []struct {
		name  string
		was   vethRNIC
		all   []rnic
		want  string
		fails bool
	}{
		{name: "none", fails: true},
		{name: "none that can", all: []rnic{down, without, foreign}, fails: true},
		{name: "the first", all: []rnic{down, without, foreign, port("r1", ""), port("r0", "")}, want: "r0"},
		{name: "one with a physical network", all: []rnic{port("r0", ""), port("r1", "NET")}, want: "r1"},
		{name: "that which serves", was: vethRNIC{Device: "r2", Port: 1}, all: []rnic{port("r1", "NET"), port("r2", "")}, want: "r2"},
		{name: "that which serves is down", was: vethRNIC{Device: "a0", Port: 1}, all: []rnic{down, port("r2", "")}, fails: true},
		{name: "that which serves has lost its address", was: vethRNIC{Device: "a3", Port: 1, Inets: ours.inets}, all: []rnic{ours, port("r2", "")}, fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := choose(tt.all, tt.was)
			if got.device != tt.want || errors.Is(err, ErrNoVethRNIC) != tt.fails {
				t.Errorf("%s, %v; want %q, an error: %t", got.device, err, tt.want, tt.fails)
			}
		})
	}
}

// The RNIC's interface gets an address for pods in none of its networks: its own one again, whatever ours says already.
func TestWantedInets(t *testing.T) {
	r := rnic{inets: []linux.Inet{inet("192.0.2.1", "192.0.2.0/24"), inet("10.1.0.1", "10.1.0.0/16")}, gids: addrs("10.1.0.1", "192.0.2.1")}
	ten := inet("10.1.0.1", "10.0.0.0/8")
	for _, tt := range []struct {
		name string
		ours []linux.Inet
		pods []netip.Addr
		want []linux.Inet
	}{
		{name: "no pod"},
		{name: "in networks of the interface", pods: addrs("10.1.2.3", "192.0.2.5")},
		{name: "in others", pods: addrs("10.244.0.7", "10.2.0.1", "172.20.0.1", "203.0.113.7"), want: []linux.Inet{ten, inet("10.1.0.1", "172.16.0.0/12"), inet("10.1.0.1", "203.0.113.0/24")}},
		{name: "again", ours: []linux.Inet{ten}, pods: addrs("10.244.0.7"), want: []linux.Inet{ten}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			now := r
			now.inets = slices.Concat(r.inets, tt.ours)
			if got := wantedInets(&now, tt.ours, tt.pods); !slices.Equal(got, tt.want) {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
	r.gids = nil
	if got := wantedInets(&r, []linux.Inet{ten}, addrs("10.244.0.7")); got != nil {
		t.Errorf("%v of an interface that has lost its address", got)
	}
}

// vethTo makes a veth between a host and a pod, with a route to the pod's address only.
func vethTo(t *testing.T, host, pod *linux.NetNS, gateway, addr netip.Addr) {
	t.Helper()
	at := func(ns *linux.NetNS, f func() error) {
		if err := ns.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	at(host, func() error {
		return pod.WithFD(func(fd int) error {
			return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pod0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(fd)})
		})
	})
	up := func(name string, own, other netip.Addr) func() error {
		return func() error {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			to := &net.IPNet{IP: other.AsSlice(), Mask: net.CIDRMask(32, 32)}
			return errors.Join(netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(32, 32)}}), netlink.LinkSetUp(l),
				netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: to, Scope: netlink.SCOPE_LINK}))
		}
	}
	at(host, up("pod0", gateway, addr))
	at(pod, up("eth0", addr, gateway))
}

// A pod's address comes to those of the host and goes without a moment in which the host takes packets to the pod for its own.
func TestShadows_noGap(t *testing.T) {
	need(t)
	host, _ := scratch(t)
	pod, _ := scratch(t)
	gateway, addr := netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("10.9.0.2")
	vethTo(t, host, pod, gateway, addr)
	var ln net.Listener
	err := pod.Do(func() (err error) {
		var lc net.ListenConfig
		ln, err = lc.Listen(t.Context(), "tcp4", addr.String()+":7000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	go func() {
		if c, err := ln.Accept(); err == nil {
			_, _ = io.Copy(io.Discard, c)
		}
	}()
	var conn net.Conn
	err = host.Do(func() (err error) {
		var d net.Dialer
		conn, err = d.DialContext(t.Context(), "tcp4", addr.String()+":7000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan error, 1)
	go func() {
		b := make([]byte, 100)
		for ctx.Err() == nil {
			if _, err := conn.Write(b); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	const times = 300
	for i := range times {
		want := [][]netip.Addr{{addr}, nil}[i%2]
		if err := linux.SetShadows(host, want); err != nil {
			t.Fatal(err)
		}
		has, err := linux.InterfacesWith(host, addr)
		if err != nil || len(has) != len(want) {
			t.Fatalf("%v, %v, want %v", has, err, want)
		}
	}
	cancel()
	if err := <-sent; err != nil {
		t.Errorf("a connection to the pod broke: %v", err)
	}
	_ = conn.Close()
	if left := routesTo(t, host, addr); len(left) != 1 {
		t.Errorf("routes to the pod are %v, want the one that was there", left)
	}
}

// routesTo lists the routes of a host to an address, of all tables.
func routesTo(t *testing.T, host *linux.NetNS, a netip.Addr) (out []string) {
	t.Helper()
	err := host.Do(func() error {
		all, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE)
		for _, r := range all {
			if r.Dst != nil && r.Dst.IP.Equal(a.AsSlice()) {
				out = append(out, fmt.Sprint(r))
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// A pod that cannot be looked at does not keep the node from getting what its pods need, and is not taken for gone.
func TestVeths_keepOthers(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	host, _ := scratch(t)
	err := host.Do(func() error { // so that the attempt is seen, with a kernel that has no SMC, too
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: linux.ShadowLink}, PeerName: "other"})
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	rec := vethRecord{Pods: map[uint64]vethPod{1: {NetNS: filepath.Join(file, "a"), Veths: []linux.NamedAddr{{Name: "eth0", Addr: netip.MustParseAddr("10.9.0.2")}}}}}
	err = NewVeths(file+".json").keep(host, &rec)
	if !errors.Is(err, unix.ENOTDIR) || len(rec.Pods) != 1 {
		t.Errorf("%v; %v; want that the pod is left, and why it cannot be looked at", err, rec.Pods)
	}
	if !strings.Contains(fmt.Sprint(err), "of kind veth, which is somebody else's") {
		t.Errorf("%v; want that the pods' addresses were to be there", err)
	}
}
