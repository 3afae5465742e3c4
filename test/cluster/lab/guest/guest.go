// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	clusterimage "github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	vm "github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
)

const (
	// vmPrefix is before the name of a cluster in the name of its guests.
	vmPrefix = "nodes-"

	// port is the name of the cable between the cluster's switch and the guests' segment: a TAP
	// device in the control plane's network, a NIC of QEMU on the other side.
	port = "guests"

	// nics is how many NICs a guest has, and soft RoCE devices.
	nics = 2

	// pfs is how many NICs with virtual functions a guest has besides, if any: one for each of two rails.
	pfs = 2
)

// A Config says how a cluster with guests is to be.
type Config struct {
	// Config is the configuration of the cluster; how many nodes are external, and the mode of kube-proxy, are
	// not for the caller to say.
	lab.Config
	// Guests is how many nodes there are behind those of the cluster's own; 0 is 2.
	Guests int
	// VFs is how many virtual functions, with soft RoCE, each of two NICs of a guest has, which are there besides
	// the other two, each on a NUMA node of its own. Their kernel has no SMC-R, unless KernelSMC is set.
	VFs int
	// KernelSMC is whether the guests' kernels have SMC-R of their own, too, for programs outside
	// of pods: the module is loaded, and has the enterprise ID [EID].
	KernelSMC bool
}

// EID is the enterprise ID that the chart gives to agents.
const EID = "KUBE-SMCR"

func (c *Config) setDefaults() error {
	if c.Name == "" {
		c.Name = fmt.Sprintf("test-%d", os.Getpid())
	}
	if c.Nodes == 0 {
		c.Nodes = 1
	}
	if c.Guests == 0 {
		c.Guests = 2
	}
	if c.Progress == nil {
		c.Progress = io.Discard
	}
	c.External, c.ProxyMode = c.Guests, "nftables"
	switch {
	case len(c.Name) > maxNameLen:
		return fmt.Errorf("cluster name %q: want up to %d characters with guests", c.Name, maxNameLen)
	case c.Guests < 1 || c.VFs < 0:
		return fmt.Errorf("%d guests with %d VFs each: want 1 guest or more", c.Guests, c.VFs)
	}
	return nil
}

// guests is what package test/vm/lab is asked for.
func (c *Config) guests(disk string) vm.Config {
	cfg := vm.Config{
		Name: vmPrefix + c.Name, Guests: c.Guests, NICs: nics, MemoryMiB: memoryMiB, Processors: processors, Disks: []string{disk}, Containers: true, CoarseTimers: true,
		Detach: c.Detach, Log: c.Progress,
	}
	if c.VFs > 0 {
		cfg.PFs, cfg.NUMA = pfs, true
		if !c.KernelSMC {
			cfg.Kernels = []image.Kernel{image.NetNS}
		}
	}
	return cfg
}

// A Cluster is a running cluster with guests. It may be used by several goroutines.
type Cluster struct {
	*lab.Cluster
	// Guests are the last of its nodes.
	Guests []*Node

	vm     *vm.Lab
	detach bool
}

// Up starts a cluster and its guests, and returns when all nodes are ready and pods can be made.
// It also removes what clusters left that were killed.
func Up(ctx context.Context, cfg Config) (*Cluster, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, fmt.Errorf("start a cluster: %w", err)
	}
	p := &progress{out: cfg.Progress, began: time.Now()}
	free, err := freeMiB()
	if err != nil {
		return nil, fmt.Errorf("start a cluster: %w", err)
	}
	p.say("%d guests want %d MiB of memory; %d MiB are free", cfg.Guests, cfg.Guests*(memoryMiB+qemuMiB), free)
	if free < cfg.Guests*(memoryMiB+qemuMiB) {
		return nil, fmt.Errorf("start a cluster: %d MiB of memory are free, %d guests want %d", free, cfg.Guests, cfg.Guests*(memoryMiB+qemuMiB))
	}
	if err := Sweep(ctx); err != nil { // of others: it does not hinder this one
		p.say("remove what former clusters left: %v", err)
	}
	base, err := lab.Up(ctx, cfg.Config)
	if err != nil {
		return nil, err
	}
	p.say("the control plane and %d nodes of this machine are ready", cfg.Nodes)
	c := &Cluster{Cluster: base, detach: cfg.Detach}
	if err := c.start(ctx, cfg, p); err != nil {
		ctx := context.WithoutCancel(ctx)
		return nil, fmt.Errorf("start cluster %s: %w", cfg.Name, errors.Join(err, c.SaveLogs(ctx), c.Down(ctx)))
	}
	return c, nil
}

// start starts the guests and makes nodes of them.
func (c *Cluster) start(ctx context.Context, cfg Config, p *progress) error {
	e, _ := c.Nodes[cfg.Nodes].External()
	file, err := disk(ctx, filepath.Dir(c.Tool("kubectl")), e.Images, cfg.Progress)
	if err != nil {
		return err
	}
	p.say("the disk of the guests is there: %s", file)
	if c.vm, err = vm.Up(ctx, cfg.guests(file)); err != nil {
		return err
	}
	h := has{VFs: cfg.VFs, KernelSMC: cfg.KernelSMC}
	if err := h.save(c.vm.Share()); err != nil {
		return err
	}
	c.find(h)
	p.say("the guests take commands")
	if err := c.connect(ctx); err != nil {
		return fmt.Errorf("connect the guests with the cluster: %w", err)
	}
	if cfg.KernelSMC {
		if _, err := c.vm.Build(ctx, "github.com/smcr-io/kube-smcr/test/vm/peer/"+kernelSMC, vm.BuildOptions{Name: kernelSMC}); err != nil {
			return err
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	for _, n := range c.Guests {
		g.Go(func() error {
			if err := n.give(c.vm.Share()); err != nil {
				return fmt.Errorf("start node %s: %w", n.Name, err)
			}
			if err := n.start(gctx); err != nil {
				return fmt.Errorf("start node %s: %w", n.Name, err)
			}
			p.say("node %s is ready", n.Name)
			return nil
		})
	}
	return g.Wait()
}

// find fills in the guests.
func (c *Cluster) find(h has) {
	for _, n := range c.Nodes {
		if _, ok := n.External(); ok && len(c.Guests) < c.vm.Guests() {
			c.Guests = append(c.Guests, &Node{Node: n, Guest: c.vm.Guest(len(c.Guests)), has: h})
		}
	}
}

// connect puts a cable between the cluster's switch and the guests' segment.
func (c *Cluster) connect(ctx context.Context) error {
	path, bridge := c.Switch()
	ns, err := linux.OpenNetNS(path)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	var tap *os.File
	err = ns.Do(func() (err error) {
		if tap, err = vm.NewTAP(port); err != nil {
			return err
		}
		return plugInto(bridge)
	})
	if tap != nil {
		defer func() { _ = tap.Close() }() // QEMU has it
	}
	if err != nil {
		return err
	}
	return c.vm.Plug(ctx, port, tap)
}

// plugInto makes the TAP device a port of a bridge, in the namespace of the thread.
func plugInto(bridge string) error {
	tap, err := netlink.LinkByName(port)
	if err != nil {
		return fmt.Errorf("find %s: %w", port, err)
	}
	master, err := netlink.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("find %s: %w", bridge, err)
	}
	if err := netlink.LinkSetMaster(tap, master); err != nil {
		return fmt.Errorf("connect %s with %s: %w", port, bridge, err)
	}
	if err := netlink.LinkSetUp(tap); err != nil {
		return fmt.Errorf("set %s up: %w", port, err)
	}
	return nil
}

// Open finds a cluster that is up, with guests or without.
func Open(ctx context.Context, name string) (*Cluster, error) {
	base, err := lab.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	c := &Cluster{Cluster: base, detach: true}
	external := slices.ContainsFunc(base.Nodes, func(n *lab.Node) bool { _, ok := n.External(); return ok })
	if !external {
		return c, nil
	}
	if c.vm, err = vm.Open(vmPrefix + name); err != nil {
		base.Close()
		return nil, fmt.Errorf("open cluster %s: %w", name, err)
	}
	h, err := loadHas(c.vm.Share())
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("open cluster %s: %w", name, err)
	}
	c.find(h)
	return c, nil
}

// Machines are the guests as package test/vm/lab has them, for what only that does: programs that
// are built for guests, captures, what their kernels complain of. It is nil if there are none. The
// Cluster closes it.
func (c *Cluster) Machines() *vm.Lab { return c.vm }

// LoadImage loads an image into all nodes. It takes a guest half a minute, unless it has this image
// already.
func (c *Cluster) LoadImage(ctx context.Context, archive string) error {
	if err := c.Cluster.LoadImage(ctx, archive); err != nil || c.vm == nil {
		return err
	}
	ref, digest, err := clusterimage.Identify(archive)
	if err != nil {
		return err
	}
	var lack []*Node
	for _, n := range c.Guests {
		has, err := n.hasImage(ctx, ref, digest)
		if err != nil {
			return err
		}
		if !has {
			lack = append(lack, n)
		}
	}
	if len(lack) == 0 {
		return nil
	}
	name := filepath.Base(archive)
	in, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	shared := filepath.Join(c.vm.Share(), name)
	out, err := os.Create(shared)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(shared) }()
	if _, err := io.Copy(out, in); err != nil {
		return errors.Join(err, out.Close())
	}
	if err := out.Close(); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	for _, n := range lack {
		g.Go(func() error { return n.load(ctx, name) })
	}
	return g.Wait()
}

// SaveLogs copies the guests' logs to the directory that has the cluster's.
func (c *Cluster) SaveLogs(ctx context.Context) error {
	if c.vm == nil {
		return nil
	}
	errs := []error{c.vm.SaveLogs(c.Logs())}
	for _, n := range c.Guests {
		errs = append(errs, n.saveLogs(ctx, filepath.Join(c.Logs(), n.Name)))
	}
	return errors.Join(errs...)
}

// Down ends the cluster and its guests, and returns when nothing of them is left but LogDir.
func (c *Cluster) Down(ctx context.Context) error {
	var err error
	if c.vm != nil {
		err = c.vm.Close()
	}
	return errors.Join(err, downGuests(ctx, c.Name), c.Cluster.Down(ctx))
}

// Close forgets a cluster that is detached, and ends one that is not, without waiting for that.
func (c *Cluster) Close() {
	switch {
	case c.vm == nil:
	case c.detach:
		c.vm.Forget()
	default:
		_ = c.vm.Close()
	}
	c.Cluster.Close()
}

// Down ends the cluster of a name and its guests, or removes what a dead one left. It is no
// error if there is none.
func Down(ctx context.Context, name string) error {
	return errors.Join(downGuests(ctx, name), lab.Down(ctx, name))
}

func downGuests(ctx context.Context, name string) error {
	if len(name) > maxNameLen {
		return nil // such a cluster has none
	}
	return vm.Down(ctx, vmPrefix+name)
}

// Sweep removes what clusters left that were killed, and ends the guests of such.
func Sweep(ctx context.Context) error {
	errs := []error{lab.Sweep(), vm.Sweep()}
	clusters, err := lab.List()
	errs = append(errs, err)
	guests, err := vm.List()
	errs = append(errs, err)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, name := range guests {
		// A cluster is there before its guests are, and longer.
		if cluster, ours := strings.CutPrefix(name, vmPrefix); ours && !slices.Contains(clusters, cluster) {
			errs = append(errs, vm.Down(ctx, name))
		}
	}
	return errors.Join(errs...)
}

// Leftovers returns what there is on this machine of the cluster of that name: nothing, once it is
// down.
func Leftovers(name string) ([]string, error) {
	left, err := lab.Leftovers(name)
	if err != nil {
		return nil, err
	}
	guests, err := vm.List()
	if slices.Contains(guests, vmPrefix+name) {
		left = append(left, "guests "+vmPrefix+name)
	}
	return left, err
}

// A progress tells how far the start of a cluster is.
type progress struct {
	began time.Time
	mu    sync.Mutex // one line at a time
	out   io.Writer
}

func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.out, "%5.1f s: %s\n", time.Since(p.began).Seconds(), fmt.Sprintf(format, args...))
}

// freeMiB is how much memory this machine can give.
func freeMiB() (int, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("look for free memory: %w", err)
	}
	return parseFree(string(text))
}

func parseFree(meminfo string) (int, error) {
	for line := range strings.Lines(meminfo) {
		var kib int
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); n == 1 {
			return kib >> 10, nil
		}
	}
	return 0, errors.New("look for free memory: /proc/meminfo does not say")
}
