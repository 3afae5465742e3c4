// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/linux"
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

// expected are the records of a round. The jobs of pods that come in one round know of each other by these, before the manager does.
type expected struct {
	m    *manager
	pods map[string][]cni.Attachment // as the manager's
	once sync.Once                   // for present
}

// present are the records but for those of pods that the manager does not know yet, and whose namespace is gone.
func (e *expected) present() map[string][]cni.Attachment {
	e.once.Do(func() {
		have := e.m.snapshot()
		for key, atts := range e.pods {
			if have[key] != nil || isHostPod(atts) {
				continue
			}
			n, err := e.m.openNet(atts[0])
			switch {
			case errors.Is(err, linux.ErrGone):
				delete(e.pods, key)
			case err == nil:
				_ = n.close() // it was only looked at
			}
		}
	})
	return e.pods
}

// othersOnNode are the attachments of the node's pods: of those that the manager knows, and of those that come. Of those that are gone
// a record may be left.
func (k *kernelPath) othersOnNode() (out []cni.Attachment) {
	var coming map[string][]cni.Attachment
	if e := k.expected.Load(); e != nil {
		coming = e.present()
	}
	have := k.a.manager.snapshot() // after it, as that may have been asked for earlier
	for key, p := range have {
		if !p.isGone() {
			out = append(append(out, p.atts...), coming[key]...)
		}
	}
	for key, atts := range coming {
		if have[key] == nil {
			out = append(out, atts...)
		}
	}
	return out
}

// sameNode are the addresses with which a pod of this node has no connections on SMC-R: those of the node
// and of its pods, as far as the pod's connections reach these. A pod on another node may have the address of one that is gone.
func (k *kernelPath) sameNode(atts []cni.Attachment, now time.Time) ([]netip.Addr, error) {
	others := k.othersOnNode()
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
	for _, other := range others {
		for _, ip := range other.Addresses() {
			if isReached(atts, other, ip.Addr()) {
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
