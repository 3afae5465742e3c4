// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// onDevice binds a socket to an interface.
func onDevice(name string) Control {
	return func(_, _ string, c syscall.RawConn) error {
		return withFD(c, func(fd int) error {
			return os.NewSyscallError("setsockopt SO_BINDTODEVICE", unix.BindToDevice(fd, name))
		})
	}
}

// interfaceOf is the name of the interface of a namespace that is not loopback.
func interfaceOf(t testing.TB, ns *NetNS) (name string) {
	t.Helper()
	mustDo(t, withHandle(ns, func(h *netlink.Handle) error {
		links, err := h.LinkList()
		for _, l := range links {
			if l.Attrs().Flags&net.FlagLoopback == 0 {
				name = l.Attrs().Name
			}
		}
		return err
	}))
	return name
}

// TestHolder_Where: a connection's socket is found, whether it is bound to an interface or not.
func TestHolder_Where(t *testing.T) {
	for _, f := range families {
		h := newHeld(t, f)
		iface := interfaceOf(t, h.pod)
		h.serve(t, HolderConfig{Ask: never}, QueueConfig{})
		for _, c := range []struct {
			name         string
			control      Control
			there, bound bool
		}{{"free", nil, true, false}, {"bound", onDevice(iface), true, true}} {
			conn := mustDial(t, h.pod, c.control, h.dst)
			ends := synqueue.Conn{Src: addrOfAddr(conn.LocalAddr()), Dst: h.dst}
			if there, bound, err := h.holder.Where(ends); there != c.there || bound != c.bound || err != nil {
				t.Errorf("%s, %s: there %t, bound %t, %v", f.name, c.name, there, bound, err)
			}
			ends.Src = netip.AddrPortFrom(ends.Src.Addr(), ends.Src.Port()^1)
			if there, bound, err := h.holder.Where(ends); there || bound || err != nil {
				t.Errorf("%s, %s, another port: there %t, bound %t, %v", f.name, c.name, there, bound, err)
			}
		}
	}
}

func addrOfAddr(a net.Addr) netip.AddrPort { return unmap(a.(*net.TCPAddr).AddrPort()) }

// TestDialFrom_boundListener: a listener that is bound to an interface is reached like any other, by an interface that
// has come up since, too.
func TestDialFrom_boundListener(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, _ := newPair(t)
			awaitOwnRoute(t, pod, f.pod)
			iface := interfaceOf(t, pod)
			r := install(t, pod, testConfig(f))
			app := listen(t, pod, onDevice(iface), f.pod, 0)
			dial := func() {
				t.Helper()
				c, err := DialFrom(timeout(t, time.Second), pod, f.peer, testAppMark, addrOf(app))
				mustDo(t, err)
				exchange(t, c, mustAccept(t, app))
				mustDo(t, c.Close())
			}
			dial()
			mustDo(t, withHandle(pod, func(h *netlink.Handle) error { return sweepRoutes(h, netlink.FAMILY_V4) }))
			mustDo(t, withHandle(pod, func(h *netlink.Handle) error { return sweepRoutes(h, netlink.FAMILY_V6) }))
			mustDo(t, r.Update(testConfig(f)))
			dial()
			mustDo(t, Sweep(pod))
			wantClean(t, pod)
		})
	}
}

// BenchmarkHolder_Where is what the look for a socket costs each held connection.
func BenchmarkHolder_Where(b *testing.B) {
	h := newHeld(b, families[0])
	iface := interfaceOf(b, h.pod)
	h.serve(b, HolderConfig{Ask: never}, QueueConfig{})
	for name, control := range map[string]Control{"free": nil, "bound": onDevice(iface)} {
		ends := synqueue.Conn{Src: addrOfAddr(mustDial(b, h.pod, control, h.dst).LocalAddr()), Dst: h.dst}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if there, _, err := h.holder.Where(ends); !there || err != nil {
					b.Fatal(there, err)
				}
			}
		})
	}
}
