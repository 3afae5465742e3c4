// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// A Namespace is the network namespace of a pod.
type Namespace interface {
	// Interfaces looks network interfaces up by their indexes, and leaves out those that are not there.
	Interfaces(indexes []int) (map[int]verbs.Interface, error)
	// Route asks how src reaches dst.
	Route(src, dst netip.Addr) (clc.Route, error)
	Close() error
}

// Own is an RDMA device that a pod has for itself, or shares with other pods that asked for it.
type Own struct {
	Pod  string // NAMESPACE/NAME
	ID   string
	PCI  string
	RDMA []string // its names when the record was written
	// NetDev is the name of the device's network interface on the host, IfName its name in the pod.
	NetDev, IfName string
	PF             string
	VF             int // -1: not a VF
	NUMA, Rail     int // -1: unknown
	Mode           string
	// Soft means that the device is one of the agent's software devices.
	Soft bool
	// LookUp means that only the ID is known yet.
	LookUp bool
}

// IsNode reports whether an ID is that of a device of the node.
func (p *Pool) IsNode(id string) bool { return p.findNodeDevice(&Own{ID: id}) != nil }

// Arrange returns what a stack is to have of a pod's own devices: each device once, in the order in
// which links should use them, and no more than a link group can use.
func (p *Pool) Arrange(all []Own) []Own {
	for i := range all {
		d := p.findNodeDevice(&all[i])
		all[i].Soft = d != nil && d.cfg.Soft()
	}
	slices.SortStableFunc(all, func(x, y Own) int { return cmp.Compare(x.ID, y.ID) })
	all = slices.CompactFunc(all, func(x, y Own) bool { return x.ID == y.ID })
	orderRails(all, p.near)
	return all[:min(len(all), linkgroup.MaxRNICs)]
}

// Hardware reports whether a device of the kernel is among ds.
func Hardware(ds []Own) bool {
	return slices.ContainsFunc(ds, func(d Own) bool { return !d.Soft })
}

// moves reports whether the device's interface moves into the pod, so that only one pod can have
// it.
func (d *Own) moves() bool { return vf.Mode(d.Mode) == vf.ModeMove }

// orderRails puts devices in the order in which links should use them. Neighbours are on different
// rails, and devices near to the agent's processors come first. With rails 0 and 1, for example,
// and the devices a0 and b0 on rail 0, c1 and d1 on rail 1, the order is a0 c1 b0 d1: the first two
// devices, with which a link group begins, are on two rails.
func orderRails(ds []Own, near func(numa int) bool) {
	nth := map[string]int{} // a device's number on its rail
	count := map[int]int{}
	slices.SortStableFunc(ds, func(x, y Own) int { return cmp.Compare(x.Rail, y.Rail) })
	for _, d := range ds {
		nth[d.ID] = count[d.Rail]
		count[d.Rail]++
	}
	far := func(d Own) int {
		if near(d.NUMA) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(ds, func(x, y Own) int {
		return cmp.Or(cmp.Compare(nth[x.ID], nth[y.ID]), cmp.Compare(far(x), far(y)), cmp.Compare(x.Rail, y.Rail))
	})
}

// InPod reports whether the network interface of the device is in the pod's namespace. If another
// plugin made the interface, the mode does not tell: then the interface is in the pod if the host
// does not have it.
func (d *Own) InPod() bool {
	switch vf.Mode(d.Mode) {
	case vf.ModeMove:
		return true
	case vf.ModeIPVlan:
		return false
	case vf.ModeAuto:
	}
	if d.PCI != "" {
		there, err := os.ReadDir(filepath.Join("/sys/bus/pci/devices", d.PCI, "net"))
		return err != nil || len(there) == 0
	}
	_, err := net.InterfaceByName(d.NetDev)
	return d.NetDev != "" && err != nil
}

// Learn completes a device of which only the ID is known by what the host knows.
func Learn(h vf.Host, d Own) (Own, error) {
	dev, err := h.Device(d.ID)
	if err != nil {
		return d, err
	}
	if len(dev.RDMA) == 0 {
		return d, errors.New("it has no RDMA device: load its driver, or make one: rdma link add NAME type rxe netdev INTERFACE")
	}
	d.PCI, d.RDMA, d.NetDev, d.PF, d.VF = dev.PCI, dev.RDMA, dev.NetDev, dev.PF, dev.VF
	d.NUMA, d.Rail, d.Mode = dev.NUMANode, dev.Rail, string(dev.Mode)
	return d, nil
}

// OpenOwn opens a pod's own device. Its RDMA device may have got another name since the record was
// written.
func OpenOwn(d *Own, in Namespace) (rdma.Device, func() error, error) {
	all, err := verbs.Devices()
	if err != nil {
		return nil, nil, err
	}
	inPod := d.InPod()
	name := d.rdmaName(all, inPod)
	if name == "" {
		return nil, nil, fmt.Errorf("its RDMA device %s is not there (rdma link shows those of the host; one that is in the pod's namespace because of rdma system netns exclusive is not)", strings.Join(d.RDMA, " or "))
	}
	cfg := verbs.Config{Name: name, NetDev: d.NetDev}
	if inPod {
		if in == nil {
			return nil, nil, errors.New("its interface is in the pod, whose network namespace cannot be opened")
		}
		cfg.NetDev, cfg.Interfaces = d.IfName, in.Interfaces
	}
	dev, err := verbs.Open(cfg)
	if err != nil {
		return nil, nil, err
	}
	return dev, dev.Close, nil
}

// rdmaName finds the device's name among the RDMA devices of the host; "" if it is not there. The PCI address counts before the
// names of the record: after its driver was loaded again, another function may have such a name.
func (d *Own) rdmaName(all []verbs.Info, inPod bool) string {
	recorded := func(i verbs.Info) bool { return slices.Contains(d.RDMA, i.Name) }
	function := func(i verbs.Info) bool { return d.PCI != "" && i.PCI == d.PCI }
	software := func(i verbs.Info) bool { return i.PCI == "" }
	onNetDev := func(p verbs.PortInfo) bool { return d.NetDev != "" && !inPod && p.NetDev == d.NetDev }
	for _, is := range []func(i verbs.Info) bool{
		func(i verbs.Info) bool { return function(i) && recorded(i) },
		function,
		func(i verbs.Info) bool { return recorded(i) && (d.PCI == "" || software(i)) }, // of a VF without RDMA of its own, say
		func(i verbs.Info) bool { return software(i) && slices.ContainsFunc(i.Ports, onNetDev) },
	} {
		if n := slices.IndexFunc(all, is); n >= 0 {
			return all[n].Name
		}
	}
	return ""
}
