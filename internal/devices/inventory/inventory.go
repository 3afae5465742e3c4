// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// Kind says what a device is.
type Kind string

// Kinds of devices.
const (
	KindVF       Kind = "vf"       // an SR-IOV virtual function
	KindRDMA     Kind = "rdma"     // another RDMA device of the kernel: rxe, siw, an RNIC without VFs
	KindSoftware Kind = "software" // a software device of the agent, from node.devices
)

// Device is a device that pods can ask for. NetDev of a software device is the interface
// that its packets use, and State tells whether that interface has a carrier.
type Device struct {
	vf.Device
	Kind Kind
	// Up says that the port carries traffic; for a VF, the port of its PF.
	Up bool
}

// Shared says whether several pods can have the device at a time.
func (d Device) Shared() bool { return d.Kind != KindVF }

// Config says what to list. Configured and Log are required.
type Config struct {
	// Host is the machine.
	Host vf.Host
	// Configured returns the devices of the agent's configuration.
	Configured func() []config.Device
	Log        *slog.Logger

	machine machine // set by tests; the zero value is the real machine
}

// machine has the functions that look at the machine.
type machine struct {
	devices    func() ([]vf.Device, error)
	pfs        func() ([]vf.PF, error)
	interfaces func() ([]iface, error)
	glance     func() string
	changes    func(context.Context) (<-chan struct{}, error)
}

// iface is a network interface of the host.
type iface struct {
	name     string
	up       bool
	mac      string
	addrs    []netip.Addr
	numaNode int
}

// Inventory is the list of devices. Its methods may be called by any goroutine.
type Inventory struct {
	cfg Config

	mu          sync.Mutex // guards what is below
	devices     []Device
	looked      bool
	subscribers map[int]chan struct{}
	next        int
}

// New makes an inventory. It is empty until Run has looked once.
func New(cfg Config) *Inventory {
	m := &cfg.machine
	if m.devices == nil {
		*m = machine{
			devices: cfg.Host.Devices, pfs: cfg.Host.PFs, glance: cfg.Host.Glance, changes: linux.LinkChanges,
			interfaces: func() ([]iface, error) { return interfaces(cmp.Or(cfg.Host.Sys, "/sys")) },
		}
	}
	return &Inventory{cfg: cfg, subscribers: map[int]chan struct{}{}}
}

// Devices returns the devices that the last look found, in the order of kind and ID. Nobody
// may change the result.
func (i *Inventory) Devices() []Device {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.devices
}

// Looked says whether Run has looked at the machine once. Until then the list is empty.
func (i *Inventory) Looked() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.looked
}

// Subscribe returns a channel that gets a value when the result of Devices changes, and at
// once if Run has looked at the machine already.
func (i *Inventory) Subscribe() (changed <-chan struct{}, stop func()) {
	c := make(chan struct{}, 1)
	i.mu.Lock()
	defer i.mu.Unlock()
	id := i.next
	i.next++
	i.subscribers[id] = c
	if i.looked {
		c <- struct{}{}
	}
	return c, func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		delete(i.subscribers, id)
	}
}

// Run looks at the machine until ctx ends.
func (i *Inventory) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		complained   time.Time
		problem      string
		changes, err = i.cfg.machine.changes(ctx)
		tick         = time.NewTicker(every)
	)
	defer tick.Stop()
	if err != nil {
		i.cfg.Log.Warn("no notices of changed network interfaces from the kernel; devices are listed every second", "err", err)
	}
	for {
		seen, at := i.glance(), time.Now() // before the look: the next glance finds what changes meanwhile
		err := i.look()
		if err != nil {
			if text := err.Error(); text != problem || at.Sub(complained) >= complainEvery {
				problem, complained = text, at
				i.cfg.Log.Warn("not all devices listed", "err", err)
			}
		}
		due := func(now time.Time) bool {
			return err != nil || changes == nil || now.Sub(at) >= lookEvery || !reflect.DeepEqual(seen, i.glance())
		}
		if !awaitChange(ctx, tick.C, &changes, due) {
			return
		}
	}
}

// awaitChange waits until the kernel tells of a change, or until due, which is asked at each tick, says
// that it is time to look. It returns false if ctx ended. If changes was closed, it becomes nil.
func awaitChange(ctx context.Context, tick <-chan time.Time, changes *<-chan struct{}, due func(time.Time) bool) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case now := <-tick:
			if due(now) {
				return true
			}
		case _, ok := <-*changes:
			if !ok {
				*changes = nil
				continue
			}
			quiet := time.NewTimer(debounce)
			defer quiet.Stop()
			select {
			case <-ctx.Done():
				return false
			case <-quiet.C:
				return true
			}
		}
	}
}

// A glance is what changes without a notice of the kernel, as far as it costs little to see.
type glance struct {
	host       string
	configured []config.Device
}

func (i *Inventory) glance() glance {
	return glance{i.cfg.machine.glance(), i.cfg.Configured()}
}

// look lists the devices and tells the subscribers if the list differs. After an error of
// the kernel the list of the last look stays.
func (i *Inventory) look() error {
	ifs, err := i.cfg.machine.interfaces()
	if err != nil {
		return fmt.Errorf("list network interfaces: %w", err)
	}
	found, err := i.cfg.machine.devices()
	if err != nil {
		return fmt.Errorf("list RDMA devices: %w", err)
	}
	pfs, err := i.cfg.machine.pfs()
	if err != nil {
		return fmt.Errorf("list physical functions: %w", err)
	}
	list := append(kernelDevices(found, pfs), softwareDevices(i.cfg.Configured(), ifs)...)
	slices.SortFunc(list, func(a, b Device) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID)) })
	if len(list) > maxDevices {
		err = fmt.Errorf("the node has %d devices, the first %d are listed", len(list), maxDevices)
		list = list[:maxDevices]
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.looked && reflect.DeepEqual(list, i.devices) {
		return err
	}
	i.devices, i.looked = list, true
	for _, c := range i.subscribers {
		select {
		case c <- struct{}{}:
		default: // the channel has a value already
		}
	}
	return err
}

// kernelDevices makes the list of the kernel's devices, and decides which are up.
func kernelDevices(found []vf.Device, pfs []vf.PF) []Device {
	up := map[string]bool{}
	for _, pf := range pfs {
		up[pf.PCI] = pf.State == vf.StateUp
	}
	var out []Device
	for _, d := range found {
		x := Device{Device: d, Kind: KindRDMA, Up: d.State == vf.StateUp}
		if d.VF >= 0 {
			x.Kind = KindVF
			x.Up = up[d.PFPCI] && (d.State == vf.StateUp || d.State == vf.StateDown || d.State == vf.StatePod)
		}
		out = append(out, x)
	}
	return out
}

// softwareDevices are the software devices of the configuration. Each is a rail of its own.
func softwareDevices(configured []config.Device, ifs []iface) []Device {
	var out []Device
	for n, c := range configured {
		if !c.Soft() {
			continue
		}
		d := Device{Kind: KindSoftware, Device: vf.Device{
			ID: config.DeviceName(n, c), VF: -1, NUMANode: -1, Rail: n, NetDev: c.Interface, State: vf.StateDown, Driver: "kube-smcr",
		}}
		at := slices.IndexFunc(ifs, func(i iface) bool {
			return c.SoftAddress.IsValid() && slices.Contains(i.addrs, c.SoftAddress)
		})
		if at >= 0 {
			i := ifs[at]
			d.NetDev, d.MAC, d.NUMANode, d.Up = i.name, i.mac, i.numaNode, i.up
		}
		if d.Up {
			d.State = vf.StateUp
		}
		out = append(out, d)
	}
	return out
}

// interfaces lists the network interfaces of the process's namespace.
func interfaces(sys string) ([]iface, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var (
		out  []iface
		errs []error
	)
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			errs = append(errs, fmt.Errorf("addresses of %s: %w", i.Name, err))
			continue
		}
		x := iface{
			name: i.Name, up: i.Flags&net.FlagUp != 0 && i.Flags&net.FlagRunning != 0, mac: i.HardwareAddr.String(),
			numaNode: numaNode(filepath.Join(sys, "class/net", i.Name, "device/numa_node")),
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				x.addrs = append(x.addrs, p.Addr().Unmap())
			}
		}
		out = append(out, x)
	}
	if len(out) == 0 {
		return nil, errors.Join(errs...)
	}
	return out, nil // an error is of an interface that is gone by now
}

// numaNode reads the number of a NUMA node from a file; -1 means none, as in sysfs.
func numaNode(file string) int {
	b, err := os.ReadFile(file)
	if err != nil {
		return -1 // an interface without a PCI device
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || n < 0 {
		return -1
	}
	return n
}
