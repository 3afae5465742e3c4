// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestDecodeFallback(t *testing.T) {
	n := binary.NativeEndian
	event := func(family uint16, local, peer string) []byte {
		b := make([]byte, fallbackBytes)
		n.PutUint64(b, 7)
		n.PutUint64(b[64:], 9)
		n.PutUint32(b[8:], uint32(clc.ReasonPeerDecl))
		n.PutUint32(b[12:], uint32(clc.ReasonNoDev))
		n.PutUint32(b[16:], 1)
		n.PutUint16(b[20:], family)
		n.PutUint16(b[22:], 80)
		n.PutUint16(b[24:], 40000)
		copy(b[28:], netip.MustParseAddr(local).AsSlice())
		copy(b[44:], netip.MustParseAddr(peer).AsSlice())
		return b
	}
	for _, tt := range []struct {
		family      uint16
		local, peer string
		want        [2]string
	}{
		{unix.AF_INET, "10.0.0.1", "10.0.0.2", [2]string{"10.0.0.1:80", "10.0.0.2:40000"}},
		{unix.AF_INET6, "fd00::1", "fd00::2", [2]string{"[fd00::1]:80", "[fd00::2]:40000"}},
		{unix.AF_INET6, "::ffff:10.0.0.1", "::ffff:10.0.0.2", [2]string{"10.0.0.1:80", "10.0.0.2:40000"}},
	} {
		got, ok := decodeFallback(event(tt.family, tt.local, tt.peer))
		want := Fallback{7, 9, netip.MustParseAddrPort(tt.want[0]), netip.MustParseAddrPort(tt.want[1]), true, tt.family == unix.AF_INET6, clc.ReasonPeerDecl, clc.ReasonNoDev}
		if !ok || got != want {
			t.Errorf("%+v, %t, want %+v", got, ok, want)
		}
	}
	if got, ok := decodeFallback(make([]byte, fallbackBytes-1)); ok {
		t.Errorf("of a byte too few: %+v", got)
	}
}

// tcpSocket opens a socket of TCP in a namespace whose loopback interface is up.
func tcpSocket(t *testing.T, ns *linux.NetNS) (fd int) {
	t.Helper()
	err := ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// listenOn listens with a socket on loopback, and returns where.
func listenOn(t *testing.T, fd int) *unix.SockaddrInet4 {
	t.Helper()
	at := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if err := errors.Join(unix.Bind(fd, at), unix.Listen(fd, 1024)); err != nil {
		t.Fatal(err)
	}
	got, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	at.Port = got.(*unix.SockaddrInet4).Port
	return at
}

// What falls back in namespaces that are chosen is told, at both sides, with why; and one that has too much of that
// does not hide another one's.
func TestChooser_watchFallbacks(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	told := make(chan Fallback, 4096)
	w, err := c.WatchFallbacks(func(f Fallback) { told <- f })
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			_ = w.Close()
		}
	}()
	begin := func() (ns *linux.NetNS, cookie uint64, plain int, smc int) {
		ns, cookie = scratch(t)
		if err := ns.Do(func() error { return exec.Command("ip", "link", "set", "lo", "up").Run() }); err != nil {
			t.Fatal(err)
		}
		plain = tcpSocket(t, ns)
		if err := c.Choose(Choice{NetNS: cookie}); err != nil {
			t.Fatal(err)
		}
		return ns, cookie, plain, tcpSocket(t, ns)
	}
	await := func(what string, want func(Fallback) bool) {
		t.Helper()
		for deadline := time.After(10 * time.Second); ; {
			select {
			case f := <-told:
				if want(f) {
					return
				}
				t.Logf("%s: before it %+v", what, f)
			case <-deadline:
				t.Fatalf("%s: not told", what)
			}
		}
	}
	is := func(f Fallback, cookie uint64, inbound bool, port int) bool {
		end := f.Peer
		if inbound {
			end = f.Local
		}
		return f.NetNS == cookie && f.Inbound == inbound && f.Reason == clc.ReasonPeerNoSMC && end.String() == fmt.Sprintf("127.0.0.1:%d", port)
	}

	ns, cookie, listener, client := begin()
	at := listenOn(t, listener)
	if err := unix.Connect(client, at); err != nil {
		t.Fatal(err)
	}
	await("a client of a server without SMC", func(f Fallback) bool { return is(f, cookie, false, at.Port) })

	_, cookie2, plain, listener2 := begin()
	at2 := listenOn(t, listener2)
	if err := unix.Connect(plain, at2); err != nil {
		t.Fatal(err)
	}
	await("a server of a client without SMC", func(f Fallback) bool { return is(f, cookie2, true, at2.Port) })

	began := time.Now()
	const flood = 700
	for range flood {
		fd := tcpSocket(t, ns)
		if err := unix.Connect(fd, at); err != nil {
			t.Fatal(err)
		}
	}
	floodTook := time.Since(began)
	_, cookie3, listener3, client3 := begin()
	at3 := listenOn(t, listener3)
	if err := unix.Connect(client3, at3); err != nil {
		t.Fatal(err)
	}
	first := 0
	await("one behind a flood", func(f Fallback) bool {
		if f.NetNS == cookie {
			first++
		}
		return is(f, cookie3, false, at3.Port)
	})
	if most := 100 * (int(floodTook/time.Second) + 2); first == 0 || first > most {
		t.Errorf("of %d in %v %d were told, want some, and %d at most", flood, floodTook, first, most)
	}

	closed = true
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	before := len(told)
	<-time.After(time.Second) // a second for which there is room again
	if err := unix.Connect(tcpSocket(t, ns), at); err != nil {
		t.Fatal(err)
	}
	<-time.After(3 * fallbackPause) // in which it would be told
	if len(told) != before {
		t.Error("a watch that was closed goes on")
	}
}

// inCgroup calls f while this process is in a cgroup.
func inCgroup(t *testing.T, dir string, f func()) {
	t.Helper()
	move := func(dir string) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	_, own, _ := strings.Cut(string(text), "0::")
	own, _, _ = strings.Cut(own, "\n")
	move(dir)
	defer move(filepath.Join(cgroupRoot(t), own))
	f()
}

// Of what falls back the connections of cgroups that are chosen are told, with the cgroup: at both sides, and not those that a
// deeper cgroup is left out of, nor of others in the namespace.
func TestChooser_watchFallbacks_cgroup(t *testing.T) {
	need(t)
	dir, id := newCgroup(t, cgroupRoot(t))
	below, _ := newCgroup(t, dir)
	aside, asideID := newCgroup(t, dir)
	c := mustOpen(t, Config{Exclude: []uint64{asideID}})
	defer mustClose(t, c)
	told := make(chan Fallback, 16)
	w, err := c.WatchFallbacks(func(f Fallback) { told <- f })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close() }()
	ns, cookie := scratch(t)
	if err := ns.Do(func() error { return exec.Command("ip", "link", "set", "lo", "up").Run() }); err != nil {
		t.Fatal(err)
	}
	if err := c.Choose(Choice{Cgroup: id}); err != nil {
		t.Fatal(err)
	}
	plainServer, plainClient := tcpSocket(t, ns), tcpSocket(t, ns)
	var client, server, other int
	inCgroup(t, below, func() { client, server = tcpSocket(t, ns), tcpSocket(t, ns) })
	// A socket of SMC of a cgroup that is left out: the program opened it itself.
	inCgroup(t, aside, func() {
		err := ns.Do(func() (err error) {
			other, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, protocolSMC)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	defer unix.Close(other)
	await := func(what string, inbound bool, port int) {
		t.Helper()
		select {
		case f := <-told:
			end := f.Peer
			if inbound {
				end = f.Local
			}
			if f.Cgroup != id || f.NetNS != cookie || f.Inbound != inbound || f.Reason != clc.ReasonPeerNoSMC || int(end.Port()) != port {
				t.Errorf("%s: %+v", what, f)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: not told", what)
		}
	}
	at := listenOn(t, plainServer)
	if err := errors.Join(unix.Connect(other, at), unix.Connect(client, at)); err != nil {
		t.Fatal(err)
	}
	await("a client of the cgroup, after one that is left out", false, at.Port)
	at = listenOn(t, server)
	if err := unix.Connect(plainClient, at); err != nil {
		t.Fatal(err)
	}
	await("a server of the cgroup", true, at.Port)
}
