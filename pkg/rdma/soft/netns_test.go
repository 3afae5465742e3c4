// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// vethPair is two network namespaces joined by one veth pair, v0 in a and v1
// in b, with an IPv4 and an IPv6 address each.
type vethPair struct {
	a, b   string
	a4, b4 netip.Addr
	a6, b6 netip.Addr
}

func newVethPair(t testing.TB, mtuBytes int) *vethPair {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("ip"))
	var r [4]byte
	_, _ = rand.Read(r[:])
	id := "ks-" + hex.EncodeToString(r[:])
	v := &vethPair{
		a: id + "a", b: id + "b",
		a4: netip.MustParseAddr("10.91.0.1"), b4: netip.MustParseAddr("10.91.0.2"),
		a6: netip.MustParseAddr("fd91::1"), b6: netip.MustParseAddr("fd91::2"),
	}
	for _, ns := range []string{v.a, v.b} {
		ip(t, "netns", "add", ns)
		t.Cleanup(func() { ip(t, "netns", "del", ns) })
	}
	mtu := fmt.Sprint(mtuBytes)
	ip(t, "-n", v.a, "link", "add", "v0", "mtu", mtu, "type", "veth", "peer", "name", "v1", "mtu", mtu, "netns", v.b)
	for _, e := range []struct {
		ns, dev string
		a4, a6  netip.Addr
	}{{v.a, "v0", v.a4, v.a6}, {v.b, "v1", v.b4, v.b6}} {
		ip(t, "-n", e.ns, "addr", "add", e.a4.String()+"/24", "dev", e.dev)
		ip(t, "-n", e.ns, "addr", "add", e.a6.String()+"/64", "dev", e.dev, "nodad")
		ip(t, "-n", e.ns, "link", "set", "lo", "up")
		ip(t, "-n", e.ns, "link", "set", e.dev, "up")
	}
	return v
}

// active opens a device in a namespace and waits for its port: the carrier
// of a new interface comes a moment later.
func active(t testing.TB, ns string, cfg soft.Config) (d *soft.Device) {
	t.Helper()
	inNS(t, ns, func() { d = openUDP(t, cfg) })
	c, err := d.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for d.Port().State != rdma.PortActive {
		rdmatest.AwaitEvent(t, c, rdma.EventPortActive)
	}
	return d
}

// ip runs the program ip, and fails the test if that fails.
func ip(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// inNS calls f on a thread that is in the named network namespace.
func inNS(t testing.TB, name string, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		// The thread is thrown away if it cannot go back.
		runtime.LockOSThread()
		done <- func() error {
			home, err := os.Open("/proc/thread-self/ns/net")
			if err != nil {
				return err
			}
			defer func() { _ = home.Close() }()
			ns, err := os.Open("/run/netns/" + name)
			if err != nil {
				return err
			}
			defer func() { _ = ns.Close() }()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			f()
			if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			runtime.UnlockOSThread()
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Fatalf("enter network namespace %s: %v", name, err)
	}
}
