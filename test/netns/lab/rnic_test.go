// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// packets sends a packet from node 1 to node 2 until it arrives, or for a
// while.
func packets(t *testing.T, l *Lab, rnic int) (arrived bool) {
	t.Helper()
	open := func(n *Node, port uint16) *net.UDPConn {
		var c *net.UDPConn
		must(t, n.NS.Do(func() (err error) {
			c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(n.RNICs[rnic].Address, port)))
			return err
		}))
		t.Cleanup(func() { _ = c.Close() }) // it may be closed
		return c
	}
	from, to := open(l.Nodes[0], 0), open(l.Nodes[1], roce)
	defer func() { must(t, errors.Join(from.Close(), to.Close())) }()
	for range 20 {
		_, _ = from.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(l.Nodes[1].RNICs[rnic].Address, roce)) // there may be no route
		must(t, to.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
		_, _, err := to.ReadFromUDPAddrPort(make([]byte, 8))
		if err == nil {
			return true
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	return false
}

// waitCarrier waits until an interface is up.
func waitCarrier(t *testing.T, ns *linux.NetNS, name string) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); carrier(t, ns, name) != "up"; {
		if now := <-tick.C; now.After(deadline) {
			t.Fatalf("%s is not up within 10 s", name)
		}
	}
}

func carrier(t *testing.T, ns *linux.NetNS, name string) (state string) {
	t.Helper()
	must(t, ns.Do(func() error {
		link, err := netlink.LinkByName(name)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			state = "gone"
			return nil
		}
		if err == nil {
			state = "down"
			if link.Attrs().RawFlags&0x40 != 0 { // IFF_RUNNING
				state = "up"
			}
		}
		return err
	}))
	return state
}

// TestRNIC_breaks goes through the ways an RNIC breaks: the other one works all
// the time, and the other node notices nothing.
func TestRNIC_breaks(t *testing.T) {
	testenv.Need(t, testenv.Nftables, testenv.Program("nft"))
	l := newLabWith(t, Config{Switched: true})
	n := l.Nodes[1]
	for _, tc := range []struct {
		name       string
		cut, mend  func() error
		wantAtNode string
	}{
		{"port", func() error { return n.SetPort(1, false) }, func() error { return n.SetPort(1, true) }, "down"},
		{"device", func() error { return n.Unplug(1) }, func() error { return n.Plug(1) }, "gone"},
		{"silence", func() error { return n.Deafen(t.Context(), 1, true) }, func() error { return n.Deafen(t.Context(), 1, false) }, "up"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if !packets(t, l, 1) {
				t.Fatal("nothing arrives before")
			}
			must(t, tc.cut())
			if got := carrier(t, n.NS, "underlay1"); got != tc.wantAtNode {
				t.Errorf("the interface is %s, want %s", got, tc.wantAtNode)
			}
			if got := carrier(t, l.Nodes[0].NS, "underlay1"); got != "up" {
				t.Errorf("the other node's interface is %s", got)
			}
			if tc.name == "silence" && packets(t, l, 1) {
				t.Error("packets arrive")
			}
			if !packets(t, l, 0) {
				t.Error("the other network does not work")
			}
			must(t, tc.mend())
			if !packets(t, l, 1) {
				t.Error("nothing arrives after")
			}
		})
	}
}

func TestRNIC_cable(t *testing.T) {
	l := newLabWith(t, Config{RNICs: 3})
	for i := range 3 {
		// An interface sends nothing before it is seen to be up, up to a second
		// late, and asks for an address that got no answer a second later again.
		for _, n := range l.Nodes {
			waitCarrier(t, n.NS, fmt.Sprint("underlay", i))
		}
		if !packets(t, l, i) {
			t.Errorf("nothing arrives on underlay %d", i)
		}
	}
	if err := l.Nodes[0].Unplug(0); err == nil {
		t.Error("one end of a cable vanished")
	}
	if _, err := New(Config{RNICs: 9}); err == nil {
		t.Error("a lab with 9 RNICs")
	}
}
