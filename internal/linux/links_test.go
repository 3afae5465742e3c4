// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"io/fs"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func TestLinkChanges(t *testing.T) {
	ns := newNS(t)
	ctx, cancel := context.WithCancel(t.Context())
	var changes <-chan struct{}
	mustDo(t, ns.Do(func() (err error) {
		changes, err = LinkChanges(ctx)
		return err
	}))
	told := func(what string) {
		t.Helper()
		select {
		case <-changes:
		case <-time.After(waitLimit):
			t.Fatalf("not told of %s", what)
		}
	}
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		return h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0"}, PeerName: "v1"})
	})())
	told("a new interface")
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		v0, err := h.LinkByName("v0")
		if err != nil {
			return err
		}
		return h.LinkSetUp(v0)
	})())
	told("one that came up")
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		v0, err := h.LinkByName("v0")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr("192.0.2.1/24")
		if err != nil {
			return err
		}
		return h.AddrAdd(v0, a)
	})())
	told("an address")
	cancel()
	for range changes { // the rest of the burst, and the end
	}
}

// The other end of a veth is in another namespace, and no parent. Those of macvlan and ipvlan are looked
// for where the kernel has these, in a guest (internal/kernelpath).
func TestParentsElsewhere_veth(t *testing.T) {
	pod, peer := newNS(t), newNS(t)
	joinNS(t, pod, peer)
	if got, err := ParentsElsewhere(pod); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestSysctl(t *testing.T) {
	ns := newNS(t)
	const name = "net/ipv4/tcp_fwmark_accept"
	mustDo(t, SetSysctl(ns, name, "1"))
	if got, err := Sysctl(ns, name); err != nil || got != "1" {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := Sysctl(ns, "net/nothing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of a variable that is not there: %v", err)
	}
}
