// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TestLinuxKernel_gone: for a namespace that is not there, the kernel returns an interface that equals nil, and
// the error by which the manager knows that the namespace is gone.
func TestLinuxKernel_gone(t *testing.T) {
	n, err := linuxKernel{}.open(filepath.Join(t.TempDir(), "nowhere"))
	if n != nil || !errors.Is(err, linux.ErrGone) {
		t.Errorf("open = %v, %v, want ErrGone", n, err)
	}
}

// TestLinuxNet_installFails: if a table cannot be installed, the interface that is returned equals nil.
func TestLinuxNet_installFails(t *testing.T) {
	n := value(linuxKernel{}.open("/proc/self/ns/net"))(t)
	must(t, n.close())
	if r, err := n.install(linux.RedirectConfig{Mark: markWire, AppMark: markApp, PlainMark: markPlain, OutboundPort: 1, InboundPort: 2, FailOpenTTL: time.Second}); r != nil || !errors.Is(err, linux.ErrClosed) {
		t.Errorf("install = %v, %v, want ErrClosed", r, err)
	}
}

// TestLinuxNet_inside: interfaces and routes are those of the pod's namespace, and not the agent's.
func TestLinuxNet_inside(t *testing.T) {
	pod, other := newSpace(t), newSpace(t)
	join(t, "inpod0", pod, other, []string{"10.99.0.1/24"}, []string{"10.99.0.2/24"})
	n := value(linuxKernel{}.open(pod.path))(t)
	defer func() { must(t, n.close()) }()
	if n.id() != pod.ns.ID() || n.gone() {
		t.Errorf("namespace %d, gone %t; want %d", n.id(), n.gone(), pod.ns.ID())
	}
	index := 0
	pod.links(t, func(h *netlink.Handle) error {
		l, err := h.LinkByName("inpod0")
		if err == nil {
			index = l.Attrs().Index
		}
		return err
	})
	all, err := n.netInterfaces([]int{index, index + 1000})
	if i := all[index]; err != nil || len(all) != 1 || i.Name != "inpod0" || i.MAC == (rdma.MAC{}) || !slices.Contains(i.Addrs, netip.MustParsePrefix("10.99.0.1/24")) {
		t.Errorf("interface %d: %+v, %v", index, all, err)
	}
	if r, err := n.route(netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("10.99.0.2")); err != nil || !r.Found || r.Gateway {
		t.Errorf("route %+v, %v", r, err)
	}
}

// closeAll closes listeners.
func closeAll(t testing.TB, ls []*net.TCPListener) {
	t.Helper()
	for _, l := range ls {
		must(t, l.Close())
	}
}

// TestLinuxNet_listen: which port and which address families a pod's listeners have.
func TestLinuxNet_listen(t *testing.T) {
	// freePort is a port that no socket uses in the namespace.
	freePort := func(t *testing.T, n linuxNet) uint16 {
		t.Helper()
		ls, port, err := n.listen(t.Context(), nil, 0)
		must(t, err)
		closeAll(t, ls)
		return port
	}
	t.Run("wanted", func(t *testing.T) {
		n := linuxNet{newSpace(t).ns}
		want := freePort(t, n)
		ls, port, err := n.listen(t.Context(), nil, want)
		must(t, err)
		defer closeAll(t, ls)
		if port != want || len(ls) != 2 || addrPort(ls[0].Addr()).Port() != want || addrPort(ls[1].Addr()).Port() != want {
			t.Errorf("%d listeners on port %d, want two on %d", len(ls), port, want)
		}
	})
	for _, addr := range []string{"127.0.0.1", "::1"} {
		t.Run("taken by a program at "+addr, func(t *testing.T) {
			s := newSpace(t)
			n := linuxNet{s.ns}
			want := freePort(t, n)
			s.listen(t, netip.AddrPortFrom(netip.MustParseAddr(addr), want).String())
			ls, port, err := n.listen(t.Context(), nil, want)
			must(t, err)
			defer closeAll(t, ls)
			if port == want || len(ls) != 2 {
				t.Errorf("%d listeners on port %d, which a program has", len(ls), port)
			}
			// The listener that found its port free is closed again.
			free := map[string]string{"127.0.0.1": "::1", "::1": "127.0.0.1"}[addr]
			s.listen(t, netip.AddrPortFrom(netip.MustParseAddr(free), want).String())
		})
	}
	t.Run("taken by an earlier agent", func(t *testing.T) {
		s := newSpace(t)
		n := linuxNet{s.ns}
		want := freePort(t, n)
		earlier, _, err := n.listen(t.Context(), nil, want)
		must(t, err)
		defer closeAll(t, earlier)
		ls, port, err := n.listen(t.Context(), nil, want)
		must(t, err)
		defer closeAll(t, ls)
		if port != want {
			t.Fatalf("port %d, want %d like the earlier agent", port, want)
		}
		for i, l := range ls {
			value(s.dial(t, l.Addr().String()))(t)
			must(t, l.SetDeadline(time.Now().Add(waitLimit)))
			c, err := l.AcceptTCP()
			if err != nil {
				t.Errorf("connection %d did not come to the later agent: %v", i, err)
				continue
			}
			must(t, c.Close())
		}
	})
	t.Run("without IPv6", func(t *testing.T) {
		s := newSpace(t)
		must(t, s.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0) }))
		ls, port, err := linuxNet{s.ns}.listen(t.Context(), nil, 0)
		must(t, err)
		defer closeAll(t, ls)
		if len(ls) != 1 || !addrPort(ls[0].Addr()).Addr().Is4() || port == 0 {
			t.Errorf("listeners %v on port %d, want one for IPv4", ls, port)
		}
	})
	t.Run("loopback down", func(t *testing.T) {
		s := newSpace(t)
		s.links(t, func(h *netlink.Handle) error {
			lo, err := h.LinkByName("lo")
			if err != nil {
				return err
			}
			// A loopback interface that was never up has no address.
			addr, err := netlink.ParseAddr("127.0.0.1/8")
			return errors.Join(err, h.AddrDel(lo, addr), h.LinkSetDown(lo))
		})
		for _, wanted := range []uint16{0, 40000} {
			ls, _, err := linuxNet{s.ns}.listen(t.Context(), nil, wanted)
			if err == nil || !strings.Contains(err.Error(), "is the loopback interface of the pod up?") {
				t.Errorf("listen on port %d = %v, %v", wanted, ls, err)
			}
			closeAll(t, ls)
		}
	})
}

// TestLinuxNet_bothFamilies: the listeners are one port for both families.
func TestLinuxNet_bothFamilies(t *testing.T) {
	s := newSpace(t)
	n := linuxNet{s.ns}
	ls, port, err := n.listen(t.Context(), linux.ControlMark(markWire), 0)
	must(t, err)
	if len(ls) != 2 || port == 0 {
		t.Errorf("%d listeners on port %d", len(ls), port)
	}
	for _, l := range ls {
		must(t, l.Close())
	}
}

// TestLinuxNet_backlog: connections that wait for the agent have as much room in the
// kernel as the pod's namespace allows.
func TestLinuxNet_backlog(t *testing.T) {
	s := newSpace(t)
	var most int
	must(t, s.ns.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/core/somaxconn")
		if err == nil {
			most, err = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		return err
	}))
	ls, _, err := linuxNet{s.ns}.listen(t.Context(), nil, 0)
	must(t, err)
	for _, l := range ls {
		raw := value(l.SyscallConn())(t)
		must(t, raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			must(t, err)
			if int(info.Sacked) != most { // Sacked is the length of the backlog in the information about a listener
				t.Errorf("%v has a backlog of %d, want %d", l.Addr(), info.Sacked, most)
			}
		}))
		must(t, l.Close())
	}
}
