// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// openSockets is how many sockets the process has.
func openSockets(t *testing.T) (n int) {
	t.Helper()
	all, err := filepath.Glob("/proc/self/fd/*")
	mustDo(t, err)
	for _, name := range all {
		if to, err := os.Readlink(name); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// Sockets that are dialed with are made several at a time, in their namespace, and those that nobody uses
// are closed: a second after the last one was taken, and with the namespace.
func TestStock(t *testing.T) {
	pod, _ := newPair(t)
	cookie, err := pod.Cookie()
	mustDo(t, err)
	before := openSockets(t)
	take := func() {
		t.Helper()
		s, err := pod.socket(netip.MustParseAddr("127.0.0.1"))
		mustDo(t, err)
		defer s.close()
		mustDo(t, withFD(s.raw, func(fd int) error {
			got, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
			if got != cookie {
				t.Errorf("a socket of namespace %d, want %d", got, cookie)
			}
			return err
		}))
	}
	for left := range stockBatch {
		take()
		if n, want := openSockets(t)-before, stockBatch-1-left; n != want {
			t.Errorf("%d sockets are ready after %d were taken, want %d", n, left+1, want)
		}
	}
	take()
	if _, err := pod.tupleFree(netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("127.0.0.1:2")); err != nil {
		t.Error(err)
	}
	if n := openSockets(t) - before; n != stockBatch {
		t.Errorf("%d sockets are ready, and one for diagnosis, want %d in all", n, stockBatch)
	}
	pod.stock.expire()
	if openSockets(t) == before {
		t.Error("the stock was closed while it was used")
	}
	pod.stock.mu.Lock()
	pod.stock.used = time.Now().Add(-stockFor)
	pod.stock.mu.Unlock()
	pod.stock.expire()
	if n := openSockets(t) - before; n != 0 {
		t.Errorf("%d sockets are ready a while later", n)
	}
	take()
	mustDo(t, pod.Close())
	if n := openSockets(t) - before; n != 0 {
		t.Errorf("%d sockets are left after the namespace was closed", n)
	}
	if _, err := pod.socket(netip.MustParseAddr("127.0.0.1")); err == nil {
		t.Error("a socket of a namespace that is closed")
	}
}

// What is asked of the namespace's table is asked over one socket, and each answer is that of its question.
func TestStock_tupleFree(t *testing.T) {
	for _, f := range families {
		pod, peer := newPair(t)
		app := listen(t, pod, nil, f.pod, 0)
		dst := netip.MustParseAddrPort(app.Addr().String())
		taken := netip.MustParseAddrPort(mustDial(t, peer, nil, dst).LocalAddr().String())
		mustAccept(t, app)
		other := netip.AddrPortFrom(taken.Addr(), taken.Port()^1)
		for range 5 {
			for remote, want := range map[netip.AddrPort]bool{taken: false, other: true} {
				free, err := pod.tupleFree(dst, remote)
				if err != nil || free != want {
					t.Errorf("%s: %v is free: %v, %v", f.name, remote, free, err)
				}
			}
		}
	}
}

// A process that is out of descriptors cannot ask. That is no answer, and once it has some again, it asks.
func TestStock_noDescriptor(t *testing.T) {
	pod, peer := newPair(t)
	app := listen(t, pod, nil, families[0].pod, 0)
	dst := netip.MustParseAddrPort(app.Addr().String())
	taken := netip.MustParseAddrPort(mustDial(t, peer, nil, dst).LocalAddr().String())
	mustAccept(t, app)
	var limit unix.Rlimit
	mustDo(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	mustDo(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: limit.Max})) // those that are open stay
	state, err := pod.tupleState(dst, taken, 0)
	mustDo(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	if !errors.Is(err, unix.EMFILE) {
		t.Errorf("without a descriptor: state %d, %v, want %v", state, err, unix.EMFILE)
	}
	const established = 1
	if state, err := pod.tupleState(dst, taken, 0); err != nil || state != established {
		t.Errorf("with descriptors again: state %d, %v, want %d", state, err, established)
	}
}

// The range of ports is read again after a while.
func TestStock_portRange(t *testing.T) {
	pod, _ := newPair(t)
	set := func(s string) {
		t.Helper()
		mustDo(t, pod.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(s), 0) }))
	}
	want := func(what string, first uint16) {
		t.Helper()
		if r, err := pod.portRange(); err != nil || r.first != first {
			t.Errorf("%s: %+v, %v, want from %d on", what, r, err, first)
		}
	}
	set("10000 20000")
	want("at first", 10000)
	set("12000 20000")
	want("at once", 10000)
	pod.stock.mu.Lock()
	pod.stock.at = time.Now().Add(-stockFor)
	pod.stock.mu.Unlock()
	want("a second later", 12000)
}
