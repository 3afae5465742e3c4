// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// peerView is all that the peers of a policy are computed from. pods and services return
// those of one namespace.
type peerView struct {
	namespaces []corev1.Namespace
	pods       func(namespace string) ([]corev1.Pod, error)
	services   func(namespace string) ([]corev1.Service, error)
}

// resolvePeers returns the addresses that the peer selectors of p select, sorted: those of
// the pods that they select, and the cluster addresses of the Services all of whose pods
// they select. Pods that terminate count until they have ended: they have connections, and may
// make new ones.
func resolvePeers(p *policy, v peerView) ([]netip.Addr, error) {
	found := map[netip.Addr]bool{}
	for i := range v.namespaces {
		ns := &v.namespaces[i]
		var selectors []labels.Selector
		for _, s := range p.peers {
			if s.inNamespace(p.obj.Namespace, ns.Name, ns.Labels) {
				selectors = append(selectors, s.pods)
			}
		}
		if len(selectors) == 0 {
			continue
		}
		pods, err := v.pods(ns.Name)
		if err != nil {
			return nil, err
		}
		selected := selectPods(pods, selectors)
		if len(selected) == 0 {
			continue
		}
		for _, i := range selected {
			for _, ip := range pods[i].Status.PodIPs {
				addAddr(found, ip.IP)
			}
		}
		services, err := v.services(ns.Name)
		if err != nil {
			return nil, err
		}
		for i := range services {
			if onlySelected(&services[i], pods, selected) {
				for _, ip := range services[i].Spec.ClusterIPs {
					addAddr(found, ip)
				}
			}
		}
	}
	out := make([]netip.Addr, 0, len(found))
	for a := range found {
		out = append(out, a)
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out, nil
}

// selectPods returns the indices of the pods that one of the selectors selects.
func selectPods(pods []corev1.Pod, selectors []labels.Selector) []int {
	var out []int
	for i := range pods {
		if !canBePeer(&pods[i]) {
			continue
		}
		for _, s := range selectors {
			if s.Matches(labels.Set(pods[i].Labels)) {
				out = append(out, i)
				break
			}
		}
	}
	return out
}

// onlySelected says whether the Service has pods, and all of these pods are selected. If a
// Service also had other pods, its address would select those too.
func onlySelected(svc *corev1.Service, pods []corev1.Pod, selected []int) bool {
	if len(svc.Spec.Selector) == 0 || len(svc.Spec.ClusterIPs) == 0 || svc.Spec.ClusterIPs[0] == corev1.ClusterIPNone {
		return false
	}
	sel := labels.SelectorFromValidatedSet(svc.Spec.Selector)
	some := false
	next := 0 // index into selected, which has the order of pods
	for i := range pods {
		isSelected := next < len(selected) && selected[next] == i
		if isSelected {
			next++
		}
		if !hasAddresses(&pods[i]) || !sel.Matches(labels.Set(pods[i].Labels)) {
			continue
		}
		if !isSelected {
			return false
		}
		some = true
	}
	return some
}

func addAddr(set map[netip.Addr]bool, text string) {
	if a, err := netip.ParseAddr(text); err == nil {
		set[a.Unmap()] = true
	}
}

// A placement is what to write and delete so that the slices of a policy have exactly the
// wanted addresses.
type placement struct {
	create, update, remove []*v1alpha1.SMCRPeerSlice
	truncated              int // addresses that no slice has room for; the first slice says so, see annotationLeftOut
}

// annotationLeftOut on the first slice of a policy is how many of its peers' addresses no slice
// has room for. The reconciler of statuses reads it there.
const annotationLeftOut = v1alpha1.Group + "/addresses-left-out"

func leftOut(s *v1alpha1.SMCRPeerSlice) int {
	n, err := strconv.Atoi(s.Annotations[annotationLeftOut])
	if err != nil {
		return 0
	}
	return n
}

// placeAddresses spreads the addresses over slices so that few slices change. An address
// stays in its slice. A new address goes into a slice that loses an address and so is written
// anyway, else into a slice with room, else into a new slice. Slices that are half empty are merged.
// The first slice is there without addresses, too: see [v1alpha1.FirstPeerSlice].
func placeAddresses(p *v1alpha1.SMCRPolicy, have []v1alpha1.SMCRPeerSlice, want []netip.Addr) placement {
	var out placement
	if n := len(want); n > maxPeerAddresses {
		out.truncated = n - maxPeerAddresses
		want = want[:maxPeerAddresses]
	}
	missing := make(map[string]bool, len(want))
	for _, a := range want {
		missing[a.String()] = true
	}
	bins := sortedBins(p, have, out.truncated)
	for _, b := range bins {
		kept := b.addrs[:0:0]
		for _, a := range b.addrs {
			if missing[a] {
				delete(missing, a) // if a later slice has a, too, that slice loses it
				kept = append(kept, a)
			}
		}
		b.changed = b.changed || len(kept) != len(b.addrs)
		b.addrs = kept
	}
	emptySmallBins(bins, missing)
	var rest []string
	for _, a := range want {
		if missing[a.String()] {
			rest = append(rest, a.String())
		}
	}
	fill := func(only func(*bin) bool) {
		for _, b := range bins {
			if n := min(len(rest), v1alpha1.MaxPeerAddresses-len(b.addrs)); n > 0 && only(b) {
				b.addrs, rest, b.changed = append(b.addrs, rest[:n]...), rest[n:], true
			}
		}
	}
	fill(func(b *bin) bool { return b.changed && len(b.addrs) > 0 })
	fill(func(b *bin) bool { return !b.emptied })
	for number := 0; number == 0 || len(rest) > 0; number++ {
		if slices.ContainsFunc(bins, func(b *bin) bool { return b.number == number }) {
			continue
		}
		b := &bin{number: number, changed: true}
		bins = append(bins, b)
		n := min(len(rest), v1alpha1.MaxPeerAddresses)
		b.addrs, rest = append(b.addrs, rest[:n]...), rest[n:]
	}
	for _, b := range bins {
		b.done(p, &out)
	}
	return out
}

// bin is a slice that is being filled.
type bin struct {
	number  int
	old     *v1alpha1.SMCRPeerSlice // nil for a new one
	addrs   []string
	changed bool
	emptied bool
}

// sortedBins are the slices that exist, as bins. A slice counts as changed, so that it is written
// again, if something other than its addresses is not as wanted: for example, if its owner is a
// former policy of the same name, the garbage collector would delete it.
func sortedBins(p *v1alpha1.SMCRPolicy, have []v1alpha1.SMCRPeerSlice, truncated int) []*bin {
	var bins []*bin
	for i := range have {
		s := &have[i]
		number := sliceNumber(p.Name, s.Name)
		bins = append(bins, &bin{
			number: number, old: s, addrs: s.Addresses,
			changed: number == 0 && leftOut(s) != truncated || s.PolicyGeneration != p.Generation || s.Policy != p.Name || s.Labels[v1alpha1.LabelPolicy] != p.Name || !metav1.IsControlledBy(s, p),
		})
	}
	slices.SortFunc(bins, func(a, b *bin) int {
		return cmp.Or(cmp.Compare(a.number, b.number), strings.Compare(a.old.Name, b.old.Name))
	})
	return bins
}

// emptySmallBins empties the smallest slices as soon as half as many slices would be
// enough. It puts their addresses into missing, so that they go into other slices.
func emptySmallBins(bins []*bin, missing map[string]bool) {
	total, used := len(missing), 0
	for _, b := range bins {
		total += len(b.addrs)
		if len(b.addrs) > 0 {
			used++
		}
	}
	need := (total + v1alpha1.MaxPeerAddresses - 1) / v1alpha1.MaxPeerAddresses
	if used <= 2*need {
		return
	}
	small := slices.Clone(bins)
	slices.SortStableFunc(small, func(a, b *bin) int { return cmp.Compare(len(a.addrs), len(b.addrs)) })
	for _, b := range small {
		if used <= need {
			return
		}
		if len(b.addrs) == 0 || b.number == 0 { // the first slice stays in any case
			continue
		}
		for _, a := range b.addrs {
			missing[a] = true
		}
		b.addrs, b.changed, b.emptied = nil, true, true
		used--
	}
}

// done adds the slice to the placement, if it is to be made, written or deleted.
func (b *bin) done(p *v1alpha1.SMCRPolicy, out *placement) {
	switch {
	case b.old == nil:
		out.create = append(out.create, newSlice(p, b.number, b.addrs, out.truncated))
	case len(b.addrs) == 0 && b.number != 0:
		out.remove = append(out.remove, b.old)
	case b.changed:
		s := newSlice(p, b.number, b.addrs, out.truncated)
		s.Name, s.UID, s.ResourceVersion = b.old.Name, b.old.UID, b.old.ResourceVersion
		out.update = append(out.update, s)
	}
}

func newSlice(p *v1alpha1.SMCRPolicy, number int, addrs []string, truncated int) *v1alpha1.SMCRPeerSlice {
	s := &v1alpha1.SMCRPeerSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name + "-" + strconv.Itoa(number),
			Labels: map[string]string{v1alpha1.LabelPolicy: p.Name},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: v1alpha1.GroupVersion().String(), Kind: "SMCRPolicy", Name: p.Name, UID: p.UID, Controller: new(true),
			}},
		},
		Policy: p.Name, PolicyGeneration: p.Generation, Addresses: addrs,
	}
	if number == 0 && truncated > 0 {
		s.Annotations = map[string]string{annotationLeftOut: strconv.Itoa(truncated)}
	}
	return s
}

// isSliceOf tells whether a slice in a policy's namespace is the policy's: it has the policy's
// label, or, if somebody took that off, a name that only slices of this policy have. The latter
// has to be repaired, as the controller cannot make another slice of the same name.
func isSliceOf(policy string, s *v1alpha1.SMCRPeerSlice) bool {
	return s.Labels[v1alpha1.LabelPolicy] == policy || sliceNumber(policy, s.Name) < maxPeerSlices
}

// sliceNumber is the number in the name of a slice. For a slice that the controller did not name,
// it is greater than all others.
func sliceNumber(policy, name string) int {
	text, ok := strings.CutPrefix(name, policy+"-")
	if n, err := strconv.Atoi(text); ok && err == nil && n >= 0 && strconv.Itoa(n) == text {
		return n
	}
	return maxPeerSlices
}
