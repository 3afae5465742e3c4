// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// fakeHost is a machine whose devices are veths in a namespace: it moves them
// and knows who has them, and does nothing else that vf.Host does.
type fakeHost struct {
	ns *linux.NetNS

	mu       sync.Mutex // guards what is below
	devices  map[string]vf.Device
	owners   map[string]vf.Wiring
	attach   error  // what the next Attach fails with
	checks   error  // what Check says
	detaches func() // is called by each Detach, if it is set
	// ended is a container whose namespace counts as gone.
	ended string
	// hideRDMA makes the devices' RDMA devices those of another namespace.
	hideRDMA bool
}

// newFakeHost makes a device of each name; the other end of it stays in ns.
func newFakeHost(t *testing.T, ns *linux.NetNS, devices ...vf.Device) *fakeHost {
	t.Helper()
	h := &fakeHost{ns: ns, devices: map[string]vf.Device{}, owners: map[string]vf.Wiring{}}
	for _, d := range devices {
		h.devices[d.ID] = d
		must(t, ns.Do(func() error {
			a := netlink.NewLinkAttrs()
			a.Name = d.NetDev
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: a, PeerName: d.NetDev + "p"}); err != nil {
				return err
			}
			peer, err := netlink.LinkByName(d.NetDev + "p")
			if err != nil {
				return err
			}
			return netlink.LinkSetUp(peer)
		}))
	}
	return h
}

// testVF is VF n of the PF ens1.
func testVF(n int) vf.Device {
	id := fmt.Sprintf("0000:41:10.%d", n)
	return vf.Device{
		ID: id, PCI: id, Driver: "igbvf", NetDev: fmt.Sprintf("ens1v%d", n), PF: "ens1", PFPCI: "0000:41:00.0", VF: n,
		RDMA: []string{fmt.Sprintf("rocep65s0v%d", n)}, NUMANode: 1, Rail: 1, State: vf.StateUp,
	}
}

func (h *fakeHost) Device(id string) (vf.Device, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	d, ok := h.devices[id]
	if !ok {
		return vf.Device{}, fmt.Errorf("device %s: %w", id, vf.ErrNotFound)
	}
	if w, ok := h.owners[id]; ok {
		d.State, d.Owner, d.PodIfName = vf.StatePod, &w.Owner, w.IfName
	}
	return d, nil
}

func (h *fakeHost) Devices() (out []vf.Device, err error) {
	for _, id := range slices.Sorted(maps.Keys(h.devices)) {
		d, err := h.Device(id)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// moveLink moves an interface, and returns it as it then is.
func moveLink(from, to *linux.NetNS, name, newName string, up bool) (a netlink.LinkAttrs, err error) {
	f, err := os.Open(to.Path())
	if err != nil {
		return a, err
	}
	defer func() { _ = f.Close() }()
	err = from.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, "ks-moving"), netlink.LinkSetNsFd(l, int(f.Fd())))
	})
	if err != nil {
		return a, err
	}
	err = to.Do(func() error {
		l, err := netlink.LinkByName("ks-moving")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetName(l, newName); err != nil {
			return err
		}
		if up {
			if err := netlink.LinkSetUp(l); err != nil {
				return err
			}
		}
		a = *l.Attrs()
		return nil
	})
	return a, err
}

func (h *fakeHost) Attach(ctx context.Context, r vf.Request) (vf.Wiring, error) {
	d, err := h.Device(r.Device)
	if o := d.Owner; o != nil && (o.ContainerID == h.ended || o.ReplacedBy(vf.Owner{ContainerID: r.ContainerID, Pod: r.Pod})) {
		if err := h.Collect(ctx, func(x vf.Owner) bool { return x != *o }); err != nil {
			return vf.Wiring{}, err
		}
		d, err = h.Device(r.Device)
	}
	if err == nil {
		err = d.Usable()
	}
	if err != nil {
		return vf.Wiring{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.attach; err != nil {
		return vf.Wiring{}, err
	}
	pod, err := linux.OpenNetNS(r.NetNSPath)
	if err != nil {
		return vf.Wiring{}, err
	}
	defer func() { _ = pod.Close() }()
	a, err := moveLink(h.ns, pod, d.NetDev, r.PodIfName, true)
	if err != nil {
		return vf.Wiring{}, err
	}
	w := vf.Wiring{
		Device: d, Mode: vf.ModeMove, IfName: r.PodIfName, MAC: a.HardwareAddr.String(), MTU: a.MTU, Settings: r.Settings,
		Owner: vf.Owner{ContainerID: r.ContainerID, IfName: r.IfName, Network: r.Network, Pod: r.Pod, NetNS: r.NetNSPath},
		RDMA:  []vf.RDMADevice{{Name: d.RDMA[0], GIDNetDev: r.PodIfName}},
	}
	if r.Settings.SpoofCheck != nil {
		w.Warnings = []vf.Warning{{Setting: vf.SettingSpoofCheck, Text: "no spoofchk here"}}
	}
	if h.hideRDMA {
		w.RDMA = nil
	}
	h.owners[d.ID] = w
	return w, nil
}

func (h *fakeHost) Wiring(containerID, ifName, device string) (vf.Wiring, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w, ok := h.owners[device]; ok && w.Owner.Is(containerID, ifName) {
		return w, nil
	}
	return vf.Wiring{}, fs.ErrNotExist
}

func (h *fakeHost) Check(_ context.Context, w vf.Wiring) error {
	if h.checks != nil {
		return h.checks
	}
	pod, err := linux.OpenNetNS(w.Owner.NetNS)
	if err != nil {
		return err
	}
	defer func() { _ = pod.Close() }()
	return pod.Do(func() error {
		l, err := net.InterfaceByName(w.IfName)
		if err != nil {
			return err
		}
		if mac := l.HardwareAddr.String(); mac != w.MAC {
			return &vf.PropertyError{Device: w.Device.ID, Property: "mac", Got: mac, Want: w.MAC}
		}
		if w.MTU != 0 && l.MTU != w.MTU {
			return &vf.PropertyError{Device: w.Device.ID, Property: "mtu", Got: fmt.Sprint(l.MTU), Want: fmt.Sprint(w.MTU)}
		}
		return nil
	})
}

func (h *fakeHost) Detach(ctx context.Context, d vf.Detachment) error {
	if h.detaches != nil {
		h.detaches()
	}
	return h.Collect(ctx, func(o vf.Owner) bool { return !o.Is(d.ContainerID, d.IfName) })
}

func (h *fakeHost) Collect(_ context.Context, valid func(vf.Owner) bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, w := range h.owners {
		if valid(w.Owner) {
			continue
		}
		pod, err := linux.OpenNetNS(w.Owner.NetNS)
		if err != nil {
			return err
		}
		_, err = moveLink(pod, h.ns, w.IfName, w.Device.NetDev, false)
		if err := errors.Join(err, pod.Close()); err != nil {
			return err
		}
		delete(h.owners, id)
	}
	return nil
}

// home fails the test unless all devices are where they were at first.
func (h *fakeHost) home(t *testing.T) {
	t.Helper()
	must(t, h.ns.Do(func() error {
		for _, d := range h.devices {
			if _, err := net.InterfaceByName(d.NetDev); err != nil {
				t.Errorf("device %s is not back: %v", d.ID, err)
			}
		}
		return nil
	}))
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.owners) > 0 {
		t.Errorf("owners %v are left", h.owners)
	}
}

// runHere executes smcr-cni in the test's process, with a fake host, and other
// plugins as usual.
type runHere struct {
	invoke.RawExec
	version.PluginDecoder
	host       *fakeHost
	devInfoDir string

	mu     sync.Mutex
	stderr bytes.Buffer // guarded by mu; of all executions
}

func (r *runHere) FindInPath(plugin string, paths []string) (string, error) {
	if plugin == PluginType {
		return plugin, nil
	}
	return r.RawExec.FindInPath(plugin, paths)
}

func (r *runHere) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	if path != PluginType {
		return r.RawExec.ExecPlugin(ctx, path, stdin, environ)
	}
	env := map[string]string{}
	for _, kv := range environ {
		k, v, _ := strings.Cut(kv, "=")
		env[k] = v
	}
	var out, errb bytes.Buffer
	p := Plugin{
		Stdout: &out, Stderr: &errb, Now: time.Now, DevInfoDir: r.devInfoDir,
		Host: func(string) Host { return r.host },
	}
	args := &skel.CmdArgs{
		ContainerID: env["CNI_CONTAINERID"], Netns: env["CNI_NETNS"], IfName: env["CNI_IFNAME"], Args: env["CNI_ARGS"],
		Path: env["CNI_PATH"], StdinData: stdin,
	}
	verb, ok := map[string]func(*skel.CmdArgs) error{
		"ADD": p.add, "DEL": p.del, "CHECK": p.check, "GC": p.gc, "STATUS": p.status,
	}[env["CNI_COMMAND"]]
	if !ok {
		return nil, fmt.Errorf("no verb %q", env["CNI_COMMAND"])
	}
	err := verb(args)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stderr.Write(errb.Bytes())
	return out.Bytes(), err
}

// said is what the executions so far said to the operator.
func (r *runHere) said() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.String()
}

// buildReference builds reference plugins of CNI, in the version that is pinned
// for the local cluster, and returns their directory.
func buildReference(t *testing.T, plugins ...string) string {
	t.Helper()
	dir := t.TempDir()
	args := []string{"build", "-o", dir + "/"}
	for _, p := range plugins {
		args = append(args, "github.com/containernetworking/plugins/plugins/"+p)
	}
	testenv.Builds("...") // for the version
	cmd := exec.Command("go", args...)
	cmd.Dir = filepath.FromSlash("../../tools/cluster/tools/runtime")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %v: %v\n%s", plugins, err, out)
	}
	return dir
}

// fullDir is a directory on a disk that is full.
func fullDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount("ks-full", dir, "tmpfs", 0, "size=16k,mode=0755"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	must(t, os.Mkdir(filepath.Join(dir, "attachments"), 0o700))
	must(t, os.Mkdir(filepath.Join(dir, "locks"), 0o700))
	if err := os.WriteFile(filepath.Join(dir, "ballast"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill %s: %v, want ENOSPC", dir, err)
	}
	return dir
}
