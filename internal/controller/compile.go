// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// policy is an SMCRPolicy whose selectors can be used.
type policy struct {
	obj   *v1alpha1.SMCRPolicy
	pods  labels.Selector
	peers []peerSelector
	// err says what is wrong with the policy. A policy with an error selects nothing.
	err error
}

// peerSelector selects pods by namespace and labels.
type peerSelector struct {
	namespaces labels.Selector // nil: the policy's own only
	pods       labels.Selector
}

// compile reads the selectors of a policy, and checks it for the mistakes for which agents do
// not use it either. The API server refuses most of these, but not in an object that was stored
// under an older CRD.
func compile(obj *v1alpha1.SMCRPolicy) *policy {
	p := &policy{obj: obj}
	var errs []error
	selector := func(field string, s *v1alpha1.LabelSelector) labels.Selector {
		if s == nil {
			return labels.Everything()
		}
		sel, err := s.Selector()
		if err != nil {
			errs = append(errs, fmt.Errorf("spec.%s: %w", field, err))
			return labels.Nothing()
		}
		return sel
	}
	p.pods = selector("podSelector", &obj.Spec.PodSelector)
	if peers := obj.Spec.Peers; peers != nil {
		for i := range peers.Selectors {
			s := &peers.Selectors[i]
			c := peerSelector{pods: selector(fmt.Sprintf("peers.selectors[%d].podSelector", i), s.PodSelector)}
			if s.NamespaceSelector != nil {
				c.namespaces = selector(fmt.Sprintf("peers.selectors[%d].namespaceSelector", i), s.NamespaceSelector)
			}
			p.peers = append(p.peers, c)
		}
		errs = append(errs, checkNetworks("cidrs", peers.CIDRs), checkNetworks("except", peers.Except))
	}
	p.err = errors.Join(append(errs, checkPorts(obj.Spec.Ports))...)
	return p
}

// checkNetworks says what is wrong with the networks of a field of spec.peers.
func checkNetworks(field string, cidrs []v1alpha1.CIDR) error {
	var errs []error
	for i, c := range cidrs {
		n, err := netip.ParsePrefix(string(c))
		if err == nil && n.Addr().Is4In6() {
			err = fmt.Errorf("%s is IPv4 within IPv6", n)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("spec.peers.%s[%d]: want a network such as 10.0.0.0/8: %w", field, i, err))
		}
	}
	return errors.Join(errs...)
}

// checkPorts says what is wrong with spec.ports.
func checkPorts(ports []v1alpha1.PolicyPort) error {
	var errs []error
	for i, port := range ports {
		if last := lastPort(port); port.Port < 1 || last < port.Port || last > 1<<16-1 {
			errs = append(errs, fmt.Errorf("spec.ports[%d]: want ports from 1 to 65535, and endPort not below port", i))
		}
	}
	return errors.Join(errs...)
}

// lastPort is the last port of a range, or the port.
func lastPort(p v1alpha1.PolicyPort) int32 {
	if p.EndPort != nil {
		return *p.EndPort
	}
	return p.Port
}

// selects says whether the policy selects the pod, which is of its namespace.
func (p *policy) selects(pod *corev1.Pod) bool {
	return p.err == nil && p.pods.Matches(labels.Set(pod.Labels))
}

// mayHavePeersIn says whether a peer selector may select pods of the namespace.
func (p *policy) mayHavePeersIn(namespace string, lbls labels.Set) bool {
	for _, s := range p.peers {
		if s.inNamespace(p.obj.Namespace, namespace, lbls) {
			return true
		}
	}
	return false
}

func (s peerSelector) inNamespace(own, namespace string, lbls labels.Set) bool {
	if s.namespaces == nil {
		return own == namespace
	}
	return s.namespaces.Matches(lbls)
}

// runs says whether the pod counts as one that makes connections. A pod that terminates only
// has old ones.
func runs(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp.IsZero()
}

// carries says whether the pod runs in a network of its own.
func carries(pod *corev1.Pod) bool { return runs(pod) && !pod.Spec.HostNetwork }

// hasAddresses says whether the pod's programs may use its addresses, and so have connections:
//
//	Pending with addresses   init containers may connect, and sidecars serve
//	Running, terminating     the programs run on until the end of the pod's grace period; then
//	                         kubelet sets a final phase, or the object goes
//	Running, node gone       the object stays, and nobody else gets the addresses
func hasAddresses(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodRunning || pod.Status.Phase == corev1.PodPending && len(pod.Status.PodIPs) > 0
}

// canBePeer says whether the pod's addresses are in use and stand for the pod alone.
func canBePeer(pod *corev1.Pod) bool { return hasAddresses(pod) && !pod.Spec.HostNetwork }

// mayCarry says whether the pod can use SMC-R at all: it has a network of its own, or it is in
// its node's network and asks for SMC-R there, or did so before, as its status shows.
func mayCarry(pod *corev1.Pod) bool {
	return carries(pod) || runs(pod) && (asks(pod) || pod.Annotations[v1alpha1.AnnotationStatus] != "")
}

// asks says whether the pod's own annotation opts it in.
func asks(pod *corev1.Pod) bool { return pod.Annotations[v1alpha1.AnnotationEnabled] == "true" }

// hostOptedIn says whether a pod in its node's network is opted in: its own annotation has to say
// so, and the policies that select it, given in the order of their rank, have to put it on the
// kernel's datapath. The agents decide in the same way.
func hostOptedIn(pod *corev1.Pod, ranked []*policy) bool {
	if !asks(pod) || len(ranked) == 0 || !wantsKernel(&ranked[0].obj.Spec) {
		return false
	}
	return !slices.ContainsFunc(ranked, func(p *policy) bool { return p.obj.Spec.Mode == v1alpha1.ModeRequired })
}
