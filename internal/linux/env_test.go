// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		playRole(role)
	}
	goleak.VerifyTestMain(m)
}

const (
	testMark    = 0x5bc0
	testAppMark = 0x5bc1
	testOutPort = 15001
	testInPort  = 15006
	waitLimit   = 10 * time.Second // for what takes milliseconds
)

// A family is what the tests that run for both IP versions differ in.
type ipFamily struct {
	name     string
	pod      netip.Addr // the pod's address
	peer     netip.Addr // the other machine's
	bits     int
	loopback netip.Addr
}

var families = []ipFamily{
	{"IPv4", netip.MustParseAddr("10.99.7.2"), netip.MustParseAddr("10.99.7.1"), 24, netip.MustParseAddr("127.0.0.1")},
	{"IPv6", netip.MustParseAddr("fd99:7::2"), netip.MustParseAddr("fd99:7::1"), 64, netip.MustParseAddr("::1")},
}

func (f ipFamily) all() netip.Prefix { return netip.PrefixFrom(f.pod, f.bits).Masked() }

// newNS makes a namespace with loopback up and a name of its own; it ends with
// the test. The name is not in /run/netns: "ip netns add" mounts that directory
// over itself, and what was in it can then no longer be unmounted.
func newNS(t testing.TB) *NetNS {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	path := filepath.Join(t.TempDir(), fmt.Sprintf("ks-%08x", rand.Uint32()))
	mustDo(t, os.WriteFile(path, nil, 0o400))
	var err error
	onDisposableThread(func() {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			err = unix.Mount(selfNetNS, path, "", unix.MS_BIND, "")
		}
	})
	if err != nil {
		t.Fatalf("make network namespace %s: %v", path, err)
	}
	t.Cleanup(func() { deleteNS(t, path) })
	ns, err := OpenNetNS(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDo(t, ns.Close()) })
	// Duplicate address detection of link-local addresses costs a second.
	giveSysctl(t, ns, "net/ipv6/conf/default/accept_dad", "0")
	mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		return h.LinkSetUp(lo)
	})())
	return ns
}

// deleteNS takes the name away, like a container runtime; once more is no error.
func deleteNS(t testing.TB, path string) {
	t.Helper()
	if _, err := os.Lstat(path); os.IsNotExist(err) {
		return
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) { // not mounted
		t.Errorf("unmount network namespace %s: %v", path, err)
	}
	if err := os.Remove(path); err != nil {
		t.Errorf("delete network namespace %s: %v", path, err)
	}
}

func mustDo(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newPair makes two namespaces joined by a veth: the pod and its peer.
func newPair(t testing.TB) (pod, peer *NetNS) {
	t.Helper()
	pod, peer = newNS(t), newNS(t)
	joinNS(t, pod, peer)
	setAddresses(t, pod, peer)
	return pod, peer
}

// joinNS puts the ends of a veth, both called eth0, into a and b.
func joinNS(t testing.TB, a, b *NetNS) {
	t.Helper()
	mustDo(t, inNetlink(a, func(h *netlink.Handle) error {
		la := netlink.NewLinkAttrs()
		la.Name = "eth0"
		return h.LinkAdd(&netlink.Veth{LinkAttrs: la, PeerName: "eth0", PeerNamespace: netlink.NsFd(b.fd)})
	})())
}

// awaitOwnRoute waits for the route to an own address. The kernel makes that of IPv6 a moment after the address: until
// then a packet to it leaves the machine.
func awaitOwnRoute(t testing.TB, ns *NetNS, a netip.Addr) {
	t.Helper()
	waitFor(t, "the route to "+a.String(), func() (local bool) {
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error {
			rs, err := h.RouteGet(a.AsSlice())
			local = err == nil && len(rs) == 1 && rs[0].Type == unix.RTN_LOCAL
			return nil
		})())
		return local
	})
}

func setAddresses(t testing.TB, pod, peer *NetNS) {
	t.Helper()
	for ns, side := range map[*NetNS]func(ipFamily) netip.Addr{
		pod:  func(f ipFamily) netip.Addr { return f.pod },
		peer: func(f ipFamily) netip.Addr { return f.peer },
	} {
		var all []netip.Prefix
		for _, f := range families {
			all = append(all, netip.PrefixFrom(side(f), f.bits))
		}
		mustDo(t, inNetlink(ns, func(h *netlink.Handle) error { return upWith(h, "eth0", all...) })())
	}
}

// upWith gives an interface addresses and sets it up.
func upWith(h *netlink.Handle, name string, addresses ...netip.Prefix) error {
	l, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	for _, address := range addresses {
		a, err := netlink.ParseAddr(address.String())
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if err := h.AddrAdd(l, a); err != nil {
			return err
		}
	}
	return h.LinkSetUp(l)
}

// listen listens in ns; the listener ends with the test.
func listen(t testing.TB, ns *NetNS, control Control, a netip.Addr, port uint16) *net.TCPListener {
	t.Helper()
	ln, err := ListenInNS(t.Context(), ns, control, netip.AddrPortFrom(a, port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

// dialNS connects from ns like an application: without mark.
func dialNS(t testing.TB, ns *NetNS, control Control, dst netip.AddrPort) (*net.TCPConn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	c, err := DialInNS(ctx, ns, control, netip.Addr{}, dst)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	return c, nil
}

func mustDial(t testing.TB, ns *NetNS, control Control, dst netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := dialNS(t, ns, control, dst)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustAccept(t testing.TB, ln *net.TCPListener) *net.TCPConn {
	t.Helper()
	_ = ln.SetDeadline(time.Now().Add(waitLimit))
	c, err := ln.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	return c
}

// exchange proves that bytes pass both ways between the two ends.
func exchange(t testing.TB, a, b net.Conn) {
	t.Helper()
	for _, ends := range [][2]net.Conn{{a, b}, {b, a}} {
		text := fmt.Sprintf("%08x", rand.Uint32())
		if _, err := io.WriteString(ends[0], text); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(text))
		if _, err := io.ReadFull(ends[1], got); err != nil {
			t.Fatal(err)
		}
		if string(got) != text {
			t.Fatalf("read %q, want %q", got, text)
		}
	}
}

// served tells which listener a new connection to dst reaches. The listeners
// answer with their name; refused is "refused".
func served(t testing.TB, ns *NetNS, control Control, dst netip.AddrPort) string {
	t.Helper()
	c, err := dialNS(t, ns, control, dst)
	if err != nil {
		if strings.Contains(err.Error(), "refused") {
			return "refused"
		}
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// answer makes a listener answer each connection with its name.
func answer(t testing.TB, ln *net.TCPListener, name string) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, name)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = ln.Close()
		<-done
	})
}

// waitFor waits until cond holds.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(waitLimit); !cond(); {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", waitLimit, what)
		}
		time.Sleep(time.Millisecond) // polls a real kernel
	}
}

// openFDs counts the open files of this process.
func openFDs(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func testConfig(f ipFamily) RedirectConfig {
	return RedirectConfig{
		Mark: testMark, AppMark: testAppMark, OutboundPort: testOutPort, InboundPort: testInPort,
		Outbound:    []OutboundRule{{Prefix: f.all()}},
		InboundAll:  true,
		FailOpenTTL: maxFailOpenTTL, // a slow machine must not fail open by itself
	}
}

func install(t testing.TB, ns *NetNS, cfg RedirectConfig) *Redirect {
	t.Helper()
	r, err := InstallRedirect(ns, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustDo(t, r.Close()) })
	return r
}

// marked is the control of the agent's own sockets towards the network.
func marked(_, _ string, c syscall.RawConn) error { return ControlMark(testMark)("", "", c) }

// timeout is a context that ends after d, or with the test.
func timeout(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
