// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cni"
)

// attached reports whether a pod on this node has an address in a network. A record that its CNI DEL left is of no pod: its address
// may be that of a pod on another node by now.
func (a *agent) attached(network string, addr netip.Addr) bool {
	p, ok := a.find(func(att cni.Attachment) bool { return isOneNetwork(network, att.Network) && hasAddress(att, addr) })
	return ok && !p.pod.isGone()
}

// attachedTo is attached for a connection from one of the addresses of a pod.
func (a *agent) attachedTo(atts []cni.Attachment, sources []netip.Addr, addr netip.Addr) bool {
	return slices.ContainsFunc(sources, func(src netip.Addr) bool { return a.attached(networkOf(atts, src), addr) })
}

// networkOf is the network of the attachment that has an address; "" if none has it.
func networkOf(atts []cni.Attachment, addr netip.Addr) string {
	for _, att := range atts {
		if hasAddress(att, addr) {
			return att.Network
		}
	}
	return ""
}

// isOneNetwork tells whether an address in a CNI network can be the same one in the other: pods' networks beside the first one
// may have the same range, each by itself. Of "", which a pod in the node's network has, nothing is known.
func isOneNetwork(a, b string) bool { return a == b || a == "" || b == "" }

func hasAddress(att cni.Attachment, addr netip.Addr) bool {
	return slices.ContainsFunc(att.Addresses(), func(p netip.Prefix) bool { return p.Addr() == addr })
}

// sameNode are the addresses with which a pod of this node has no connections on SMC-R: those of the node
// and of its pods in the networks of the pod. Of those that are gone a record may be left, and a pod on another node may have
// the address, as may one in a network that the pod is not in.
func (k *kernelPath) sameNode(atts []cni.Attachment, now time.Time) ([]netip.Addr, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.local == nil || now.Sub(k.localTime) >= pollEvery {
		local, err := k.a.cfg.smc.addresses()
		if err != nil {
			return nil, fmt.Errorf("addresses of the node: %w", err)
		}
		k.local, k.localTime = local, now
	}
	out := slices.Clone(k.local)
	for _, p := range k.a.manager.snapshot() {
		if p.isGone() {
			continue
		}
		for _, other := range p.atts {
			if !slices.ContainsFunc(atts, func(att cni.Attachment) bool { return isOneNetwork(att.Network, other.Network) }) {
				continue
			}
			for _, ip := range other.Addresses() {
				out = append(out, ip.Addr())
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// isSameNode tells whether an address is one of the node or of its pods, for a pod with these attachments.
func (a *agent) isSameNode(atts []cni.Attachment, addr netip.Addr) bool {
	all, err := a.kernelPath.sameNode(atts, time.Now())
	return err == nil && slices.Contains(all, addr)
}
