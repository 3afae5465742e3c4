// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// namespaceView is all that the statuses of a namespace's policies are computed from.
type namespaceView struct {
	name        string
	annotations map[string]string // of the namespace
	policies    []*policy
	pods        []corev1.Pod
	links       []v1alpha1.SMCRLink
	slices      []v1alpha1.SMCRPeerSlice
	agentGone   map[string]bool // nodes on which no agent answers
	oneRNIC     map[string]bool // nodes that have a single RDMA device
}

// sums are the counts for one policy.
type sums struct {
	pods    v1alpha1.PolicyPods
	reasons map[string]int32
	links   v1alpha1.LinkGroupCounts
	// notRedundant are the active link groups that have less redundancy than wanted and could
	// have more; oneRNIC those that cannot have more, because a node has one RNIC, and
	// oneRNICNodes are these nodes.
	notRedundant, oneRNIC int32
	oneRNICNodes          map[string]bool
	peers                 int32
	leftOut               int // addresses of peers that no slice has room for
	// resolved is the generation of the policy whose peer selectors the slices are for.
	resolved  int64
	agentless map[string]bool // nodes of opted-in pods whose agent does not answer
	conflicts []conflict
}

// aggregate returns the status of each policy of the view, by name. Conditions
// keep the time of their last change.
func aggregate(v *namespaceView, now metav1.Time) map[string]v1alpha1.SMCRPolicyStatus {
	all := make(map[*policy]*sums, len(v.policies))
	for _, p := range v.policies {
		all[p] = &sums{reasons: map[string]int32{}, agentless: map[string]bool{}, oneRNICNodes: map[string]bool{}}
	}
	slices.SortFunc(v.policies, func(a, b *policy) int { return v1alpha1.CompareRank(a.obj, b.obj) })
	ofPod, sets := v.countPods(all)
	for p, cs := range findConflicts(sets) {
		all[p].conflicts = cs
	}
	v.countLinks(all, ofPod)
	v.countPeers(all)
	out := make(map[string]v1alpha1.SMCRPolicyStatus, len(v.policies))
	for p, s := range all {
		out[p.obj.Name] = s.status(p, v.name, now)
	}
	return out
}

// countPods counts each pod for each policy that selects it. A pod in its node's network counts
// only if it is opted in. countPods returns the policies of each pod by the pod's name, and the
// different sets of policies that pods have.
func (v *namespaceView) countPods(all map[*policy]*sums) (ofPod map[string][]*policy, sets [][]*policy) {
	ofPod = map[string][]*policy{}
	seen := map[string]bool{}
	for i := range v.pods {
		pod := &v.pods[i]
		if !mayCarry(pod) {
			continue
		}
		var set []*policy
		key := make([]byte, 0, 2*len(v.policies))
		for n, p := range v.policies {
			if !p.selects(pod) {
				continue
			}
			set = append(set, p)
			key = append(key, byte(n>>8), byte(n))
		}
		if len(set) == 0 || pod.Spec.HostNetwork && !hostOptedIn(pod, set) {
			continue
		}
		enabled, _ := v1alpha1.OptIn(pod.Annotations, v.annotations)
		enabled = enabled || claimed(pod)
		for _, p := range set {
			all[p].countPod(pod, enabled, v.agentGone[pod.Spec.NodeName])
		}
		ofPod[pod.Name] = set
		if !seen[string(key)] {
			seen[string(key)] = true
			sets = append(sets, set)
		}
	}
	return ofPod, sets
}

// claimed says whether a pod is opted in by a ResourceClaim. Only the pod's agent knows whether
// the claim is for an RDMA device. The sign is the status that the agent writes: a pod without
// the annotation smcr.io/enabled has one only if its namespace, or a claim, opts it in. A
// status without a claim does not count: it may have been copied into a template, for example.
func claimed(pod *corev1.Pod) bool {
	_, says := pod.Annotations[v1alpha1.AnnotationEnabled]
	claims := len(pod.Spec.ResourceClaims) > 0 || pod.Status.ExtendedResourceClaimStatus != nil
	return !says && claims && pod.Annotations[v1alpha1.AnnotationStatus] != ""
}

func (s *sums) countPod(pod *corev1.Pod, enabled, agentGone bool) {
	s.pods.Matched++
	if !enabled {
		return
	}
	s.pods.OptedIn++
	if agentGone {
		s.agentless[pod.Spec.NodeName] = true
	}
	word, reason := podStatus(pod)
	switch {
	case word == v1alpha1.PodStatusEnabled && !agentGone:
		s.pods.Accelerated++
		if strings.HasPrefix(pod.Annotations[v1alpha1.AnnotationStatus], v1alpha1.PodStatusKernel) {
			s.pods.Kernel++
		}
	case word == v1alpha1.PodStatusFallback:
		s.pods.Fallback++
		s.reasons[reason]++
	case word == v1alpha1.PodStatusRefused:
		s.pods.Refused++
		s.reasons[reason]++
	default: // not attached, or no agent answers
		s.pods.Pending++
	}
}

// unknownReason stands for a reason that is missing, or that no agent can have written.
const unknownReason = "UNKNOWN"

// reasonCode is what the codes of agents look like: NO_OPTION, or 0x03050000 for a diagnosis of
// a peer that has no name.
var reasonCode = regexp.MustCompile(`^([A-Z][A-Z0-9_]{0,31}|0x[0-9a-f]{8})$`)

// podStatus reads the annotation that the pod's agent writes. All who may write to the pod may
// write the annotation, too. So podStatus returns only texts that an agent can have written, and
// only these get into statuses, messages and metrics: with a text of 40 KB, for example, the API
// server would refuse the whole status of the policy.
func podStatus(pod *corev1.Pod) (word, reason string) {
	word, reason, _ = strings.Cut(strings.TrimSuffix(pod.Annotations[v1alpha1.AnnotationStatus], v1alpha1.PodStatusOlder), ":")
	switch word {
	case v1alpha1.PodStatusEnabled:
		return word, ""
	case v1alpha1.PodStatusFallback, v1alpha1.PodStatusRefused:
		if reason = strings.TrimSpace(reason); !reasonCode.MatchString(reason) {
			reason = unknownReason
		}
		return word, reason
	}
	return v1alpha1.PodStatusPending, ""
}

// countLinks counts each link group for the policies of its pod. A link group that the
// pods of a namespace share is counted for the policy that its agent names.
func (v *namespaceView) countLinks(all map[*policy]*sums, ofPod map[string][]*policy) {
	byName := map[string]*policy{}
	for _, p := range v.policies {
		byName[p.obj.Name] = p
	}
	for i := range v.links {
		l := &v.links[i].Status
		pod, ok := strings.CutPrefix(l.Pod, v.name+"/")
		if !ok {
			continue
		}
		if pod != "*" {
			for _, p := range ofPod[pod] {
				all[p].countLink(l, p.obj.Spec.LinkRedundancy, v.oneRNIC)
			}
		} else if p := byName[strings.TrimPrefix(l.Policy, v.name+"/")]; p != nil {
			all[p].countLink(l, p.obj.Spec.LinkRedundancy, v.oneRNIC)
		}
	}
}

func (s *sums) countLink(l *v1alpha1.SMCRLinkStatus, wanted v1alpha1.LinkRedundancy, oneRNIC map[string]bool) {
	s.links.Total++
	switch l.State {
	case v1alpha1.LinkActive:
		s.links.Active++
		if wanted != v1alpha1.LinksSingle && l.Redundancy != v1alpha1.RedundancySymmetric {
			s.countNotRedundant(l, oneRNIC)
		}
	case v1alpha1.LinkEstablishing:
		s.links.Establishing++
	case v1alpha1.LinkDown:
		if !isEnding(l) {
			s.links.Down++
		}
	}
	switch l.Redundancy {
	case v1alpha1.RedundancySymmetric:
		s.links.Symmetric++
	case v1alpha1.RedundancyAsymmetric:
		s.links.Asymmetric++
	case v1alpha1.RedundancySingle:
		s.links.Single++
	case v1alpha1.RedundancyNone:
	}
}

// isEnding says whether a link group that is down ends in good order.
func isEnding(l *v1alpha1.SMCRLinkStatus) bool {
	c := meta.FindStatusCondition(l.Conditions, v1alpha1.ConditionReady)
	return c != nil && c.Reason == v1alpha1.ReasonEnding
}

// countNotRedundant counts an active link group with less redundancy than wanted. If it is on
// devices that the pod has for itself, it could have more, whatever the node has.
func (s *sums) countNotRedundant(l *v1alpha1.SMCRLinkStatus, oneRNIC map[string]bool) {
	possible := true
	for _, node := range []string{l.Node, l.Peer} {
		if oneRNIC[node] && l.PCIAddresses == "" {
			possible = false
			s.oneRNICNodes[node] = true
		}
	}
	if possible {
		s.notRedundant++
	} else {
		s.oneRNIC++
	}
}

func (v *namespaceView) countPeers(all map[*policy]*sums) {
	n := map[string]int32{}
	first := map[string]*v1alpha1.SMCRPeerSlice{}
	for i := range v.slices {
		slice := &v.slices[i]
		n[slice.Policy] += int32(len(slice.Addresses)) //nolint:gosec // at most MaxPeerAddresses
		if isFirst(slice) {
			first[slice.Policy] = slice
		}
	}
	for p, s := range all {
		s.peers = n[p.obj.Name]
		if slice := first[p.obj.Name]; len(p.peers) == 0 {
			s.resolved = p.obj.Generation
		} else if slice != nil && metav1.IsControlledBy(slice, p.obj) {
			s.resolved, s.leftOut = slice.PolicyGeneration, leftOut(slice)
		}
	}
}

// status turns the sums into the status of the policy.
func (s *sums) status(p *policy, namespace string, now metav1.Time) v1alpha1.SMCRPolicyStatus {
	st := v1alpha1.SMCRPolicyStatus{
		ObservedGeneration: p.obj.Generation,
		Pods:               s.pods,
		LinkGroups:         s.links,
		PeerAddresses:      s.peers,
		PeersGeneration:    &s.resolved,
		FallbackReasons:    topReasons(s.reasons),
		Conditions:         slices.Clone(p.obj.Status.Conditions),
	}
	for _, c := range []metav1.Condition{
		s.accepted(p), s.ready(p, namespace), s.linksRedundant(p), s.degraded(p), s.conflicting(p),
	} {
		c.ObservedGeneration = p.obj.Generation
		c.LastTransitionTime = now // SetStatusCondition keeps the old time if the status is the same
		meta.SetStatusCondition(&st.Conditions, c)
	}
	return st
}

// topReasons returns the most frequent reasons. Reasons of the same frequency are in the
// order of their names, so that the status does not change without need.
func topReasons(n map[string]int32) []v1alpha1.ReasonCount {
	var out []v1alpha1.ReasonCount
	for r, c := range n {
		out = append(out, v1alpha1.ReasonCount{Reason: r, Pods: c})
	}
	slices.SortFunc(out, func(a, b v1alpha1.ReasonCount) int {
		return cmp.Or(cmp.Compare(b.Pods, a.Pods), cmp.Compare(a.Reason, b.Reason))
	})
	return out[:min(len(out), maxReasons)]
}

// plural is "1 pod" or "2 pods".
func plural[N int | int32](n N, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// some lists the first few names, and says how many more there are.
func some(names map[string]bool) string {
	list := slices.Sorted(maps.Keys(names))
	if more := len(list) - maxNames; more > 0 {
		return strings.Join(list[:maxNames], ", ") + fmt.Sprintf(" and %d more", more)
	}
	return strings.Join(list, ", ")
}
