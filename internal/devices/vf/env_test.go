// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestMain(m *testing.M) {
	if file := os.Getenv(killEnv); file != "" {
		killedChild(file)
	}
	goleak.VerifyTestMain(m)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newNS makes a namespace with a path; it ends with the test.
func newNS(t testing.TB, path string) *linux.NetNS {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	must(t, os.WriteFile(path, nil, 0o400))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends in its namespace
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	must(t, <-done)
	t.Cleanup(func() { deleteNS(t, path) })
	ns, err := linux.OpenNetNS(path)
	must(t, err)
	t.Cleanup(func() { must(t, ns.Close()) })
	for _, s := range []string{"accept_dad", "accept_ra"} { // no second of waiting, and no surprises
		must(t, linux.SetSysctl(ns, "net/ipv6/conf/default/"+s, map[string]string{"accept_dad": "0", "accept_ra": "1"}[s]))
	}
	return ns
}

// deleteNS takes the path away, like a container runtime; once more is no error.
func deleteNS(t testing.TB, path string) {
	t.Helper()
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		t.Errorf("unmount namespace: %v", err)
	}
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		must(t, err)
	}
}

// An env is a host with devices of software, and pods.
type env struct {
	t    testing.TB
	dir  string
	h    Host
	home *linux.NetNS
	pods []*linux.NetNS
	rdma *fakeRDMA
}

// device is the ID of device i, slot a further name of its interface, and rxe the name of its RDMA device.
func device(i int) string { return fmt.Sprintf("roce%d", i) }
func slot(i int) string   { return fmt.Sprintf("enp65s0v%d", i) }
func rxe(i int) string    { return fmt.Sprintf("rxe%d", i) }

// newEnv makes a host with some devices and some pods. The devices are veths
// with their other ends in the host too.
func newEnv(t testing.TB, devices, pods int) *env {
	t.Helper()
	dir := t.TempDir()
	e := &env{t: t, dir: dir, home: newNS(t, filepath.Join(dir, "host"))}
	e.rdma = &fakeRDMA{sys: sysfs(filepath.Join(dir, "sys")), mode: rdmaShared, spaces: map[uint64]*linux.NetNS{}, devices: map[string]fakeDevice{}}
	e.h = Host{
		Sys: string(e.rdma.sys), DataDir: filepath.Join(dir, "data"), NetNS: filepath.Join(dir, "host"),
		hooks: hooks{rdma: e.rdma, caps: &Capabilities{SoftRoCE: true, SoftRoCEInPods: true, IPVlan: true}, macvlan: true, dyingWait: time.Second},
	}
	e.rdma.spaces[e.home.ID()] = e.home
	for i := range pods {
		ns := newNS(t, filepath.Join(dir, fmt.Sprintf("pod%d", i)))
		e.pods = append(e.pods, ns)
		e.rdma.spaces[ns.ID()] = ns
	}
	for i := range devices {
		must(t, in(e.home, func(h *netlink.Handle) error {
			la := netlink.NewLinkAttrs()
			la.Name, la.MTU = device(i), 1500
			la.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 1, byte(i)}
			if err := h.LinkAdd(&netlink.Veth{LinkAttrs: la, PeerName: fmt.Sprintf("cable%d", i), PeerMTU: 9000}); err != nil {
				return err
			}
			for _, name := range []string{device(i), fmt.Sprintf("cable%d", i)} {
				l, err := h.LinkByName(name)
				if err != nil {
					return err
				}
				if err := h.LinkSetUp(l); err != nil {
					return err
				}
			}
			l, err := h.LinkByName(device(i))
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(fmt.Sprintf("10.1.%d.1/24", i))
			if err != nil {
				return err
			}
			return errors.Join(h.AddrAdd(l, a), h.LinkSetAlias(l, "port of rack 7"), h.LinkAddAltName(l, slot(i)))
		}))
		write(t, filepath.Join(e.h.Sys, classNet, device(i), "operstate"), "up")
		must(t, e.home.Do(func() error { return e.rdma.Add(rxe(i), kindRXE, device(i)) }))
	}
	return e
}

func write(t testing.TB, name, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	must(t, os.WriteFile(name, []byte(text+"\n"), 0o600))
}

// newLink makes an interface in a namespace.
func newLink(t testing.TB, ns *linux.NetNS, name, alias string) netlink.Link {
	t.Helper()
	var l netlink.Link
	must(t, in(ns, func(h *netlink.Handle) (err error) {
		a := netlink.NewLinkAttrs()
		a.Name = name
		if err := h.LinkAdd(&netlink.Veth{LinkAttrs: a, PeerName: name + "-peer"}); err != nil {
			return err
		}
		if l, err = h.LinkByName(name); err != nil {
			return err
		}
		return errors.Join(h.LinkSetAlias(l, alias), h.LinkSetUp(l))
	}))
	return l
}

// request asks for device i for pod p.
func (e *env) request(i, p int) Request {
	return Request{
		Device: device(i), ContainerID: fmt.Sprintf("container%d", p), IfName: fmt.Sprintf("net%d", i), Network: "roce",
		NetNSPath: e.pods[p].Path(), Pod: records.Pod{Namespace: "default", Name: fmt.Sprintf("pod-%d", p)},
	}
}

func (e *env) detachment(i, p int) Detachment {
	r := e.request(i, p)
	return Detachment{ContainerID: r.ContainerID, IfName: r.IfName, Device: r.Device, NetNSPath: r.NetNSPath}
}

// podFlags are the flags that a pod can change and that stay with the interface.
const podFlags = unix.IFF_NOARP | unix.IFF_PROMISC | unix.IFF_ALLMULTI | unix.IFF_MULTICAST

// look is everything that Detach has to bring back, and everything in the pods.
func (e *env) look() []string {
	e.t.Helper()
	var out []string
	for _, ns := range append([]*linux.NetNS{e.home}, e.pods...) {
		must(e.t, in(ns, func(h *netlink.Handle) error {
			links, err := linux.RetryDump(h.LinkList)
			if err != nil {
				return err
			}
			for _, l := range links {
				a := l.Attrs()
				if a.Name == "lo" {
					continue
				}
				addrs, err := addresses(h, l)
				if err != nil {
					return err
				}
				out = append(out, fmt.Sprintf("%s: %s %s %s mtu %d up %v alias %q names %v flags %#x %v",
					filepath.Base(ns.Path()), l.Type(), a.Name, a.HardwareAddr, a.MTU, isUp(l), a.Alias, a.AltNames, a.RawFlags&podFlags, addrs))
			}
			return nil
		}))
	}
	out = append(out, e.rdma.look()...)
	for _, name := range sysfs(e.h.dir()).list() {
		if !strings.HasSuffix(name, lockSuffix) {
			out = append(out, "file "+name)
		}
	}
	slices.Sort(out)
	return out
}

// same fails if something is not as it was.
func (e *env) same(before []string) {
	e.t.Helper()
	if diff := cmp.Diff(before, e.look()); diff != "" {
		e.t.Fatalf("not as it was (-before +after):\n%s", diff)
	}
}

// fakeRDMA is the RDMA subsystem with soft RoCE as the kernel has it: a device
// dies when its interface goes to another namespace.
type fakeRDMA struct {
	sys  sysfs
	mode string

	mu      sync.Mutex // guards what is below
	spaces  map[uint64]*linux.NetNS
	devices map[string]fakeDevice
	made    int
	busy    map[string]int // how often Add shall still say that the name is in use
	linger  int            // how many looks a device that lost its interface outlives
}

type fakeDevice struct {
	kind    string
	space   uint64
	ifindex int
	number  int
	dying   bool
	lingers int // looks that it still outlives
}

func here() (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat("/proc/thread-self/ns/net", &st)
	return st.Ino, err
}

// sweep removes the devices that died.
func (f *fakeRDMA) sweep() {
	for name, d := range f.devices {
		err := in(f.spaces[d.space], func(h *netlink.Handle) error { _, err := h.LinkByIndex(d.ifindex); return err })
		if err == nil && !d.dying {
			continue
		}
		d.dying = true // also if the interface comes back
		d.lingers--
		f.devices[name] = d
		if d.lingers < 0 {
			delete(f.devices, name)
			_ = os.RemoveAll(f.sys.path(classIB, name))
		}
	}
}

func (f *fakeRDMA) Mode() (string, error) { return f.mode, nil }

func (f *fakeRDMA) Names() ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweep()
	var names []string
	for name := range f.devices {
		names = append(names, name)
	}
	return names, nil
}

func (f *fakeRDMA) Port(name string) (rdmaPort, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweep()
	d, ok := f.devices[name]
	if !ok {
		return rdmaPort{}, fmt.Errorf("RDMA device %s: %w", name, unix.ENODEV)
	}
	p := rdmaPort{active: true, device: d.number}
	// The interface may have come here from where the device was made.
	if l, err := netlink.LinkByIndex(d.ifindex); err == nil && l.Type() == "veth" {
		p.ifindex = d.ifindex
	}
	return p, nil
}

func (f *fakeRDMA) Move(string, int) error { return unix.EOPNOTSUPP }

func (f *fakeRDMA) Add(name, kind, netdev string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweep()
	ns, err := here()
	if err != nil {
		return err
	}
	l, err := netlink.LinkByName(netdev)
	if err != nil {
		return err
	}
	if f.busy[name] > 0 {
		f.busy[name]--
		return unix.EEXIST
	}
	if _, ok := f.devices[name]; ok {
		return unix.EEXIST
	}
	f.made++
	f.devices[name] = fakeDevice{kind: kind, space: ns, ifindex: l.Attrs().Index, number: f.made, lingers: f.linger}
	dir := f.sys.path(classIB, name)
	return errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "parent"), []byte(netdev), 0o600))
}

func (f *fakeRDMA) look() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sweep()
	var out []string
	for name, d := range f.devices {
		out = append(out, fmt.Sprintf("rdma %s %s on %d in %s", name, d.kind, d.ifindex, filepath.Base(f.spaces[d.space].Path())))
	}
	return out
}
