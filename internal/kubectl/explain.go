// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// APIVersion is that of the answers of this package.
const APIVersion = "smcr.io/kubectl/v1"

// Codes of this package, besides the agents'.
const (
	// CodeHostNetwork: pods in the node's network are never touched.
	CodeHostNetwork agentapi.Code = "HOST_NETWORK"
	// CodeUnknown: the agent that knows could not be asked.
	CodeUnknown agentapi.Code = "UNKNOWN"
)

// Answer is why connections from a pod to a destination are, or are not, on
// SMC-R, as far as the cluster and its agents know.
type Answer struct {
	APIVersion string `json:"apiVersion"`
	// Verdict is one sentence, Code its reason code, and Advice what to do.
	Verdict string        `json:"verdict"`
	Code    agentapi.Code `json:"code"`
	Advice  []string      `json:"advice,omitempty"`
	Policy  string        `json:"policy,omitempty"`
	// Required says that a connection without SMC-R is reset.
	Required    bool        `json:"required,omitempty"`
	Source      Side        `json:"source"`
	Destination Destination `json:"destination"`
	// Peers are the pods at the other end: several behind a Service.
	Peers []Side `json:"peers"`
	// Notes say what could not be found out.
	Notes []string `json:"notes,omitempty"`
}

// Accelerated tells whether connections are on SMC-R.
func (a Answer) Accelerated() bool { return a.Code == agentapi.CodeOK }

// Side is a pod at one end, and what the agent of its node says.
type Side struct {
	Pod   string `json:"pod"` // NAMESPACE/NAME
	Node  string `json:"node,omitempty"`
	OptIn OptIn  `json:"optIn"`
	// Status is the annotation smcr.io/status, which the agent wrote.
	Status string `json:"status,omitempty"`
	// Agent is NAMESPACE/NAME of the agent's pod, and Asked the destination that
	// it was asked about.
	Agent string         `json:"agent,omitempty"`
	Asked netip.AddrPort `json:"asked,omitzero"`
	// Answer is the agent's, and Error why there is none.
	Answer *agentapi.Explanation `json:"answer,omitempty"`
	Error  string                `json:"error,omitempty"`
}

// Destination is what was asked about, and what it is.
type Destination struct {
	Asked     string           `json:"asked"`
	Kind      string           `json:"kind"`           // Address, Pod or Service
	Name      string           `json:"name,omitempty"` // NAMESPACE/NAME
	Addresses []netip.AddrPort `json:"addresses"`
}

// Explain says why connections from src, a pod's name or address, to dst
// (HOST:PORT) are, or are not, on SMC-R.
func (c *Cluster) Explain(ctx context.Context, src, dst string) (Answer, error) {
	pod, err := c.source(ctx, src)
	if err != nil {
		return Answer{}, err
	}
	t, err := c.resolve(ctx, dst)
	if err != nil {
		return Answer{}, err
	}
	a := Answer{
		APIVersion: APIVersion, Peers: []Side{},
		Destination: Destination{Asked: dst, Kind: t.kind, Name: t.name, Addresses: t.addrs},
	}
	if t.note != "" {
		a.Notes = append(a.Notes, t.note)
	}
	sources := podIPs(pod)
	a.Source = c.side(ctx, pod, pod.Namespace+"/"+pod.Name, sameFamily(t.addrs, sources))
	for _, p := range t.peers {
		from := sameFamily(addrPorts(sources), []netip.Addr{p.addr.Addr()}).Addr()
		a.Peers = append(a.Peers, c.side(ctx, p.pod, from.String(), p.addr))
	}
	a.judge(pod)
	return a, nil
}

// source finds the pod that connects.
func (c *Cluster) source(ctx context.Context, src string) (*corev1.Pod, error) {
	if ip, err := netip.ParseAddr(src); err == nil {
		p, err := c.podByIP(ctx, ip.Unmap())
		if err == nil && p == nil {
			err = usage("no running pod of the cluster has the address %s; pods in the node's network are never touched", ip)
		}
		return p, err
	}
	r, err := c.parseRef(src, "pod")
	if err != nil {
		return nil, err
	}
	return c.pod(ctx, r)
}

// sameFamily returns the first address that is of the family of one of others,
// or else the first.
func sameFamily(addrs []netip.AddrPort, others []netip.Addr) netip.AddrPort {
	for _, a := range addrs {
		if slices.ContainsFunc(others, func(o netip.Addr) bool { return o.Is4() == a.Addr().Is4() }) {
			return a
		}
	}
	if len(addrs) == 0 {
		return netip.AddrPort{}
	}
	return addrs[0]
}

func addrPorts(ips []netip.Addr) (out []netip.AddrPort) {
	for _, ip := range ips {
		out = append(out, netip.AddrPortFrom(ip, 0))
	}
	return out
}

// side asks what there is to know of one end.
func (c *Cluster) side(ctx context.Context, pod *corev1.Pod, src string, dst netip.AddrPort) Side {
	s := Side{
		Pod: pod.Namespace + "/" + pod.Name, Node: pod.Spec.NodeName, Asked: dst,
		OptIn: c.optIn(ctx, pod), Status: pod.Annotations[v1alpha1.AnnotationStatus],
	}
	switch {
	case !s.OptIn.Enabled:
		return s // its agent does not know it
	case s.Node == "":
		s.Error = fmt.Sprintf("the pod is %s and on no node yet", pod.Status.Phase)
		return s
	case pod.Status.Phase != corev1.PodRunning:
		s.Error = fmt.Sprintf("the pod is %s", pod.Status.Phase)
		return s
	}
	agent, err := c.agent(ctx, s.Node)
	if err != nil {
		s.Error = err.Error()
		return s
	}
	s.Agent = agent.Namespace + "/" + agent.Name
	e, err := askJSON[agentapi.Explanation](ctx, c, agent, "explain", src, dst.String())
	if err != nil {
		s.Error = err.Error()
		return s
	}
	s.Answer = &e
	return s
}

// judge makes the verdict: the source decides, and what is missing at the other
// end is advice.
func (a *Answer) judge(pod *corev1.Pod) {
	s := a.Source
	switch {
	case s.OptIn.By == "host network":
		a.Code, a.Verdict = CodeHostNetwork, fmt.Sprintf("plain TCP: pod %s is in the node's network, and such pods are never touched", s.Pod)
		return
	case !s.OptIn.Enabled:
		a.Code, a.Verdict = agentapi.CodeOptedOut, fmt.Sprintf("plain TCP: pod %s is not opted in", s.Pod)
		a.Advice = append(a.Advice, optInAdvice(pod.Namespace, pod.Name, s.OptIn))
		return
	case s.Answer == nil:
		a.Code, a.Verdict = CodeUnknown, fmt.Sprintf("not known: %s", s.Error)
		if strings.Contains(s.Error, ErrNoAgent.Error()) {
			a.Verdict = "plain TCP: " + s.Error
		}
		return
	}
	e := s.Answer
	a.Code, a.Verdict, a.Policy, a.Required = e.Code, e.Verdict, e.Policy, e.Required
	if e.Advice != "" {
		a.Advice = append(a.Advice, e.Advice)
	}
	if e.Code == agentapi.CodeNotAttached {
		a.Advice = append(a.Advice, "a pod that was made before the plugin was installed has to be made again: kubectl get smcrnodes -o wide shows in CNI whether the plugin is")
	}
	if e.Code == agentapi.CodeOK {
		return
	}
	for _, p := range a.Peers {
		ns, name, _ := strings.Cut(p.Pod, "/")
		switch {
		case p.OptIn.By == "host network":
			a.Advice = append(a.Advice, fmt.Sprintf("the peer %s is in its node's network: such pods have no SMC-R", p.Pod))
		case !p.OptIn.Enabled:
			a.Advice = append(a.Advice, fmt.Sprintf("the peer %s is not opted in: %s", p.Pod, optInAdvice(ns, name, p.OptIn)))
		case p.Error != "":
			a.Advice = append(a.Advice, fmt.Sprintf("the peer %s: %s", p.Pod, p.Error))
		}
	}
}

func optInAdvice(namespace, name string, o OptIn) string {
	if o.By == "namespace" && o.Value == "false" {
		return fmt.Sprintf("its namespace is opted out; kubectl annotate pod -n %s %s %s=true opts the pod in", namespace, name, v1alpha1.AnnotationEnabled)
	}
	over := ""
	if o.By == "pod" {
		over = " --overwrite"
	}
	return fmt.Sprintf("kubectl annotate pod%s -n %s %s %s=true", over, namespace, name, v1alpha1.AnnotationEnabled)
}

// IsUsage tells whether an error is about what was asked.
func IsUsage(err error) bool { return errors.As(err, new(*UsageError)) }
