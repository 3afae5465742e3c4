// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// onDevice binds a socket to an interface.
func onDevice(name string) Control {
	return func(_, _ string, c syscall.RawConn) error {
		return withFD(c, func(fd int) error { return os.NewSyscallError("setsockopt SO_BINDTODEVICE", unix.BindToDevice(fd, name)) })
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
