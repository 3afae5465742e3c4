// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// Reasons of the conditions of an SMCRLink.
const (
	reasonLinkActive   = "Active"
	reasonEstablishing = "Establishing"
	reasonLost         = "Lost"
	reasonNoLink       = "NoActiveLink"
	reasonSymmetric    = "Symmetric"
	reasonAsymmetric   = "Asymmetric"
	reasonSingle       = "Single"
)

// States of a link group and a link in the agent's words.
const (
	groupForming  = "FORMING"
	groupActive   = "ACTIVE"
	groupDraining = "DRAINING"
)

// linkStatus is the status of the SMCRLink of a link group; its conditions have
// no times yet. nodes are the nodes of the cluster by the addresses of their
// devices.
func linkStatus(node string, g *agentapi.LinkGroup, policy string, nodes map[netip.Addr]string) v1alpha1.SMCRLinkStatus {
	namespace, _, _ := strings.Cut(g.Pod, "/")
	out := v1alpha1.SMCRLinkStatus{
		Node: node, Namespace: namespace, Pod: g.Pod, Datapath: cmp.Or(g.Datapath, string(v1alpha1.DatapathAgent)), Policy: policy, Role: titled(g.Role),
		Connections: clamp(g.Conns), RMBBytes: int64(g.RMBBytes), Version: int32(g.Version), EID: g.EID,
		OpenedAt: metav1.Time{Time: g.Opened.Truncate(secondOfAPI)}, LastError: clip(g.Error, maxLastError),
	}
	var devices, pcis, gids, qpns []string
	active := 0
	for _, l := range linksOf(g) {
		s := v1alpha1.LinkStatus{
			ID: int32(l.ID), State: linkState(l.State), Device: l.Device, PCI: l.PCI, LocalGID: address(l.LocalGID), PeerGID: address(l.PeerGID),
			LocalQPN: int64(l.LocalQPN), PeerQPN: int64(l.PeerQPN), MTUBytes: clamp(l.MTU),
		}
		out.Links = append(out.Links, s)
		if s.State == v1alpha1.LinkActive {
			active++
		}
		if !slices.Contains(devices, l.Device) {
			devices = append(devices, l.Device)
		}
		if l.PCI != "" && !slices.Contains(pcis, l.PCI) {
			pcis = append(pcis, l.PCI)
		}
		gids = append(gids, s.LocalGID+"-"+s.PeerGID)
		if l.LocalQPN != 0 { // the kernel does not tell its own
			qpns = append(qpns, fmt.Sprintf("%d-%d", l.LocalQPN, l.PeerQPN))
		}
		if out.MTUBytes == 0 || s.MTUBytes < out.MTUBytes {
			out.MTUBytes = s.MTUBytes
		}
	}
	slices.Sort(devices)
	slices.Sort(pcis)
	out.PCIAddresses = strings.Join(pcis, ",")
	out.Devices, out.GIDs, out.QPNs = strings.Join(devices, ","), strings.Join(gids, ","), strings.Join(qpns, ",")
	out.Peer, out.PeerClaimedName = cmp.Or(peerNode(out.Links, nodes), peerAddress(out.Links), g.PeerID), g.PeerClaimedName
	out.State, out.Redundancy = groupState(g, active), redundancyOf(g.Redundancy, active)
	out.Conditions = []metav1.Condition{linkReady(g, &out), linkRedundant(&out)}
	return out
}

// keepLinks gives a link group that was lost, and has no links any more, those that it had before: they say which path broke.
func keepLinks(is, was *v1alpha1.SMCRLinkStatus) {
	for _, l := range was.Links {
		l.State = v1alpha1.LinkDown
		is.Links = append(is.Links, l)
	}
	is.Peer, is.Devices, is.PCIAddresses, is.GIDs, is.QPNs, is.MTUBytes = was.Peer, was.Devices, was.PCIAddresses, was.GIDs, was.QPNs, was.MTUBytes
}

// peerNode is the node that has the peer's device of every link of a group, or "". The
// addresses decide, which the peer answers at, and not the name that the peer gives itself.
func peerNode(links []v1alpha1.LinkStatus, nodes map[netip.Addr]string) string {
	var node string
	for _, l := range links {
		a, err := netip.ParseAddr(l.PeerGID)
		if err != nil || nodes[a] == "" || node != "" && nodes[a] != node {
			return ""
		}
		node = nodes[a]
	}
	return node
}

// peerAddress is where the first link of a group ends.
func peerAddress(links []v1alpha1.LinkStatus) string {
	if len(links) == 0 {
		return ""
	}
	return links[0].PeerGID
}

// linksOf are the links of a group, one for each link number. A link that is being made
// has no number of its own yet, and gives way to the link that has the number.
func linksOf(g *agentapi.LinkGroup) []agentapi.Link {
	links := slices.Clone(g.Links)
	slices.SortStableFunc(links, func(a, b agentapi.Link) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(rankOf(a.State), rankOf(b.State)))
	})
	links = slices.CompactFunc(links, func(a, b agentapi.Link) bool { return a.ID == b.ID })
	return links[:min(len(links), maxLinks)]
}

// rankOf is less for links that matter more.
func rankOf(state string) int {
	switch linkState(state) {
	case v1alpha1.LinkActive:
		return 0
	case v1alpha1.LinkEstablishing:
		return 1
	case v1alpha1.LinkDown:
	}
	return 2
}

// linkState is the state of a link. A draining link still works: its connections move
// to another link.
func linkState(state string) v1alpha1.LinkState {
	switch state {
	case groupActive, groupDraining:
		return v1alpha1.LinkActive
	case groupForming:
		return v1alpha1.LinkEstablishing
	}
	return v1alpha1.LinkDown
}

// groupState is the state of a link group.
func groupState(g *agentapi.LinkGroup, active int) v1alpha1.LinkState {
	switch {
	case g.State == groupForming:
		return v1alpha1.LinkEstablishing
	case g.State == groupActive && active > 0:
		return v1alpha1.LinkActive
	}
	return v1alpha1.LinkDown
}

func redundancyOf(r string, active int) v1alpha1.Redundancy {
	switch {
	case active == 0:
		return v1alpha1.RedundancyNone
	case r == "SYMMETRIC":
		return v1alpha1.RedundancySymmetric
	case strings.HasPrefix(r, "ASYMMETRIC"):
		return v1alpha1.RedundancyAsymmetric
	}
	return v1alpha1.RedundancySingle
}

func linkReady(g *agentapi.LinkGroup, s *v1alpha1.SMCRLinkStatus) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionReady, status, reason, message)
	}
	switch {
	case s.State == v1alpha1.LinkActive:
		return is(metav1.ConditionTrue, reasonLinkActive, "the link group carries connections, or can")
	case s.State == v1alpha1.LinkEstablishing:
		return is(metav1.ConditionFalse, reasonEstablishing, "the two sides are making the first link")
	case g.Error == "" && g.State == groupDraining:
		return is(metav1.ConditionFalse, v1alpha1.ReasonEnding, "the link group ends in good order; new connections make another one")
	case g.Error == "":
		return is(metav1.ConditionFalse, reasonNoLink, "no link of the group is active: check the RDMA devices of both nodes and UDP port 4791 between them")
	}
	return is(metav1.ConditionFalse, reasonLost, "the link group is lost: "+g.Error)
}

func linkRedundant(s *v1alpha1.SMCRLinkStatus) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionRedundant, status, reason, message)
	}
	switch s.Redundancy {
	case v1alpha1.RedundancySymmetric:
		return is(metav1.ConditionTrue, reasonSymmetric, "the connections survive the loss of any one RNIC")
	case v1alpha1.RedundancyAsymmetric:
		return is(metav1.ConditionFalse, reasonAsymmetric, "one side has a single RNIC: its loss ends the connections")
	case v1alpha1.RedundancySingle:
		return is(metav1.ConditionFalse, reasonSingle, "there is one link: the loss of an RNIC ends the connections; two devices on both nodes make two links")
	case v1alpha1.RedundancyNone:
	}
	return is(metav1.ConditionFalse, reasonNoLink, "no link of the group is active")
}

// linkName is the name of the SMCRLink of a link group: the node's label and a
// hash. The name stays the same as long as the group lives, also when the agent starts
// again. The chart's admission policy checks this form.
func linkName(label string, g *agentapi.LinkGroup) string {
	h := sha256.New()
	// The fields have no line breaks.
	_, _ = fmt.Fprintf(h, "%s\n%s\n%d\n%d\n", g.Pod, g.PeerID, g.ID, g.Opened.UnixNano()) // never fails
	return label + "-" + hex.EncodeToString(h.Sum(nil)[:4])
}

// podLabel is the name of an agent's pod as a label. If the name is too long for a
// label, its end is replaced by a hash.
func podLabel(pod string) string {
	if len(pod) <= maxLabelValue {
		return pod
	}
	sum := sha256.Sum256([]byte(pod))
	tail := hex.EncodeToString(sum[:4])
	return strings.TrimRight(pod[:maxLabelValue-1-len(tail)], ".-") + "-" + tail
}

// policiesOf is the policy that governs each pod, by NAMESPACE/NAME.
func policiesOf(vs []config.Verdict) map[string]string {
	out := make(map[string]string, len(vs))
	for _, v := range vs {
		if len(v.Policies) > 0 && v.Policies[0] != config.DefaultPolicy {
			out[v.Namespace+"/"+v.Name] = v.Policies[0]
			if v.Settings.Shared {
				out[v.Namespace+"/*"] = v.Policies[0]
			}
		}
	}
	return out
}

// address shows an IPv4 GID as IPv4.
func address(gid string) string {
	if a, err := netip.ParseAddr(gid); err == nil {
		return a.Unmap().String()
	}
	return gid
}

// titled is "client" as Client.
func titled(s string) string {
	if s == "" {
		return ""
	}
	return strings.ToUpper(s[:1]) + s[1:]
}
