// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"reflect"
	"strings"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// Assigned knows which devices kubelet gave to a pod. Their IDs are the PCI address of a VF, the
// name of the network interface of another RDMA device, or the name of one of the agent's software
// devices. Devices is called for every attached pod once a second, so it answers from memory.
type Assigned interface {
	Devices(pod config.PodName) []string
}

// ownDevices are a pod's own devices: those of its attachment records or, if these have none, those
// that kubelet gave it.
func (a *agent) ownDevices(atts []cni.Attachment) []rnics.Own {
	id := podOf(atts[0])
	pod := id.String()
	out := a.recordedDevices(atts)
	if len(out) == 0 && a.cfg.Assigned != nil && id.Namespace != "" {
		for _, dev := range a.cfg.Assigned.Devices(config.PodName{Namespace: id.Namespace, Name: id.Name}) {
			out = append(out, rnics.Own{Pod: pod, ID: dev, VF: -1, NUMA: -1, Rail: -1, LookUp: true})
		}
	}
	return a.rnics.Arrange(out)
}

// recordedDevices are those of a pod's attachment records. One that has no RDMA device is only a network interface, and left out.
func (a *agent) recordedDevices(atts []cni.Attachment) (out []rnics.Own) {
	for _, att := range atts {
		for _, d := range att.Devices {
			dev, _, _ := strings.Cut(d.ID, "/") // NAME/SLOT is one slot of a device that pods share
			if len(d.RDMA) == 0 && !a.rnics.IsNode(dev) {
				continue
			}
			out = append(out, rnics.Own{
				Pod: podOf(atts[0]).String(), ID: dev, PCI: d.PCI, RDMA: d.RDMA, NetDev: d.NetDev, IfName: cmp.Or(d.IfName, att.IfName), PF: d.PF, VF: d.VF,
				NUMA: d.NUMANode, Rail: d.Rail, Mode: d.Mode,
			})
		}
	}
	return out
}

// updateDevices opens the own devices of a pod that is selected, and closes those that it no longer
// has. If the pod changes between its own devices and the node's, its proxy is stopped, to start
// again with a new stack.
func (m *manager) updateDevices(ctx context.Context, p *pod) {
	want := m.a.ownDevices(p.atts)
	// The programs of a pod that is not selected may use its devices, and no driver should have to
	// wait for the agent to close them.
	if p.proxy == nil && !m.a.diverts(p.atts, rnics.Hardware(want), true) {
		want = nil
	}
	if own := len(want) > 0; own != p.set.Own() {
		if p.proxy != nil {
			p.proxy.log.Info("the pod's devices changed; its link groups begin anew", "own", own)
		}
		m.stopForRestart(p, m.a.changeCode(podOf(p.atts[0])))
	}
	switch {
	case len(want) == 0:
	case !p.set.Own():
		net, err := m.a.cfg.kernel.open(p.atts[0].NetNS)
		if err != nil {
			m.a.cfg.Log.Warn("namespace of a pod with devices not opened", "pod", podOf(p.atts[0]).String(), "err", err)
			p.set = m.a.rnics.NewSet(nil)
		} else {
			p.set = m.a.rnics.NewSet(deviceNet{net})
		}
		p.set.Update(ctx, nil, want)
	case !reflect.DeepEqual(p.set.Want(), want):
		var user rnics.User
		if p.proxy != nil {
			user = p.proxy.stack
		}
		p.set.Update(ctx, user, want)
	}
}

// releaseDevices gives back the own devices of a pod that has no proxy.
func (m *manager) releaseDevices(p *pod) {
	if err := p.set.Release(); err != nil {
		m.a.cfg.Log.Warn("device of a pod not closed in order", "pod", podOf(p.atts[0]).String(), "err", err)
	}
	p.set = m.a.rnics.Node()
}

// deviceNet makes a pod's namespace an rnics.Namespace.
type deviceNet struct{ podNet }

func (n deviceNet) Interfaces(indexes []int) (map[int]verbs.Interface, error) {
	return n.netInterfaces(indexes)
}
func (n deviceNet) Route(src, dst netip.Addr) (clc.Route, error) { return n.route(src, dst) }
func (n deviceNet) Close() error                                 { return n.close() }

// route asks how the address of one of the stack's devices reaches a peer's.
func (px *proxy) route(src, dst netip.Addr) (clc.Route, error) {
	if in := px.set.Inside(src); in != nil {
		return in.Route(src, dst)
	}
	return px.agent.cfg.route(src, dst)
}

// mismatch is what keeps the pod off SMC-R on this node, if anything does.
func (px *proxy) mismatch() config.Mismatch { return mismatchOf(px.settings, px.set.Hardware()) }

// mismatchOf is the mismatch of a pod with hardware of its own, or without.
func mismatchOf(s config.Settings, own bool) config.Mismatch {
	if own {
		return s.MismatchOwn
	}
	return s.Mismatch
}

// addNewDevices gives a pod's stack the devices that were opened while it ran.
func (m *manager) addNewDevices(p *pod) {
	open, count := p.set.Usable()
	if count == p.openCount {
		return
	}
	if err := addDevices(p.proxy.stack, open); err != nil {
		if text := err.Error(); text != p.addErr { // the same error comes back every second
			p.addErr = text
			p.proxy.log.Warn("RDMA device not used by the pod yet", "err", err)
		}
		return
	}
	p.openCount, p.addErr = count, ""
	// Some destinations may be in the negative cache because there was no device.
	if err := p.proxy.forgetDestinations(); err != nil {
		p.proxy.log.Debug("negative cache not emptied; its entries end by themselves", "err", err)
	}
}

func addDevices(s stack, open []rdma.Device) error {
	var errs []error
	for _, d := range open {
		errs = append(errs, s.AddDevice(d))
	}
	return errors.Join(errs...)
}
