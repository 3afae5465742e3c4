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

// TestHolder_Where: a connection's socket is found, whether it is bound to an interface or not, and waits until its SYN is answered.
func TestHolder_Where(t *testing.T) {
	for _, f := range families {
		h := newHeld(t, f)
		asked := make(chan synqueue.Conn, 1)
		h.serve(t, HolderConfig{
			Ask: func(_ *Holder, c synqueue.Conn, _ bool) { asked <- c }, Table: synqueue.Config{Deadline: waitLimit},
		}, QueueConfig{})
		h.install(t, testHoldConfig(t, f))
		for _, c := range []struct {
			name    string
			control Control
			bound   bool
		}{{"free", nil, false}, {"bound", onDevice(interfaceOf(t, h.pod)), true}} {
			dialed := make(chan error, 1)
			go func() {
				_, err := dialNS(t, h.pod, c.control, h.dst)
				dialed <- err
			}()
			ends := <-asked
			check := func(state string, ends synqueue.Conn, wantWaits, wantBound bool) {
				t.Helper()
				if waits, bound, err := h.holder.Where(ends); waits != wantWaits || bound != wantBound || err != nil {
					t.Errorf("%s, %s, %s: waits %t, bound %t, %v", f.name, c.name, state, waits, bound, err)
				}
			}
			check("held", ends, true, c.bound)
			other := netip.AddrPortFrom(ends.Src.Addr(), ends.Src.Port()^1)
			check("another port", synqueue.Conn{Src: other, Dst: ends.Dst}, false, false)
			_, err := h.holder.Answer(ends, synqueue.Pass, synqueue.Finding{})
			mustDo(t, err)
			mustDo(t, <-dialed)
			check("connected", ends, false, c.bound)
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
				if _, bound, err := h.holder.Where(ends); bound != (control != nil) || err != nil {
					b.Fatal(bound, err)
				}
			}
		})
	}
}
