// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// space is a network namespace without a name. Nothing but a file of this
// process, and the processes in it, keep it: it goes away with them, however
// they end.
type space struct {
	name string
	file *os.File
}

// newSpace makes a namespace in which TCP has this congestion control. Only the main goroutine may call it, which owns
// the main thread.
func newSpace(name, congestion string) (*space, error) {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open own network namespace: %w", err)
	}
	defer home.Close() //nolint:errcheck // it was only read
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("make network namespace %s (root is needed): %w", name, err)
	}
	f, err := os.Open("/proc/thread-self/ns/net")
	err = errors.Join(err, lab.SetTCPCongestion(congestion))
	if err = errors.Join(err, unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)); err != nil {
		return nil, errors.Join(fmt.Errorf("make network namespace %s: %w", name, err), f.Close())
	}
	s := &space{name, f}
	return s, s.configure(func(h *netlink.Handle) error { return s.up(h, "lo") })
}

// openSpace opens a namespace that somebody else made.
func openSpace(name, path string) (*space, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", name, err)
	}
	return &space{name, f}, nil
}

// do runs f inside the namespace, on the calling thread: see newSpace.
func (s *space) do(f func() error) error {
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer home.Close() //nolint:errcheck // it was only read
	if err := unix.Setns(int(s.file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", s.name, err)
	}
	return errors.Join(f(), unix.Setns(int(home.Fd()), unix.CLONE_NEWNET))
}

func (s *space) close() error { return s.file.Close() }

// configure runs f with a netlink socket of the namespace.
func (s *space) configure(f func(*netlink.Handle) error) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(s.file.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink in %s: %w", s.name, err)
	}
	defer h.Close()
	return f(h)
}

func (s *space) up(h *netlink.Handle, name string) error {
	l, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s in %s: %w", name, s.name, err)
	}
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s up in %s: %w", name, s.name, err)
	}
	return nil
}

// end is one end of a veth pair.
type end struct {
	in   *space
	name string
	addr netip.Prefix
}

// join connects two namespaces by a veth pair.
func join(mtu int, a, b end) error {
	err := a.in.configure(func(h *netlink.Handle) error {
		v := &netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: a.name, MTU: mtu},
			PeerName:  b.name, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(b.in.file.Fd()),
		}
		return h.LinkAdd(v)
	})
	if err != nil {
		return fmt.Errorf("join %s and %s: %w", a.in.name, b.in.name, err)
	}
	return errors.Join(a.settle(), b.settle())
}

func (e end) settle() error {
	return e.in.configure(func(h *netlink.Handle) error {
		l, err := h.LinkByName(e.name)
		if err != nil {
			return fmt.Errorf("interface %s in %s: %w", e.name, e.in.name, err)
		}
		a, err := netlink.ParseAddr(e.addr.String())
		if err != nil {
			return err
		}
		if err := h.AddrAdd(l, a); err != nil {
			return fmt.Errorf("address %s on %s in %s: %w", e.addr, e.name, e.in.name, err)
		}
		return e.in.up(h, e.name)
	})
}

// manyConns lets a namespace make many connections in a short time.
func (s *space) manyConns() error {
	return s.do(func() error {
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte("10000 65000"), 0),
			os.WriteFile("/proc/sys/net/ipv4/tcp_tw_reuse", []byte("1"), 0))
	})
}
