// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// Resolved returns the objects that are to be in force: those of now, but for policies whose peer selectors
// the controller has not resolved to addresses yet. They are in Unresolved, and in the place of each one is what was in force
// before. inForce is what Resolved returned last.
//
//	policy, not resolved                        in force until it is
//	only other fields than selectors changed    the policy, with the addresses from before
//	changed                                     its former form, with these addresses
//	new, selects a pod that ran before          nothing of it, whatever its mode, also for pods that are new
//	new to this agent, selects none of these    the policy, with its networks and the addresses of its slices, if it has some
//
// Without Resolved such a policy would select no peer for a second, or as long as there is no controller, and
// live connections with peers that its former form, or the built-in policy, and the new one select would be ended. A pod
// that is new has no connections to end: there the policy's settings, datapath and narrowness hold from the start.
func Resolved(now, inForce Objects) Objects {
	slicesNow, slicesThen := slicesOf(now), slicesOf(inForce)
	then := map[policyKey]*v1alpha1.SMCRPolicy{}
	for i := range inForce.Policies {
		then[keyOf(&inForce.Policies[i])] = &inForce.Policies[i]
	}
	out := now
	out.Policies, out.PeerSlices, out.Unresolved = nil, nil, nil
	for i := range now.Policies {
		p := &now.Policies[i]
		k := keyOf(p)
		use, peers := p, slicesNow[k]
		switch was := then[k]; {
		case !toResolve(p):
		case isResolved(p, peers):
			peers = slices.DeleteFunc(peers, func(s v1alpha1.SMCRPeerSlice) bool { return !isWritten(&s, p) })
		default:
			out.Unresolved = append(out.Unresolved, *p)
			switch {
			case was != nil && equality.Semantic.DeepEqual(selectorsOf(was), selectorsOf(p)):
				peers = slicesThen[k]
			case was != nil:
				use, peers = was, slicesThen[k]
			case selectsRunning(p, now, inForce):
				continue
			default:
				peers = slices.DeleteFunc(peers, func(s v1alpha1.SMCRPeerSlice) bool { return !isSliceOf(&s, p) })
			}
		}
		out.Policies = append(out.Policies, *use)
		out.PeerSlices = append(out.PeerSlices, peers...)
	}
	return out
}

// policyKey is a policy by its name.
type policyKey struct{ namespace, policy string }

func keyOf(p *v1alpha1.SMCRPolicy) policyKey { return policyKey{p.Namespace, p.Name} }

func slicesOf(o Objects) map[policyKey][]v1alpha1.SMCRPeerSlice {
	out := map[policyKey][]v1alpha1.SMCRPeerSlice{}
	for _, s := range o.PeerSlices {
		k := policyKey{s.Namespace, s.Policy}
		out[k] = append(out[k], s)
	}
	return out
}

func selectorsOf(p *v1alpha1.SMCRPolicy) []v1alpha1.PeerSelector {
	if p.Spec.Peers == nil {
		return nil
	}
	return p.Spec.Peers.Selectors
}

// selectsRunning says whether a policy selects a pod that may have connections: one that was opted in before.
func selectsRunning(p *v1alpha1.SMCRPolicy, now, inForce Objects) bool {
	var namespace *string
	for _, ns := range inForce.Namespaces {
		if ns.Name == p.Namespace {
			namespace = ns.Enabled
		}
	}
	ran := map[string]bool{}
	for _, pod := range inForce.Pods {
		ran[pod.UID] = pod.Namespace == p.Namespace && optIn(pod, namespace).OptedIn
	}
	return slices.ContainsFunc(now.Pods, func(pod PodObject) bool { return ran[pod.UID] && selects(p, pod) })
}

// isResolved says whether the slices of a policy's name have the addresses that its peer selectors stand for: the first one is written
// last. Older slices, and those of a former policy of the name, are about to be deleted then. Newer ones say that the policy as it is known
// here is an older one.
//
// A controller of an older version writes the first slice in no order, none if a selector finds no pod, and no status.peersGeneration,
// which a new policy lacks, too. There the policy is resolved when all slices that there are are written, and the first one is
// among them or that controller has seen the policy.
func isResolved(p *v1alpha1.SMCRPolicy, peers []v1alpha1.SMCRPeerSlice) bool {
	all, first := true, false
	for i := range peers {
		if isSliceOf(&peers[i], p) && peers[i].PolicyGeneration > p.Generation {
			return false
		}
		written := isWritten(&peers[i], p)
		all, first = all && written, first || written && peers[i].Name == v1alpha1.FirstPeerSlice(p.Name)
	}
	if p.Status.PeersGeneration != nil {
		return first
	}
	return all && (first || p.Status.ObservedGeneration == p.Generation)
}

// toResolve says whether a policy has peer selectors that are to be resolved. One that cannot be used has nothing to be resolved.
func toResolve(p *v1alpha1.SMCRPolicy) bool { return len(selectorsOf(p)) > 0 && usable(p) == nil }

// isWritten says whether a slice is written for this form of the policy.
func isWritten(s *v1alpha1.SMCRPeerSlice, p *v1alpha1.SMCRPolicy) bool {
	return isSliceOf(s, p) && s.PolicyGeneration == p.Generation
}

// isSliceOf says whether a slice is of this very policy, and not of a former one of its name.
func isSliceOf(s *v1alpha1.SMCRPeerSlice, p *v1alpha1.SMCRPolicy) bool {
	owner := metav1.GetControllerOfNoCopy(s)
	return s.Policy == p.Name && (owner == nil || owner.UID == p.UID)
}

// usable returns why a policy cannot be used, or nil.
func usable(p *v1alpha1.SMCRPolicy) error {
	if _, err := p.Spec.PodSelector.Selector(); err != nil {
		return err
	}
	_, err := policyOf(&Node{}, p, nil)
	return err
}
