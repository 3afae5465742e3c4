// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// Assigned tells which devices kubelet gave to a pod, by their IDs: the PCI
// address of a VF, the name of the network interface of another RDMA device, or
// the name of one of the agent's software devices. It is asked for every
// attached pod once a second, and answers from memory.
type Assigned interface {
	Devices(pod config.PodName) []string
}

// ownDevice is an RDMA device that a pod has for itself, or shares with other
// pods that asked for it.
type ownDevice struct {
	pod  string // NAMESPACE/NAME
	id   string
	pci  string
	rdma []string // names, when the record was written
	// netdev is the name of its network interface on the host, ifName in the
	// pod.
	netdev, ifName string
	pf             string
	vf             int // -1: it is no VF
	numa, rail     int // -1: unknown
	mode           string
	// soft: it is one of the agent's software devices.
	soft bool
	// lookUp: only the ID is known so far.
	lookUp bool
}

// ownDevices are the devices that a pod has according to its records, or else
// to kubelet. A device without RDMA is only a network interface.
func (a *agent) ownDevices(atts []cni.Attachment) []ownDevice {
	var out []ownDevice
	id := podOf(atts[0])
	pod := id.String()
	for _, att := range atts {
		for _, d := range att.Devices {
			dev, _, _ := strings.Cut(d.ID, "/") // one slot of a device that pods share
			if len(d.RDMA) == 0 && a.nodeDevice(&ownDevice{id: dev}) == nil {
				continue
			}
			out = append(out, ownDevice{
				pod: pod, id: dev, pci: d.PCI, rdma: d.RDMA, netdev: d.NetDev, ifName: cmp.Or(d.IfName, att.IfName), pf: d.PF, vf: d.VF,
				numa: d.NUMANode, rail: d.Rail, mode: d.Mode,
			})
		}
	}
	if len(out) == 0 && a.cfg.Assigned != nil && id.Namespace != "" {
		for _, dev := range a.cfg.Assigned.Devices(config.PodName{Namespace: id.Namespace, Name: id.Name}) {
			out = append(out, ownDevice{pod: pod, id: dev, vf: -1, numa: -1, rail: -1, lookUp: true})
		}
	}
	for i := range out {
		d := a.nodeDevice(&out[i])
		out[i].soft = d != nil && d.cfg.Soft()
	}
	slices.SortStableFunc(out, func(x, y ownDevice) int { return cmp.Compare(x.id, y.id) })
	out = slices.CompactFunc(out, func(x, y ownDevice) bool { return x.id == y.id })
	orderRails(out, a.near)
	return out[:min(len(out), linkgroup.MaxRNICs)]
}

// orderRails puts devices in the order in which links should use them: those
// near to the agent's processors first, and neighbours in the list on different
// rails, so that the first two of any end are.
func orderRails(ds []ownDevice, near func(numa int) bool) {
	nth := map[string]int{} // of its rail
	count := map[int]int{}
	slices.SortStableFunc(ds, func(x, y ownDevice) int { return cmp.Compare(x.rail, y.rail) })
	for _, d := range ds {
		nth[d.id] = count[d.rail]
		count[d.rail]++
	}
	far := func(d ownDevice) int {
		if near(d.numa) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(ds, func(x, y ownDevice) int {
		return cmp.Or(cmp.Compare(nth[x.id], nth[y.id]), cmp.Compare(far(x), far(y)), cmp.Compare(x.rail, y.rail))
	})
}

// inPod says whether the network interface of the device is in the pod's
// namespace. Where another plugin made the interface, the host tells.
func (d *ownDevice) inPod() bool {
	switch vf.Mode(d.mode) {
	case vf.ModeMove:
		return true
	case vf.ModeIPVlan:
		return false
	case vf.ModeAuto:
	}
	if d.pci != "" {
		there, err := os.ReadDir(filepath.Join("/sys/bus/pci/devices", d.pci, "net"))
		return err != nil || len(there) == 0
	}
	_, err := net.InterfaceByName(d.netdev)
	return d.netdev != "" && err != nil
}

// learn adds what the host knows of a device of which only the ID is known.
func learn(h vf.Host, d ownDevice) (ownDevice, error) {
	dev, err := h.Device(d.id)
	if err != nil {
		return d, err
	}
	if len(dev.RDMA) == 0 {
		return d, errors.New("it has no RDMA device: load its driver, or make one: rdma link add NAME type rxe netdev INTERFACE")
	}
	d.pci, d.rdma, d.netdev, d.pf, d.vf = dev.PCI, dev.RDMA, dev.NetDev, dev.PF, dev.VF
	d.numa, d.rail, d.mode = dev.NUMANode, dev.Rail, string(dev.Mode)
	return d, nil
}

// openOwn opens a pod's device. Its RDMA device may have been made again under
// another name.
func openOwn(d *ownDevice, in podNet) (rdma.Device, func() error, error) {
	all, err := verbs.Devices()
	if err != nil {
		return nil, nil, err
	}
	inPod := d.inPod()
	name := d.rdmaName(all, inPod)
	if name == "" {
		return nil, nil, fmt.Errorf("its RDMA device %s is not there (rdma link shows those of the host; one that is in the pod's namespace because of rdma system netns exclusive is not)", strings.Join(d.rdma, " or "))
	}
	cfg := verbs.Config{Name: name, NetDev: d.netdev}
	if inPod {
		if in == nil {
			return nil, nil, errors.New("its interface is in the pod, whose network namespace cannot be opened")
		}
		cfg.NetDev, cfg.Interface = d.ifName, in.netInterface
	}
	dev, err := verbs.Open(cfg)
	if err != nil {
		return nil, nil, err
	}
	return dev, dev.Close, nil
}

// rdmaName finds the RDMA device among all.
func (d *ownDevice) rdmaName(all []verbs.Info, inPod bool) string {
	for _, name := range d.rdma {
		if slices.ContainsFunc(all, func(i verbs.Info) bool { return i.Name == name }) {
			return name
		}
	}
	for _, i := range all {
		hardware := d.pci != "" && i.PCI == d.pci
		software := i.PCI == "" && d.netdev != "" && !inPod && slices.ContainsFunc(i.Ports, func(p verbs.PortInfo) bool { return p.NetDev == d.netdev })
		if hardware || software {
			return i.Name
		}
	}
	return ""
}

// deviceSet are the devices that one pod's stack runs on, if they are not the
// node's. The pod's job owns it, and then the run of the pod.
type deviceSet struct {
	a   *agent
	net podNet // the pod's namespace; nil: it could not be opened

	// guarded by a.devices.mu; only the owner changes them
	want    []ownDevice // what it was made of
	devices []*device   // for each of them
}

// provide gives a selected pod the devices that it has for itself. A stack runs
// on them or on the node's: when that changes, it begins anew.
func (m *manager) provide(ctx context.Context, p *pod) {
	want := m.a.ownDevices(p.atts)
	if p.run == nil && !m.a.diverts(p.atts, hardware(want), true) {
		want = nil // it may use them itself, and nobody waits for us to close them
	}
	if own := len(want) > 0; own != (p.set != nil) {
		if p.run != nil {
			p.run.log.Info("the pod's devices changed; its link groups begin anew", "own", own)
		}
		m.end(p, agentapi.CodePolicyChange)
		p.run, p.state, p.swept = nil, "", p.swept || p.run != nil
	}
	switch {
	case len(want) == 0:
	case p.set == nil:
		p.set = &deviceSet{a: m.a}
		var err error
		if p.set.net, err = m.a.cfg.kernel.open(p.atts[0].NetNS); err != nil {
			m.a.cfg.Log.Warn("namespace of a pod with devices not opened", "pod", podOf(p.atts[0]).String(), "err", err)
		}
		p.set.update(ctx, nil, want)
	case !reflect.DeepEqual(p.set.want, want):
		var s stack
		if p.run != nil {
			s = p.run.stack
		}
		p.set.update(ctx, s, want)
	}
}

// withdraw takes the devices from a pod that has no run.
func (m *manager) withdraw(p *pod) {
	if err := p.set.release(); err != nil {
		m.a.cfg.Log.Warn("device of a pod not closed in order", "pod", podOf(p.atts[0]).String(), "err", err)
	}
	p.set = nil
}

// update makes want the devices of the set, of which s runs on those that it
// has, if there is a stack. The manager gives s the new ones.
func (set *deviceSet) update(ctx context.Context, s stack, want []ownDevice) {
	a := set.a
	kept := map[string]*device{}
	for i, d := range set.devices {
		had := &set.want[i]
		if slices.ContainsFunc(want, func(o ownDevice) bool { return reflect.DeepEqual(o, *had) }) {
			kept[had.id] = d
			continue
		}
		if open := a.devices.get(d); s != nil && open != nil {
			s.RemoveDevice(open.Name())
		}
		if err := a.giveBack(d); err != nil {
			a.cfg.Log.Warn("device taken from a pod not closed in order", "device", d.name, "err", err)
		}
	}
	devices := make([]*device, len(want))
	for i := range want {
		if devices[i] = kept[want[i].id]; devices[i] == nil {
			devices[i] = a.obtainDevice(ctx, set.net, want[i])
		}
	}
	a.devices.mu.Lock()
	defer a.devices.mu.Unlock()
	set.want, set.devices = want, devices
	a.devices.came++
}

// release gives the devices back; a nil set is the node's, which stay.
func (set *deviceSet) release() error {
	if set == nil {
		return nil
	}
	set.a.devices.mu.Lock()
	devices := set.devices
	set.devices, set.want = nil, nil
	set.a.devices.mu.Unlock()
	var errs []error
	for _, d := range devices {
		errs = append(errs, set.a.giveBack(d))
	}
	if set.net != nil {
		errs = append(errs, set.net.close())
		set.net = nil
	}
	return errors.Join(errs...)
}

// has reports whether an address is of a device whose interface is in the pod.
func (set *deviceSet) has(src netip.Addr) bool {
	if set == nil || set.net == nil {
		return false
	}
	return slices.ContainsFunc(set.a.devices.now(set), func(d deviceNow) bool {
		return d.open != nil && d.inPod &&
			slices.ContainsFunc(d.open.GIDs(), func(g rdma.GIDEntry) bool { return g.GID.Addr() == src })
	})
}

// railOf tells the rails of the devices to a stack; one that nobody knows is of
// its own.
func (set *deviceSet) railOf() func(name string) int {
	if set == nil {
		return nil
	}
	return func(name string) int {
		ds := set.a.devices.now(set)
		i := slices.IndexFunc(ds, func(d deviceNow) bool { return d.open != nil && d.open.Name() == name })
		if i < 0 || ds[i].own.rail < 0 {
			return -1 - max(i, 0)
		}
		return ds[i].own.rail
	}
}

// route asks how the stack's devices reach a peer's RNIC.
func (r *run) route(src, dst netip.Addr) (clc.Route, error) {
	if r.set.has(src) {
		return r.set.net.route(src, dst)
	}
	return r.agent.cfg.route(src, dst)
}

// bar is why the pod cannot use SMC-R on this node at all.
func (r *run) bar() config.Bar { return barOf(r.settings, r.set.hardware()) }

// barOf is the bar of a pod, which has hardware for itself or not.
func barOf(s config.Settings, own bool) config.Bar {
	if own {
		return s.BarOwn
	}
	return s.Bar
}

// hardware reports whether a pod has devices of the kernel for itself.
func (set *deviceSet) hardware() bool {
	if set == nil {
		return false
	}
	set.a.devices.mu.Lock()
	defer set.a.devices.mu.Unlock()
	return hardware(set.want)
}

func hardware(ds []ownDevice) bool {
	return slices.ContainsFunc(ds, func(d ownDevice) bool { return !d.soft })
}

// obtainDevice opens a device for a pod, or finds the one that is open. What
// cannot be opened is looked for again until it is given back.
func (a *agent) obtainDevice(ctx context.Context, in podNet, own ownDevice) *device {
	if d := a.nodeDevice(&own); d != nil {
		return d
	}
	defer a.devices.turn(own.id)() // of two pods that want it the second one shares it
	if d := a.shareDevice(&own); d != nil {
		return d
	}
	d := &device{name: own.id, own: &own, cfg: config.Device{RDMA: own.id}, users: 1}
	d.opener = func() (rdma.Device, func() error, error) {
		now := own
		if own.lookUp {
			var err error
			if now, err = a.cfg.learn(own); err != nil {
				return nil, nil, err
			}
		}
		a.devices.mu.Lock()
		d.own, d.inPod = &now, now.inPod()
		a.devices.mu.Unlock()
		return a.cfg.openOwn(&now, in)
	}
	if err := a.openDevice(d); err != nil {
		d.err = d.unusable(err)
		a.cfg.Log.Warn("device of a pod not opened; it is tried again", "pod", own.pod, "err", d.err)
	}
	a.devices.mu.Lock()
	a.devices.pods = append(a.devices.pods, d)
	a.devices.mu.Unlock()
	keeping, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	if a.unable.code == "" {
		wg.Go(func() { a.keepDevice(keeping, d) })
	}
	d.unkeep = func() {
		cancel()
		wg.Wait()
	}
	return d
}

// unusable says why a pod's device cannot be used.
func (d *device) unusable(err error) error {
	return fmt.Errorf("device %s of pod %s cannot be used: %w", d.own.id, d.own.pod, err)
}

// shareDevice finds a device of the host that another pod has too.
func (a *agent) shareDevice(own *ownDevice) *device {
	if vf.Mode(own.mode) == vf.ModeMove {
		return nil
	}
	a.devices.mu.Lock()
	defer a.devices.mu.Unlock()
	for _, d := range a.devices.pods {
		if d.own.id == own.id && d.open != nil && !d.inPod {
			d.users++
			return d
		}
	}
	return nil
}

// nodeDevice finds the device among those of the node.
func (a *agent) nodeDevice(own *ownDevice) *device {
	for _, d := range a.devices.node {
		if d.name == own.id || !d.cfg.Soft() && vf.Mode(own.mode) != vf.ModeMove && slices.Contains(own.rdma, d.cfg.RDMA) {
			return d
		}
	}
	return nil
}

// giveBack closes a device if no other pod has it.
func (a *agent) giveBack(d *device) error {
	a.devices.mu.Lock()
	d.users--
	last := d.own != nil && d.users == 0 // the node's stay
	if last {
		a.devices.pods = slices.DeleteFunc(a.devices.pods, func(o *device) bool { return o == d })
	}
	a.devices.mu.Unlock()
	if !last {
		return nil
	}
	d.unkeep()
	return a.devices.drop(d, nil)
}
