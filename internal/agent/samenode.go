// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cni"
)

// attached reports whether an address is that of a pod on this node, for connections from the addresses of attachments. A record that
// its CNI DEL left is of no pod: its address may be that of a pod on another node by now.
func (a *agent) attached(from []cni.Attachment, addr netip.Addr) bool {
	p, ok := a.find(func(att cni.Attachment) bool { return hasAddress(att, addr) && isReached(from, att, addr) })
	return ok && !p.pod.isGone()
}

// attachedTo is attached for a connection from one of the addresses of a pod.
func (a *agent) attachedTo(atts []cni.Attachment, sources []netip.Addr, addr netip.Addr) bool {
	return slices.ContainsFunc(sources, func(src netip.Addr) bool { return a.attached(having(atts, src), addr) })
}

// having are the attachments that have an address.
func having(atts []cni.Attachment, addr netip.Addr) (out []cni.Attachment) {
	for _, att := range atts {
		if hasAddress(att, addr) {
			out = append(out, att)
		}
	}
	return out
}

// isReached tells whether connections from the addresses of attachments to an address reach the attachment that has it on this node.
// They do in one network, and also in another one by a route. But pods' networks beside the first one may
// have the same range, each by itself: an address in a subnet of ours is our subnet's, and not the other network's.
// Of no attachment, as of a pod in the node's network, nothing is known.
func isReached(from []cni.Attachment, other cni.Attachment, addr netip.Addr) bool {
	return slices.ContainsFunc(from, func(att cni.Attachment) bool { return att.Network == other.Network }) ||
		!slices.ContainsFunc(from, func(att cni.Attachment) bool { return isOnLink(att, addr) })
}

func isOnLink(att cni.Attachment, addr netip.Addr) bool {
	return slices.ContainsFunc(att.Addresses(), func(p netip.Prefix) bool { return !p.IsSingleIP() && p.Contains(addr) })
}

func hasAddress(att cni.Attachment, addr netip.Addr) bool {
	return slices.ContainsFunc(att.Addresses(), func(p netip.Prefix) bool { return p.Addr() == addr })
}

// sameNode are the addresses with which a pod of this node has no connections on SMC-R: those of the node
// and of its pods, as far as the pod's connections reach these. Of those that are gone a record may be left, and a pod on another node
// may have the address.
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
			for _, ip := range other.Addresses() {
				if isReached(atts, other, ip.Addr()) {
					out = append(out, ip.Addr())
				}
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
