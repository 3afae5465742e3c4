// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
)

// leavePorts has the kernel choose from the ports from first to last. No port is outside of the
// range, as in a pod whose owner widened it.
func leavePorts(t testing.TB, ns *NetNS, first, last int) {
	t.Helper()
	giveSysctl(t, ns, "net/ipv4/ip_local_port_range", "1024 65535")
	giveSysctl(t, ns, "net/ipv4/ip_local_reserved_ports", fmt.Sprintf("1024-%d,%d-65535", first-1, last+1))
}

func TestPortRange_outside(t *testing.T) {
	last := func(n int) int { return n - 1 }
	first := func(int) int { return 0 }
	for _, c := range []struct {
		r    portRange
		n    func(int) int
		want uint16
	}{
		{portRange{32768, 60999}, first, 61000}, // Linux' default
		{portRange{32768, 60999}, last, 65535},
		{portRange{32768, 64511}, last, 65535},
		{portRange{32768, 64512}, first, 1024}, // too few above
		{portRange{32768, 65535}, last, 32767},
		{portRange{2048, 65535}, last, 2047},
		{portRange{2047, 65535}, last, 0}, // too few below
		{portRange{1024, 65535}, first, 0},
		{portRange{1, 65535}, first, 0},
	} {
		if got := c.r.outside(c.n); got != c.want {
			t.Errorf("%v: %d, want %d", c.r, got, c.want)
		}
	}
}

// TestDialFrom_leavesPorts: while the agent has a connection to the application under the client's
// address, the client connects from every port that it may choose.
func TestDialFrom_leavesPorts(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			pod, peer := newPair(t)
			install(t, pod, testConfig(f))
			const ports = "40000 40019"
			for _, ns := range []*NetNS{pod, peer} {
				giveSysctl(t, ns, "net/ipv4/ip_local_port_range", ports)
			}
			app, err := ListenInNS(t.Context(), pod, nil, netip.AddrPortFrom(f.pod, 4711))
			mustDo(t, err)
			defer func() { _ = app.Close() }()
			dst := app.Addr().(*net.TCPAddr).AddrPort()
			for range 10 {
				c, err := DialFrom(t.Context(), pod, f.peer, testAppMark, dst)
				mustDo(t, err)
				defer func() { _ = c.Close() }()
				_ = mustAccept(t, app)
				if port := c.LocalAddr().(*net.TCPAddr).Port; port >= 40000 && port <= 40019 {
					t.Errorf("dialed from port %d, which the client may choose", port)
				}
			}
			for range 20 {
				client := mustDial(t, peer, nil, dst)
				exchange(t, client, mustAccept(t, app))
			}
		})
	}
}

// TestDialFrom_portsTaken leaves one single port under the client's address
// and has the client use it: the dial must give up, and the client's
// connection must not notice.
func TestDialFrom_portsTaken(t *testing.T) {
	f := families[0]
	pod, peer := newPair(t)
	install(t, pod, testConfig(f))
	for _, ns := range []*NetNS{pod, peer} {
		leavePorts(t, ns, 40001, 40001)
	}
	app, err := ListenInNS(t.Context(), pod, nil, netip.AddrPortFrom(f.pod, 4711))
	mustDo(t, err)
	defer func() { _ = app.Close() }()
	dst := app.Addr().(*net.TCPAddr).AddrPort()
	client := mustDial(t, peer, nil, dst)
	conn := mustAccept(t, app)
	c, err := DialFrom(t.Context(), pod, f.peer, testAppMark, dst)
	if !errors.Is(err, ErrNoPort) {
		if err == nil {
			_ = c.Close()
		}
		t.Fatalf("dial: %v, want ErrNoPort", err)
	}
	exchange(t, client, conn)

	leavePorts(t, pod, 40002, 40002)
	c, err = DialFrom(t.Context(), pod, f.peer, testAppMark, dst)
	mustDo(t, err)
	defer func() { _ = c.Close() }()
	if second, err := DialFrom(t.Context(), pod, f.peer, testAppMark, dst); !errors.Is(err, ErrNoPort) {
		if err == nil {
			_ = second.Close()
		}
		t.Fatalf("second dial: %v, want ErrNoPort", err)
	}
	exchange(t, c, mustAccept(t, app))
}

// TestDialFrom_otherPorts leaves two ports under the client's address and has the client
// use the odd one, which the kernel offers first, as long as it can be bound: the dial
// goes on to the other one.
func TestDialFrom_otherPorts(t *testing.T) {
	f := families[0]
	pod, peer := newPair(t)
	install(t, pod, testConfig(f))
	app, err := ListenInNS(t.Context(), pod, nil, netip.AddrPortFrom(f.pod, 4711))
	mustDo(t, err)
	defer func() { _ = app.Close() }()
	dst := app.Addr().(*net.TCPAddr).AddrPort()
	leavePorts(t, peer, 40001, 40001)
	client := mustDial(t, peer, nil, dst)
	conn := mustAccept(t, app)
	leavePorts(t, pod, 40000, 40001)
	c, err := DialFrom(t.Context(), pod, f.peer, testAppMark, dst)
	mustDo(t, err)
	defer func() { _ = c.Close() }()
	if got, want := c.LocalAddr().(*net.TCPAddr).AddrPort(), netip.AddrPortFrom(f.peer, 40000); got != want {
		t.Errorf("dialed from %v, want %v", got, want)
	}
	exchange(t, c, mustAccept(t, app))
	exchange(t, client, conn)
}

// TestFreePort_keepsNoOther: ports that are not free are bound while one that is free
// is looked for, and not while the application lets the connection wait.
func TestFreePort_keepsNoOther(t *testing.T) {
	f := families[0]
	pod, peer := newPair(t)
	install(t, pod, testConfig(f))
	app, err := ListenInNS(t.Context(), pod, nil, netip.AddrPortFrom(f.pod, 4711))
	mustDo(t, err)
	defer func() { _ = app.Close() }()
	dst := app.Addr().(*net.TCPAddr).AddrPort()
	leavePorts(t, peer, 40001, 40001)
	client := mustDial(t, peer, nil, dst)
	defer func() { _ = client.Close() }()
	leavePorts(t, pod, 40000, 40001)
	open := func() int {
		t.Helper()
		all, err := os.ReadDir("/proc/self/fd")
		mustDo(t, err)
		return len(all)
	}
	before := open()
	s, err := pod.freePort(f.peer, testAppMark, dst)
	mustDo(t, err)
	defer s.close()
	pod.stock.close()
	if n := open() - before; n != 1 {
		t.Errorf("%d descriptors for one socket", n)
	}
}
