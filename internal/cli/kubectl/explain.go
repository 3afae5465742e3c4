// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"cmp"
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
	// CodeHostNetwork means that the pod is in its node's network, and not opted in there: no
	// connection of it is touched.
	CodeHostNetwork agentapi.Code = "HOST_NETWORK"
	// CodeUnknown means that the agent of the source's node could not be asked.
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
	// Peers are the pods at the other end; a Service may have several.
	Peers []Side `json:"peers"`
	// Notes say what could not be found out, and why.
	Notes []string `json:"notes,omitempty"`
}

// Accelerated tells whether connections are on SMC-R.
func (a Answer) Accelerated() bool { return a.Code == agentapi.CodeOK }

// Side is a pod at one end, with the answer of its node's agent.
type Side struct {
	Pod   string `json:"pod"` // NAMESPACE/NAME
	Node  string `json:"node,omitempty"`
	OptIn OptIn  `json:"optIn"`
	// Status is the annotation smcr.io/status, which the agent wrote.
	Status string `json:"status,omitempty"`
	// Agent is NAMESPACE/NAME of the agent's pod, and Asked the destination that the
	// agent was asked about.
	Agent string         `json:"agent,omitempty"`
	Asked netip.AddrPort `json:"asked,omitzero"`
	// Answer is the agent's answer, and Error why there is none.
	Answer *agentapi.Explanation `json:"answer,omitempty"`
	Error  string                `json:"error,omitempty"`
	// Err is Error, for errors.Is.
	Err error `json:"-"`
}

// fail says why there is no answer.
func (s *Side) fail(err error) { s.Err, s.Error = err, err.Error() }

// Destination is the destination that was asked about, and what it was resolved to.
type Destination struct {
	Asked     string           `json:"asked"`
	Kind      string           `json:"kind"`           // Address, Pod, Service, Deployment and so on
	Name      string           `json:"name,omitempty"` // NAMESPACE/NAME
	Addresses []netip.AddrPort `json:"addresses"`
}

// Explain says why connections from src, a pod's name or address, or an object that stands
// for pods, to dst (HOST:PORT) are, or are not, on SMC-R.
func (c *Cluster) Explain(ctx context.Context, src, dst string) (Answer, error) {
	pod, note, err := c.source(ctx, src)
	if err != nil {
		return Answer{}, err
	}
	t, err := c.resolve(ctx, dst, pod.Namespace)
	if err != nil {
		return Answer{}, err
	}
	a := Answer{
		APIVersion: APIVersion, Peers: []Side{},
		Destination: Destination{Asked: dst, Kind: t.kind, Name: t.name, Addresses: t.addrs},
	}
	for _, n := range []string{note, t.note} {
		if n != "" {
			a.Notes = append(a.Notes, n)
		}
	}
	sources := podIPs(pod)
	a.Source = c.side(ctx, pod, pod.Namespace+"/"+pod.Name, sameFamily(t.addrs, sources))
	peers := oncePerPod(t.peers, a.Source.Asked)
	for _, p := range peers {
		from := sameFamily(addrPorts(sources), []netip.Addr{p.addr.Addr()}).Addr()
		if p.pod.Spec.HostNetwork {
			a.Peers = append(a.Peers, c.hostPeer(ctx, p, from))
			continue
		}
		a.Peers = append(a.Peers, c.side(ctx, p.pod, from.String(), p.addr))
	}
	a.judge(pod)
	if t.kind == "Service" && a.Code == agentapi.CodeNoPolicy {
		a.adviseAddress(c.policyOfPods(ctx, pod, peers, a.Source.Asked))
	}
	return a, nil
}

// policyOfPods asks the agent of the source whether a policy selects connections to the pods
// behind a Service, though none selects connections to its address. It returns that policy; "" if
// there is none, or if clients connect to the pods themselves, as with a headless Service.
func (c *Cluster) policyOfPods(ctx context.Context, pod *corev1.Pod, peers []peer, asked netip.AddrPort) string {
	if len(peers) == 0 || slices.ContainsFunc(peers, func(p peer) bool { return p.addr == asked }) {
		return ""
	}
	s := c.side(ctx, pod, pod.Namespace+"/"+pod.Name, peers[0].addr)
	if s.Answer == nil || s.Answer.Code == agentapi.CodeNoPolicy {
		return ""
	}
	return s.Answer.Policy
}

// adviseAddress says that a policy selects the pods of the destination, and not its address.
func (a *Answer) adviseAddress(policy string) {
	if policy == "" {
		return
	}
	ip := a.Source.Asked.Addr()
	a.Advice = []string{fmt.Sprintf("policy %s selects the pods behind Service %s, but the connection is made to the address of the Service, and that decides: "+
		"add %s to peers.cidrs of the policy, or the range of the cluster's Services; or select the pods by peers.selectors, which counts the address of a Service whose pods are all selected",
		policy, a.Destination.Name, netip.PrefixFrom(ip, ip.BitLen()))}
}

// oncePerPod leaves one peer of each pod: of a pod with two addresses the one that has the family of
// asked, the address that is asked about.
func oncePerPod(peers []peer, asked netip.AddrPort) []peer {
	var out []peer
	for _, p := range peers {
		i := slices.IndexFunc(out, func(o peer) bool { return o.pod.Namespace == p.pod.Namespace && o.pod.Name == p.pod.Name })
		switch {
		case i < 0:
			out = append(out, p)
		case out[i].addr.Addr().Is4() != asked.Addr().Is4() && p.addr.Addr().Is4() == asked.Addr().Is4():
			out[i] = p
		}
	}
	return out
}

// source finds the pod that connects. note says which one was taken, if src stands for
// several.
func (c *Cluster) source(ctx context.Context, src string) (pod *corev1.Pod, note string, err error) {
	if ip, err := netip.ParseAddr(src); err == nil {
		p, _, err := c.podByIP(ctx, ip.Unmap())
		if err == nil && p == nil {
			err = usage("no running pod of the cluster has the address %s; a pod in its node's network is named, as NAMESPACE/NAME", ip)
		}
		return p, "", err
	}
	word, _, _ := strings.Cut(src, "/")
	kind := kindOf(word)
	if kind == "" || kind == kindPod {
		r, err := parseRef(src, kindPod, c.namespace)
		if err != nil {
			return nil, "", err
		}
		pod, err = c.pod(ctx, r)
		return pod, "", err
	}
	r, err := parseRef(src, kind, c.namespace)
	if err != nil {
		return nil, "", err
	}
	if kind == kindService {
		name, namespace, _ := strings.Cut(r.name, ".")
		r = ref{cmp.Or(namespace, r.namespace), name}
	}
	pods, err := c.podsOf(ctx, r, kind)
	if err != nil {
		return nil, "", err
	}
	if len(pods) == 0 {
		return nil, "", usage("no pod of %s %s runs", kind, r)
	}
	if len(pods) > 1 {
		note = fmt.Sprintf("%s is one of %d pods of %s %s", pods[0].Name, len(pods), kind, r)
	}
	return &pods[0], note, nil
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
	case !s.OptIn.Enabled && !s.OptIn.Unknown:
		return s // the node's agent does not know the pod
	case s.Node == "":
		s.fail(fmt.Errorf("the pod is %s and on no node yet", pod.Status.Phase))
		return s
	case !hasAddresses(pod):
		s.fail(fmt.Errorf("the pod is %s", pod.Status.Phase))
		return s
	}
	agent, err := c.agent(ctx, s.Node)
	if err != nil {
		s.fail(err)
		return s
	}
	s.Agent = agent.Namespace + "/" + agent.Name
	e, err := askJSON[agentapi.Explanation](ctx, c, agent, "explain", src, dst.String())
	if err != nil {
		s.fail(err)
		return s
	}
	if s.OptIn.HostNetwork && s.Status == "" && (e.Code == agentapi.CodeNotAttached || e.Code == agentapi.CodeOptedOut) {
		s.OptIn.Enabled, s.OptIn.Detail = false, "the pod is in its node's network, and its policies do not put it on the kernel's datapath"
		return s
	}
	if s.OptIn.Unknown {
		s.OptIn.learn(s.Pod, &e)
	}
	s.Answer = &e
	return s
}

// hostPeer asks about a peer in its node's network. Several pods have the node's address, so the
// agent is asked about connections from the pod, by its name, to the client: policies decide about
// both directions alike. Only if the agent has seen no connection (UNSEEN), it is also asked about
// those from the client to the address. If it knows that the address stands for this pod, as it does
// when it has only one such pod, that answer is the better one.
func (c *Cluster) hostPeer(ctx context.Context, p peer, from netip.Addr) Side {
	s := c.side(ctx, p.pod, p.pod.Namespace+"/"+p.pod.Name, netip.AddrPortFrom(from, p.addr.Port()))
	s.Asked = p.addr
	if e := s.Answer; e != nil && e.Code == agentapi.CodeUnseen {
		if direct := c.side(ctx, p.pod, from.String(), p.addr); direct.Answer != nil && direct.Answer.Pod == s.Pod {
			return direct
		}
		e.Verdict, e.Advice = fmt.Sprintf("policy %s selects connections of this client; kubectl smcr conns --pod %s has those that are open", e.Policy, s.Pod), ""
	}
	return s
}

// judge makes the verdict from the answer of the source's agent. What is missing at the
// other end becomes advice.
func (a *Answer) judge(pod *corev1.Pod) {
	s := a.Source
	switch {
	case s.OptIn.HostNetwork && !s.OptIn.Enabled:
		a.Code, a.Verdict = CodeHostNetwork, fmt.Sprintf("plain TCP: pod %s is in its node's network, and not opted in there", s.Pod)
		a.Advice = append(a.Advice, hostAdvice(pod.Namespace, pod.Name, s.OptIn))
		return
	case !s.OptIn.Enabled && !s.OptIn.Unknown:
		a.Code, a.Verdict = agentapi.CodeOptedOut, fmt.Sprintf("plain TCP: pod %s is not opted in", s.Pod)
		a.Advice = append(a.Advice, optInAdvice(pod.Namespace, pod.Name, s.OptIn))
		return
	case s.Answer == nil:
		a.Code, a.Verdict = CodeUnknown, fmt.Sprintf("not known: %s", s.Error)
		switch {
		case !errors.Is(s.Err, ErrNoAgent):
		case strings.HasPrefix(s.Status, v1alpha1.PodStatusKernel):
			a.Verdict = "not known: the pod's kernel carries its connections on, and there is no agent to ask: " + s.Error
		default:
			a.Code, a.Verdict = agentapi.CodeNoAgent, "plain TCP: "+s.Error
		}
		return
	}
	e := s.Answer
	a.Code, a.Verdict, a.Policy, a.Required = e.Code, e.Verdict, e.Policy, e.Required
	if e.Advice != "" {
		a.Advice = append(a.Advice, e.Advice)
	}
	if e.Code == agentapi.CodeNotAttached && !s.OptIn.HostNetwork {
		a.Advice = append(a.Advice, "a pod that was made before the plugin was installed has to be made again: kubectl get smcrnodes -o wide shows in CNI whether the plugin is")
	}
	if e.Code == agentapi.CodeOK {
		return
	}
	for _, p := range a.Peers {
		ns, name, _ := strings.Cut(p.Pod, "/")
		switch {
		case p.OptIn.HostNetwork && !p.OptIn.Enabled:
			a.Advice = append(a.Advice, fmt.Sprintf("the peer %s is in its node's network, and not opted in there: %s", p.Pod, hostAdvice(ns, name, p.OptIn)))
		case !p.OptIn.Enabled && !p.OptIn.Unknown:
			a.Advice = append(a.Advice, fmt.Sprintf("the peer %s is not opted in: %s", p.Pod, optInAdvice(ns, name, p.OptIn)))
		case p.Error != "":
			a.Advice = append(a.Advice, fmt.Sprintf("the peer %s: %s", p.Pod, p.Error))
		case p.Answer != nil && p.Answer.Budget != nil:
			a.Advice = append(a.Advice, fmt.Sprintf("the peer %s: %s; raise %s", p.Pod, p.Answer.Budget, p.Answer.Budget.Field))
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

// hostAdvice says what is missing to opt a pod in that is in its node's network: the annotation, or a
// policy.
func hostAdvice(namespace, name string, o OptIn) string {
	const policy = "the first SMCRPolicy that selects it has datapath Kernel or KernelIfAvailable"
	if o.Value == "true" {
		return fmt.Sprintf("it is annotated, but that takes effect only if %s, and no other one has mode Required: kubectl get smcrpolicies -n %s -o wide; the pod's event SMCRHostNetwork says what is missing",
			policy, namespace)
	}
	return optInAdvice(namespace, name, o) + ", if " + policy
}

// IsUsage tells whether an error is a mistake in the question.
func IsUsage(err error) bool { return errors.As(err, new(*UsageError)) }
