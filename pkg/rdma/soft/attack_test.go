// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// TestAttack_memory has the cases of the conformance suite that are attacks of a peer with
// a queue pair of its own on memory that is not meant for it.
func TestAttack_memory(t *testing.T) {
	attacks := []string{"WrongKeys", "Permissions", "DomainIsolation", "PartOfRegion", "PartOfRegionRights", "AddressesTellNothing", "RegionClosedUnderWrites"}
	for _, c := range rdmatest.Cases() {
		if i := slices.Index(attacks, c.Name); i >= 0 {
			attacks = slices.Delete(attacks, i, i+1)
			t.Run(c.Name, func(t *testing.T) {
				a, b := loopback(t)
				c.Run(t, rdmatest.Net{A: a, B: b})
			})
		}
	}
	if len(attacks) > 0 {
		t.Errorf("the suite has no cases %v", attacks)
	}
}

// TestAttack_keysAreRandom: no bit of a key or queue pair number is told by another one,
// so that who knows some of them has to guess all the bits of the others: 32 of a key, 24
// of a queue pair number, one less where two devices share the address.
func TestAttack_keysAreRandom(t *testing.T) {
	const draws = 4000
	end := func(t *testing.T, share bool) *rdmatest.End {
		return rdmatest.NewEnd(t, openUDP(t, soft.Config{Addr: loopA, Port: testPort, Share: share}), rdmatest.Options{MRBytes: 4096})
	}
	region := func(t *testing.T, e *rdmatest.End) rdma.MR {
		t.Helper()
		m, err := e.PD.RegMR(e.MR, 0, 0, rdma.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		return m
	}
	queuePair := func(t *testing.T, e *rdmatest.End) uint32 {
		t.Helper()
		q, err := e.PD.CreateQP(rdma.QPConfig{SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, MaxSendWR: 1, MaxRecvWR: 1})
		if err != nil {
			t.Fatal(err)
		}
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		return uint32(q.Num())
	}
	for _, c := range []struct {
		name  string
		share bool
		width int // random bits
		most  int
		draw  func(t *testing.T, e *rdmatest.End) uint32
	}{
		{"RKey", false, 32, 32, func(t *testing.T, e *rdmatest.End) uint32 { return uint32(region(t, e).RKey()) }},
		{"LKey", false, 32, 32, func(t *testing.T, e *rdmatest.End) uint32 { return uint32(region(t, e).LKey()) }},
		{"QPN", false, 24, 24, queuePair},
		{"QPN of a shared address", true, 23, 24, queuePair},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := end(t, c.share)
			var ones [32]int
			var last uint32
			steps := make(map[uint32]int)
			for range draws {
				k := c.draw(t, e)
				if bits.Len32(k) > c.most {
					t.Fatalf("%#x has more than %d bits", k, c.most)
				}
				for b := range c.width {
					ones[b] += int(k >> b & 1)
				}
				steps[(k-last)&(1<<12-1)]++ // of what an index would be in
				last = k
			}
			for b, n := range ones[:c.width] {
				if n < draws*2/5 || n > draws*3/5 { // 12 standard deviations
					t.Errorf("bit %d is set in %d of %d", b, n, draws)
				}
			}
			for step, n := range steps {
				if n > draws/100 {
					t.Errorf("%d of %d come %d after the one before, in their low bits", n, draws, step)
				}
			}
		})
	}
}

// TestAttack_abstractSocketName: another user of the node, in the same network namespace,
// takes whatever abstract socket names it likes and keeps no device from opening. The
// directory where devices find each other lets it in as little as the port does.
func TestAttack_abstractSocketName(t *testing.T) {
	testenv.Need(t, testenv.Root)
	cfg := shared(loopA, "device")
	cfg.Dir = filepath.Join(t.TempDir(), "devices")
	other := asUser(65534)
	defer other.end()
	other.do(func() {
		for _, name := range []string{"joining", "0", "1"} {
			ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("@smcr-soft/%v/%d/%s", loopA, testPort, name)})
			if err != nil {
				t.Error(err)
				continue
			}
			t.Cleanup(func() { _ = ln.Close() })
		}
	})
	first := openUDP(t, cfg)
	enter := func(when string) {
		t.Helper()
		names := files(t, cfg.Dir)
		other.do(func() {
			if _, err := os.ReadDir(cfg.Dir); !errors.Is(err, os.ErrPermission) {
				t.Errorf("%s: list the directory: %v", when, err)
			}
			for _, name := range append(names, "new") {
				path := filepath.Join(cfg.Dir, name)
				if _, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600); !errors.Is(err, os.ErrPermission) {
					t.Errorf("%s: open %s: %v", when, name, err)
				}
				if err := os.Remove(path); !errors.Is(err, os.ErrPermission) {
					t.Errorf("%s: remove %s: %v", when, name, err)
				}
				if _, err := net.Dial("unix", path); !errors.Is(err, os.ErrPermission) {
					t.Errorf("%s: connect to %s: %v", when, name, err)
				}
			}
			if c, err := reusing().ListenPacket(t.Context(), "udp4", first.Addr().String()); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("%s: bind to the port: %v", when, err)
				if err == nil {
					_ = c.Close()
				}
			}
		})
	}
	enter("one device")
	second := openUDP(t, cfg)
	enter("two devices")
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	first = second
	enter("the younger device")
}

// TestAttack_sharedPort: also a process of the device's own user cannot bind to the port of
// a device that is alone, with SO_REUSEPORT, before a successor was there, and afterwards.
func TestAttack_sharedPort(t *testing.T) {
	bind := func(when string) {
		t.Helper()
		deadline := time.Now().Add(10 * time.Second)
		for {
			c, err := reusing().ListenPacket(t.Context(), "udp4", netip.AddrPortFrom(loopA, testPort).String())
			if errors.Is(err, syscall.EADDRINUSE) {
				return
			}
			if err != nil || time.Now().After(deadline) {
				t.Fatalf("%s: bind: %v", when, err)
			}
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			if when == "one device" {
				t.Fatal("a device that has been alone always shares its port")
			}
			pause(time.Millisecond) // polls the port, until the device knows that it is alone
		}
	}
	first := openUDP(t, shared(loopA, "first"))
	bind("one device")
	second := openUDP(t, shared(loopA, "second"))
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	bind("the younger one ended")
	third := openUDP(t, shared(loopA, "third"))
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	bind("the older one ended")
	if err := third.Close(); err != nil {
		t.Fatal(err)
	}
}

// reusing binds with SO_REUSEPORT.
func reusing() *net.ListenConfig {
	return &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(cerr, err)
	}}
}

// otherUser is a thread of this process that runs as another user.
// What it does must not end the test.
type otherUser struct {
	calls chan func()
	done  chan struct{}
}

func asUser(uid uintptr) *otherUser {
	u := &otherUser{calls: make(chan func()), done: make(chan struct{})}
	go func() {
		runtime.LockOSThread() // and the thread ends with the goroutine
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid)
		for f := range u.calls {
			if errno != 0 {
				panic(errno)
			}
			f()
			u.done <- struct{}{}
		}
		close(u.done)
	}()
	return u
}

func (u *otherUser) do(f func()) {
	u.calls <- f
	<-u.done
}

func (u *otherUser) end() {
	close(u.calls)
	<-u.done
}
