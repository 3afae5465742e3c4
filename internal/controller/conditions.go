// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// Reasons of the conditions of an SMCRPolicy.
const (
	reasonValid       = "Valid"
	reasonInvalid     = "Invalid"
	reasonNotAccepted = "NotAccepted" // of the other conditions of an invalid policy

	reasonAllAccelerated = "AllAccelerated"
	reasonNoPods         = "NoPods"
	reasonNotOptedIn     = "NotOptedIn"
	reasonPeersPending   = "PeersPending"
	reasonTooManyPeers   = "TooManyPeers" // of an event, too
	reasonPodsPending    = "PodsPending"
	reasonPodsFallback   = "PodsFallback"
	reasonPodsRefused    = "PodsRefused"

	reasonNoLinkGroups  = "NoLinkGroups"
	reasonAsWanted      = "AsWanted"
	reasonNotRedundant  = "NotRedundant"
	reasonOneRNIC       = "OneRNIC"
	reasonAgentsMissing = "AgentsMissing"
	reasonLinksDown     = "LinksDown"
	reasonHealthy       = "Healthy"

	reasonOtherPolicy = "OtherPolicy"
	reasonNoConflict  = "NoConflict"
)

// condition makes a condition whose message is not longer than the API server accepts.
func condition(kind string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage], "")
	}
	return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message}
}

func (s *sums) accepted(p *policy) metav1.Condition {
	if p.err != nil {
		return condition(v1alpha1.ConditionAccepted, metav1.ConditionFalse, reasonInvalid,
			strings.ReplaceAll(p.err.Error(), "\n", "; ")+"; the policy selects nothing until this is corrected")
	}
	return condition(v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonValid, "the policy is valid")
}

func (s *sums) ready(p *policy, namespace string) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, format string, args ...any) metav1.Condition {
		return condition(v1alpha1.ConditionReady, status, reason, fmt.Sprintf(format, args...))
	}
	n := s.pods
	switch {
	case p.err != nil:
		return is(metav1.ConditionFalse, reasonNotAccepted, "the policy is not valid, see the condition Accepted")
	case n.Matched == 0:
		return is(metav1.ConditionFalse, reasonNoPods, "podSelector selects no running pod of namespace %s (pods in the host's network count if their own annotation and datapath Kernel opt them in)", namespace)
	case n.OptedIn == 0:
		return is(metav1.ConditionFalse, reasonNotOptedIn,
			"%s selected, none of them opted in: annotate the pods or namespace %s with %s=true", plural(n.Matched, "pod"), namespace, v1alpha1.AnnotationEnabled)
	case s.resolved != p.obj.Generation:
		return is(metav1.ConditionFalse, reasonPeersPending,
			"peers.selectors are not resolved to addresses yet: until then the former form of the policy is in force; "+
				"of a new policy nothing on nodes where a pod that it selects ran before, and all but these peers on others")
	case s.leftOut > 0: // before the reasons that Degraded has, too
		return is(metav1.ConditionFalse, reasonTooManyPeers, "%s", tooManyPeers(s.leftOut))
	case n.Refused > 0 && n.Fallback > 0:
		return is(metav1.ConditionFalse, reasonPodsRefused, "the connections of %d of %s are refused, because a policy requires SMC-R, and those of %d are plain TCP: %s",
			n.Refused, plural(n.OptedIn, "opted-in pod"), n.Fallback, listReasons(s.reasons))
	case n.Refused > 0:
		return is(metav1.ConditionFalse, reasonPodsRefused, "the connections of %d of %s are refused, because a policy requires SMC-R: %s",
			n.Refused, plural(n.OptedIn, "opted-in pod"), listReasons(s.reasons))
	case n.Fallback > 0:
		return is(metav1.ConditionFalse, reasonPodsFallback, "%d of %s on plain TCP: %s", n.Fallback, plural(n.OptedIn, "opted-in pod"), listReasons(s.reasons))
	case n.Pending > 0:
		return is(metav1.ConditionFalse, reasonPodsPending, "%d of %s not attached yet, or without an agent that answers", n.Pending, plural(n.OptedIn, "opted-in pod"))
	}
	return is(metav1.ConditionTrue, reasonAllAccelerated, "%s may use SMC-R", plural(n.Accelerated, "opted-in pod"))
}

// tooManyPeers says what it means that no slice has room for some of the addresses of a policy's peers.
func tooManyPeers(leftOut int) string {
	return fmt.Sprintf("spec.peers.selectors stand for %d addresses more than the %d that a policy can have; for connections with these it does not hold, whatever its mode: "+
		"narrow the selectors, or name the pods' networks in spec.peers.cidrs", leftOut, maxPeerAddresses)
}

func listReasons(n map[string]int32) string {
	var parts []string
	for _, r := range topReasons(n) {
		parts = append(parts, fmt.Sprintf("%s (%d)", r.Reason, r.Pods))
	}
	return strings.Join(parts[:min(len(parts), maxNames)], ", ")
}

func (s *sums) linksRedundant(p *policy) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionLinksRedundant, status, reason, message)
	}
	switch {
	case p.err != nil:
		return is(metav1.ConditionUnknown, reasonNotAccepted, "the policy is not valid, see the condition Accepted")
	case s.links.Active == 0:
		return is(metav1.ConditionUnknown, reasonNoLinkGroups, "no link group of the selected pods is active")
	case s.notRedundant > 0:
		return is(metav1.ConditionFalse, reasonNotRedundant, fmt.Sprintf(
			"%d of %s cannot lose any one RNIC, linkRedundancy wants that: see REDUNDANCY of kubectl get smcrlinks -l %s=%s",
			s.notRedundant, plural(s.links.Active, "active link group"), v1alpha1.LabelNamespace, p.obj.Namespace))
	case s.oneRNIC > 0:
		return is(metav1.ConditionFalse, reasonOneRNIC, fmt.Sprintf(
			"%d of %s cannot lose any one RNIC, because their nodes have one: %s; linkRedundancy: Single says that this is wanted",
			s.oneRNIC, plural(s.links.Active, "active link group"), some(s.oneRNICNodes)))
	}
	return is(metav1.ConditionTrue, reasonAsWanted, fmt.Sprintf("%s as redundant as wanted", plural(s.links.Active, "active link group")))
}

func (s *sums) degraded(p *policy) metav1.Condition {
	is := func(status metav1.ConditionStatus, reason, message string) metav1.Condition {
		return condition(v1alpha1.ConditionDegraded, status, reason, message)
	}
	if p.err != nil {
		return is(metav1.ConditionUnknown, reasonNotAccepted, "the policy is not valid, see the condition Accepted")
	}
	reason := ""
	var parts []string
	bad := func(r, message string) {
		if reason == "" {
			reason = r
		}
		parts = append(parts, message)
	}
	if n := len(s.agentless); n > 0 {
		bad(reasonAgentsMissing, fmt.Sprintf("no agent answers on %s with selected pods: %s", plural(n, "node"), some(s.agentless)))
	}
	if n := s.links.Down; n > 0 {
		bad(reasonLinksDown, plural(n, "link group")+" down")
	}
	if n := s.pods.Refused; n > 0 {
		bad(reasonPodsRefused, plural(n, "pod")+" with refused connections")
	}
	if n := s.pods.Fallback; n > 0 {
		bad(reasonPodsFallback, plural(n, "pod")+" on plain TCP")
	}
	if reason != "" {
		return is(metav1.ConditionTrue, reason, strings.Join(parts, "; "))
	}
	return is(metav1.ConditionFalse, reasonHealthy, "no link group is down and no pod fell back")
}

func (s *sums) conflicting(p *policy) metav1.Condition {
	switch {
	case p.err != nil:
		return condition(v1alpha1.ConditionConflicting, metav1.ConditionUnknown, reasonNotAccepted, "the policy is not valid, see the condition Accepted")
	case len(s.conflicts) > 0:
		return condition(v1alpha1.ConditionConflicting, metav1.ConditionTrue, reasonOtherPolicy, conflictMessage(p.obj, s.conflicts))
	}
	return condition(v1alpha1.ConditionConflicting, metav1.ConditionFalse, reasonNoConflict, "no policy of the same priority wants something else for the same pods")
}
