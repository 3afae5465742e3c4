// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/files"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// A pod that has a veth only needs three things for its kernel to find an RNIC:
//
//   - one physical network (pnetid) of its interface, in the pod's table, and of the RNIC, in the host's;
//   - an address of the RNIC's interface in whose network the pod's address is: the kernel takes the first GID of an interface that has
//     one. It is the interface's own address once more, point to point with the pods' network, so nobody's address becomes the
//     host's;
//   - on the server's side, the pod's address among those of the host, though not among its routes: see linux.SetShadows.
//
// Veths makes these, and keeps in a file what of them is its own.

// ourPNet is the physical network of an RNIC that has none.
const ourPNet = "KUBESMCR"

// ErrNoVethRNIC means that no RNIC can serve pods that have a veth.
var ErrNoVethRNIC = errors.New("no active RDMA device whose interface is in the node's network has a GID of RoCE v2 that is an IPv4 address of that interface")

// Veths lets the kernel find an RNIC for pods with a veth. Its methods may be called by several goroutines.
type Veths struct {
	name string     // of the record
	mu   sync.Mutex // guards the record, and what it says
}

// NewVeths returns the Veths whose record of what is ours is a file. Without one nothing is.
func NewVeths(record string) *Veths { return &Veths{name: record} }

// vethRecord is what may be ours on the node: it is written before that is made, and after it is taken away.
type vethRecord struct {
	RNIC vethRNIC           `json:"rnic"`
	Pods map[uint64]vethPod `json:"pods"` // by the cookies of their namespaces
}

// vethRNIC is the one that serves all pods with a veth: the interface of a pod can be in one physical network only.
type vethRNIC struct {
	Device string       `json:"device"`
	Port   uint8        `json:"port"`
	Index  int          `json:"index"` // of its interface
	PNet   string       `json:"pnet"`
	Ours   bool         `json:"ours"` // we said that it is in that one
	Inets  []linux.Inet `json:"inets,omitempty"`
}

type vethPod struct {
	NetNS string            `json:"netns"`
	Veths []linux.NamedAddr `json:"veths"`
	PNet  string            `json:"pnet"`
	Ours  []string          `json:"ours,omitempty"` // interfaces of which we said that they are in that one
}

// rnic is a port as it is now.
type rnic struct {
	device string
	port   uint8
	active bool
	pnet   string // "": none
	index  int    // of its interface
	inets  []linux.Inet
	gids   []netip.Addr // of RoCE v2
}

// base is the GID that the node's connections have: the first one that is an address of the interface, but for those that are ours. It is
// not valid if there is none.
func (r *rnic) base(ours []linux.Inet) linux.Inet {
	for _, g := range r.gids {
		for _, i := range r.inets {
			if i.Local == g && i.Net.Contains(g) && !slices.Contains(ours, i) {
				return i
			}
		}
	}
	return linux.Inet{}
}

// hasNet tells whether an address of the interface that is not ours has a in its network.
func (r *rnic) hasNet(a netip.Addr, ours []linux.Inet) bool {
	return slices.ContainsFunc(r.inets, func(i linux.Inet) bool { return i.Net.Contains(a) && !slices.Contains(ours, i) })
}

// choose says which RNIC serves: the one that does already, else one whose physical network is known, else the first by name.
func choose(all []rnic, was vethRNIC) (rnic, error) {
	fit := slices.DeleteFunc(slices.Clone(all), func(r rnic) bool { return !r.active || !r.base(was.Inets).Local.IsValid() })
	if was.Device != "" {
		i := slices.IndexFunc(fit, func(r rnic) bool { return r.device == was.Device && r.port == was.Port })
		if i < 0 {
			return rnic{}, fmt.Errorf("port %d of %s, which serves the node's pods with a veth, is not active or has lost its address: %w", was.Port, was.Device, ErrNoVethRNIC)
		}
		return fit[i], nil
	}
	if len(fit) == 0 {
		return rnic{}, ErrNoVethRNIC
	}
	known := func(r rnic) int {
		if r.pnet != "" {
			return 0
		}
		return 1
	}
	return slices.MinFunc(fit, func(a, b rnic) int {
		return cmp.Or(cmp.Compare(known(a), known(b)), cmp.Compare(a.device, b.device), cmp.Compare(a.port, b.port))
	}), nil
}

// networkOf is the network that an address of ours is for: that of private use which has a in it, so that one is enough for all pods of a
// cluster.
func networkOf(a netip.Addr) netip.Prefix {
	for _, text := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"} {
		if p := netip.MustParsePrefix(text); p.Contains(a) {
			return p
		}
	}
	return netip.PrefixFrom(a, 24).Masked()
}

// wantedInets are the addresses that an RNIC's interface needs for pods.
func wantedInets(r *rnic, ours []linux.Inet, pods []netip.Addr) (out []linux.Inet) {
	base := r.base(ours)
	if !base.Local.IsValid() {
		return nil
	}
	for _, a := range pods {
		if i := (linux.Inet{Local: base.Local, Net: networkOf(a)}); !r.hasNet(a, ours) && !slices.Contains(out, i) {
			out = append(out, i)
		}
	}
	return out
}

// addresses are those of all pods.
func (v *vethRecord) addresses() (out []netip.Addr) {
	for _, p := range v.Pods {
		for _, a := range p.Veths {
			out = append(out, a.Addr)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// fit tells whether attach can do its work, and changes nothing.
func (v *Veths) fit(ns *linux.NetNS, addrs []netip.Addr) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return inHost(func(host *linux.NetNS) error {
		rec, err := v.read()
		if err != nil {
			return err
		}
		_, _, err = find(host, ns, addrs, rec.RNIC)
		return err
	})
}

// find looks for the veths of a pod and for the RNIC that serves it.
func find(host, ns *linux.NetNS, addrs []netip.Addr, was vethRNIC) (veths []linux.NamedAddr, r rnic, err error) {
	if veths, err = linux.VethsWith(ns, addrs); err != nil {
		return nil, r, err
	}
	if len(veths) == 0 {
		return nil, r, fmt.Errorf("%w, nor is there a veth with an IPv4 address that the pod's network gave it", ErrUnfit)
	}
	for _, a := range veths {
		if err := isNobodyElses(host, a.Addr); err != nil {
			return nil, r, err
		}
	}
	all, err := rnics(host)
	if err == nil {
		r, err = choose(all, was)
	}
	return veths, r, err
}

// isNobodyElses refuses an address that the host has.
func isNobodyElses(host *linux.NetNS, a netip.Addr) error {
	names, err := linux.InterfacesWith(host, a)
	for _, name := range names {
		if name != linux.ShadowLink {
			return fmt.Errorf("the pod's address %v is also one of the node itself, of its interface %s, and left alone: give one of them another address", a, name)
		}
	}
	return err
}

// rnics lists the ports of RDMA devices with an interface in the host's network.
func rnics(host *linux.NetNS) (out []rnic, err error) {
	devices, err := smcnl.Devices()
	if err != nil {
		return nil, err
	}
	here, err := linux.RDMADevicesIn(host)
	if err != nil {
		return nil, err
	}
	for _, d := range devices {
		for _, p := range d.Ports {
			if p.NetDev == 0 || !slices.Contains(here, d.Name) {
				continue
			}
			_, inets, err := linux.Inets(host, int(p.NetDev))
			if err != nil {
				continue // it has just gone
			}
			out = append(out, rnic{d.Name, p.Number, p.Active, p.PNetID, int(p.NetDev), inets, linux.RoCEv2GIDs(d.Name, p.Number)})
		}
	}
	return out, nil
}

// attach makes for a pod what Veths is for. It may be called again. If it fails, nothing is left.
func (v *Veths) attach(ns *linux.NetNS, addrs []netip.Addr) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	cookie, err := ns.Cookie()
	if err != nil {
		return err
	}
	return inHost(func(host *linux.NetNS) error {
		rec, err := v.read()
		if err != nil {
			return err
		}
		veths, r, err := find(host, ns, addrs, rec.RNIC)
		if err != nil {
			return err
		}
		if rec.RNIC.Device == "" {
			rec.RNIC = vethRNIC{Device: r.device, Port: r.port, Index: r.index, PNet: cmp.Or(r.pnet, ourPNet), Ours: r.pnet == "" || r.pnet == ourPNet}
		}
		pod := vethPod{NetNS: ns.Path(), Veths: veths, PNet: rec.RNIC.PNet, Ours: rec.Pods[cookie].Ours}
		rec.Pods[cookie] = pod
		if err = v.write(&rec); err == nil {
			err = v.apply(host, &rec)
		}
		if err == nil {
			err = v.joinPod(ns, cookie, &rec)
		}
		if err != nil {
			return errors.Join(err, v.drop(host, ns, cookie, &rec))
		}
		return nil
	})
}

// detach takes attach back. It is no error if nothing was attached.
func (v *Veths) detach(ns *linux.NetNS) error {
	cookie, err := ns.Cookie()
	if err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	rec, err := v.read()
	if _, ok := rec.Pods[cookie]; err != nil || !ok {
		return err
	}
	return inHost(func(host *linux.NetNS) error { return v.drop(host, ns, cookie, &rec) })
}

// drop takes away what is there for a pod; without ns, on the node only.
func (v *Veths) drop(host, ns *linux.NetNS, cookie uint64, rec *vethRecord) error {
	p := rec.Pods[cookie]
	delete(rec.Pods, cookie)
	var err error
	if ns != nil {
		err = ns.Do(func() error { return leavePNet(p) })
	}
	if err = errors.Join(err, v.apply(host, rec)); err != nil {
		rec.Pods[cookie] = p // it is tried again
		return errors.Join(fmt.Errorf("take away what a pod's veth had for its kernel's SMC-R: %w", err), v.write(rec))
	}
	return v.settle(rec)
}

// Keep makes again what is missing on the node for the pods that are attached, as after the interface of the RNIC was away, and takes
// away what pods had that are gone: perhaps nobody was there to detach them.
func (v *Veths) Keep() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	rec, err := v.read()
	if err != nil || len(rec.Pods) == 0 {
		return err
	}
	return inHost(func(host *linux.NetNS) error { return v.keep(host, &rec) })
}

// keep is Keep for the record as it was read.
func (v *Veths) keep(host *linux.NetNS, rec *vethRecord) error {
	var errs []error // what is wrong with one pod is not to keep the others from their RNIC
	for cookie, p := range maps.Clone(rec.Pods) {
		ns, err := openPod(cookie, p)
		if ns != nil {
			err = ns.Close()
		} else if err == nil {
			err = v.drop(host, nil, cookie, rec)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("look for the pod of %s: %w", p.NetNS, err))
		}
	}
	if len(rec.Pods) > 0 {
		errs = append(errs, v.apply(host, rec))
	}
	return errors.Join(errs...)
}

// Remove takes everything away, and the record.
func (v *Veths) Remove() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, err := os.Stat(v.name); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	rec, err := v.read()
	if err != nil {
		return err
	}
	for cookie, p := range rec.Pods {
		err = errors.Join(err, leaveByPath(cookie, p))
	}
	clear(rec.Pods)
	if err = errors.Join(err, inHost(func(host *linux.NetNS) error { return v.apply(host, &rec) })); err != nil {
		return err
	}
	return v.settle(&rec)
}

// leaveByPath takes the pnetid from a pod that is still at its path.
func leaveByPath(cookie uint64, p vethPod) error {
	ns, err := openPod(cookie, p)
	if ns == nil {
		return err
	}
	return errors.Join(ns.Do(func() error { return leavePNet(p) }), ns.Close())
}

// openPod opens the namespace of a pod where it was, nil if it is gone.
func openPod(cookie uint64, p vethPod) (*linux.NetNS, error) {
	ns, err := linux.OpenNetNS(p.NetNS)
	if errors.Is(err, linux.ErrGone) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	is, err := ns.Cookie()
	if err == nil && is == cookie {
		return ns, nil
	}
	return nil, errors.Join(err, ns.Close())
}

// apply brings the node in line with the record: what its pods need is there, and nothing else that is ours.
func (v *Veths) apply(host *linux.NetNS, rec *vethRecord) error {
	all, err := rnics(host)
	if err != nil && !errors.Is(err, smcnl.ErrNoSMC) {
		return err
	}
	i := slices.IndexFunc(all, func(r rnic) bool { return r.device == rec.RNIC.Device && r.port == rec.RNIC.Port })
	wanted := rec.RNIC.Inets // of a device that is away they may be on its interface still
	switch {
	case len(rec.Pods) == 0:
		wanted = nil
	case i >= 0:
		rec.RNIC.Index = all[i].index
		wanted = wantedInets(&all[i], rec.RNIC.Inets, rec.addresses())
		err = v.addInets(host, &all[i], wanted, rec)
	}
	return errors.Join(err, v.removeInets(host, wanted, rec), setPNet(rec, i >= 0 && all[i].pnet == ""), linux.SetShadows(host, rec.addresses()))
}

// addInets gives the RNIC's interface the addresses that it does not have, and looks after those that it has.
func (v *Veths) addInets(host *linux.NetNS, r *rnic, wanted []linux.Inet, rec *vethRecord) error {
	for _, i := range wanted {
		if !slices.Contains(r.inets, i) && !slices.Contains(rec.RNIC.Inets, i) {
			rec.RNIC.Inets = append(slices.Clone(rec.RNIC.Inets), i)
			if err := v.write(rec); err != nil {
				return err
			}
		}
		if err := linux.AddInet(host, r.index, i); err != nil {
			return err
		}
	}
	return nil
}

// removeInets takes those of ours away that are not wanted.
func (v *Veths) removeInets(host *linux.NetNS, wanted []linux.Inet, rec *vethRecord) error {
	for _, i := range slices.Clone(rec.RNIC.Inets) {
		if slices.Contains(wanted, i) {
			continue
		}
		if err := linux.RemoveInet(host, rec.RNIC.Index, i); err != nil {
			return err
		}
		rec.RNIC.Inets = slices.DeleteFunc(slices.Clone(rec.RNIC.Inets), func(o linux.Inet) bool { return o == i })
		if err := v.write(rec); err != nil {
			return err
		}
	}
	return nil
}

// setPNet says that the RNIC is in a physical network, if it has none and pods need that, and takes that back when there are no pods.
func setPNet(rec *vethRecord, none bool) error {
	r := rec.RNIC
	if !r.Ours {
		return nil
	}
	if len(rec.Pods) > 0 {
		if !none {
			return nil
		}
		if err := smcnl.AddPNet(smcnl.PNet{Name: r.PNet, Device: r.Device, Port: r.Port}); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("say that port %d of %s is in physical network %s: %w", r.Port, r.Device, r.PNet, err)
		}
		return nil
	}
	return removePNet(r.PNet, func(p smcnl.PNet) bool { return p.Device == r.Device && p.Port == r.Port })
}

// removePNet takes what is ours out of a physical network, and leaves what is not.
func removePNet(name string, ours func(smcnl.PNet) bool) error {
	all, err := smcnl.PNets()
	if errors.Is(err, smcnl.ErrNoSMC) {
		return nil // without the module there are none
	}
	if err != nil {
		return err
	}
	others := slices.DeleteFunc(all, func(p smcnl.PNet) bool { return p.Name != name })
	n := len(others)
	if others = slices.DeleteFunc(others, ours); len(others) == n {
		return nil
	}
	err = smcnl.RemovePNet(name) // the kernel knows no other way
	for _, p := range others {
		err = errors.Join(err, smcnl.AddPNet(p))
	}
	if err != nil {
		return fmt.Errorf("take physical network %s from the kernel: %w", name, err)
	}
	return nil
}

// joinPod says that the veths of a pod are in the physical network of the RNIC.
func (v *Veths) joinPod(ns *linux.NetNS, cookie uint64, rec *vethRecord) error {
	return ns.Do(func() error {
		all, err := smcnl.PNets()
		if err != nil {
			return err
		}
		pod := rec.Pods[cookie]
		for _, a := range pod.Veths {
			i := slices.IndexFunc(all, func(p smcnl.PNet) bool { return p.NetDev == a.Name })
			switch {
			case i >= 0 && all[i].Name == pod.PNet:
				continue
			case i >= 0:
				return fmt.Errorf("interface %s of the pod is in physical network %s, and the RNIC in %s: remove that (smc_pnet -r in the pod's network), or give the RNIC the same one", a.Name, all[i].Name, pod.PNet)
			case !slices.Contains(pod.Ours, a.Name):
				pod.Ours = append(slices.Clone(pod.Ours), a.Name)
				rec.Pods[cookie] = pod
				if err := v.write(rec); err != nil {
					return err
				}
			}
			if err := smcnl.AddPNet(smcnl.PNet{Name: pod.PNet, NetDev: a.Name}); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("say that interface %s of the pod is in physical network %s: %w", a.Name, pod.PNet, err)
			}
		}
		return nil
	})
}

// leavePNet takes joinPod back, for the thread's namespace.
func leavePNet(p vethPod) error {
	if len(p.Ours) == 0 {
		return nil
	}
	return removePNet(p.PNet, func(e smcnl.PNet) bool { return slices.Contains(p.Ours, e.NetDev) })
}

// inHost calls f with the namespace of the process, which is that of the node.
func inHost(f func(*linux.NetNS) error) error {
	host, err := linux.CurrentNetNS()
	if err != nil {
		return err
	}
	return errors.Join(f(host), host.Close())
}

// read returns an empty record if there is none.
func (v *Veths) read() (rec vethRecord, err error) {
	text, err := os.ReadFile(v.name)
	if err == nil {
		err = json.Unmarshal(text, &rec)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return rec, fmt.Errorf("read the record of pods with a veth %s: %w", v.name, err)
	}
	if rec.Pods == nil {
		rec.Pods = map[uint64]vethPod{}
	}
	return rec, nil
}

func (v *Veths) write(rec *vethRecord) error {
	text, err := json.Marshal(rec)
	if err == nil {
		err = files.Write(v.name, text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the record of pods with a veth: %w", err)
	}
	return nil
}

// settle writes the record after something was taken away, and removes it when nothing is left.
func (v *Veths) settle(rec *vethRecord) error {
	if len(rec.Pods) > 0 {
		return v.write(rec)
	}
	if err := os.Remove(v.name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the record of pods with a veth: %w", err)
	}
	return nil
}
