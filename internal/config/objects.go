// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// DefaultPolicy is the name of the built-in policy of opted-in pods that no
// policy of their namespace selects. No object can have it.
const DefaultPolicy = "(default)"

// Objects are the objects of a cluster that one node's configuration is made of, with
// only the fields that it depends on. They are also kept in a file.
type Objects struct {
	// Pods are the pods of the node.
	Pods []PodObject `json:"pods"`
	// Namespaces are the namespaces of the pods; there may be others.
	Namespaces []NamespaceObject        `json:"namespaces"`
	Policies   []v1alpha1.SMCRPolicy    `json:"policies"`
	PeerSlices []v1alpha1.SMCRPeerSlice `json:"peerSlices"`
	// Unresolved are policies as they are now that are not in force like that: see [Resolved].
	Unresolved []v1alpha1.SMCRPolicy `json:"unresolved,omitempty"`
	// Nodes are the other nodes; nil: they are not known.
	Nodes []NodeObject `json:"nodes"`
}

// NodeObject is an SMCRNode of another node.
type NodeObject struct {
	Name string `json:"name"`
	// Addresses are the addresses of the node's RDMA devices, as its agent reports them.
	Addresses []string `json:"addresses,omitempty"`
}

// PodObject is a pod.
type PodObject struct {
	Namespace   string            `json:"namespace"`
	Name        string            `json:"name"`
	UID         string            `json:"uid"`
	Labels      map[string]string `json:"labels,omitempty"`
	Enabled     *string           `json:"enabled,omitempty"` // annotation smcr.io/enabled
	HostNetwork bool              `json:"hostNetwork,omitempty"`
	// ConfigHash is what kubelet calls a static pod on the node, in the place of the UID: in the name of its
	// cgroup, and to the runtime and the CNI plugins; "" of others.
	ConfigHash string `json:"configHash,omitempty"`
	// Claimed says that the pod has a device of the node through a ResourceClaim.
	Claimed bool `json:"claimed,omitempty"`
}

// nodeUID is what attachments have as the UID of the pod. Those of pods in the node's network are made by the agent, of UID.
func (p PodObject) nodeUID() string {
	if p.HostNetwork || !validHash(p.ConfigHash) {
		return p.UID
	}
	return p.ConfigHash
}

// NamespaceObject is a namespace.
type NamespaceObject struct {
	Name    string  `json:"name"`
	Enabled *string `json:"enabled,omitempty"` // annotation smcr.io/enabled
}

// Verdict is what was decided about a pod.
type Verdict struct {
	Namespace, Name, UID string
	// NodeUID is what the CNI plugins know as the UID of the pod. That of a static pod is its own, and UID is that of its
	// mirror. Anybody's pod may claim to have it, so it tells apart pods of one name only.
	NodeUID string
	// OptedIn says that the pod is to be accelerated; Because says why, or why
	// not.
	OptedIn bool
	Because string
	// BadAnnotation is set when an annotation is neither true nor false.
	BadAnnotation bool
	// HostNetwork says that the pod is in the network of its node: if it is opted in, its kernel alone can carry its
	// connections. Ineffective says that its annotation wants that, and that something else is missing.
	HostNetwork, Ineffective bool
	// Policies are the policies that select an opted-in pod, by rank.
	Policies []string
	// Rules is another one when one of Policies is made, changed or deleted.
	Rules string
	// Limited says where the first policy asks for more than the operator lets policies
	// give to a pod; "" if nowhere.
	Limited string
	// Required says that one of the policies has mode Required.
	Required bool
	Settings Settings
}

// PolicyError says why a policy cannot be used. The other policies are used.
type PolicyError struct {
	Namespace, Name string
	Err             error
}

func (e *PolicyError) Error() string {
	return fmt.Sprintf("policy %s/%s is not used: %v", e.Namespace, e.Name, e.Err)
}

func (e *PolicyError) Unwrap() error { return e.Err }

// FromObjects returns a copy of base with the pods and policies of the objects, a verdict
// for each pod in the order of the pods, and the policies that cannot be used.
//
// A pod is opted in by its annotation, else by a claim on one of the node's devices, else
// by the annotation of its namespace. A value that is neither true nor false means false.
// A pod in the host's network is opted in by its own annotation only, and only if its datapath
// is Kernel or KernelIfAvailable. It is in HostPods then, too.
//
// The policies of the pod's namespace that select an opted-in pod are ranked by priority,
// age and name. The first that selects a connection decides about it; the first that
// selects the pod gives the pod's settings and, unless mode Required of another one keeps it
// from that ([Node.DatapathFor]), its datapath. If no policy selects the pod, the built-in
// policy decides: Prefer, all ports, and the default peers of base.
func FromObjects(base *Node, o Objects) (*Node, []Verdict, []*PolicyError) {
	n := *base
	n.Policies, n.HostPods, n.Pods = nil, nil, make(map[PodName]PodConfig, len(o.Pods))
	namespaces := map[string]*string{}
	for _, ns := range o.Namespaces {
		namespaces[ns.Name] = ns.Enabled
	}
	n.Wire.Nodes, n.Wire.NodesKnown = deviceAddresses(o.Nodes), o.Nodes != nil
	ranked, bad := rank(base, o)
	cgroups := claimedCgroups(o.Pods)
	verdicts := make([]Verdict, 0, len(o.Pods))
	for _, pod := range o.Pods {
		v := optIn(pod, namespaces[pod.Namespace])
		if !v.OptedIn && !pod.HostNetwork {
			verdicts = append(verdicts, v) // most pods of most nodes
			continue
		}
		c, rules, limited := podConfig(base, pod, ranked[pod.Namespace])
		if pod.HostNetwork {
			v = hostOptIn(pod, c.Policies, cgroups)
		}
		if v.OptedIn && pod.HostNetwork {
			n.HostPods = append(n.HostPods, pod.hostPod())
		}
		if v.OptedIn {
			c.Unresolved = unresolvedOf(pod, o.Unresolved)
			n.Pods[PodName{pod.Namespace, pod.Name}] = c
			v.Settings, v.Rules, v.Limited = c.Settings, rules, limited
			for _, p := range c.Policies {
				v.Policies = append(v.Policies, p.Name)
				v.Required = v.Required || p.Mode == ModeRequired
			}
		}
		verdicts = append(verdicts, v)
	}
	sortHostPods(n.HostPods)
	return &n, verdicts, bad
}

// deviceAddresses are the valid addresses of nodes' devices. A device with any other
// address cannot send.
func deviceAddresses(nodes []NodeObject) []netip.Addr {
	var out []netip.Addr
	for _, n := range nodes {
		for _, s := range n.Addresses[:min(len(n.Addresses), maxNodeAddresses)] {
			a, err := netip.ParseAddr(s)
			if a = a.Unmap(); err == nil && a.Zone() == "" && (a.IsGlobalUnicast() || a.IsLinkLocalUnicast()) {
				out = append(out, a)
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// optIn decides whether a pod in a network of its own is opted in; namespace is the annotation of its namespace.
func optIn(pod PodObject, namespace *string) Verdict {
	v := Verdict{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, NodeUID: pod.nodeUID()}
	value, whose := pod.Enabled, "the pod"
	if value == nil {
		value, whose = namespace, "namespace "+pod.Namespace
	}
	switch {
	case pod.Enabled == nil && pod.Claimed:
		v.OptedIn, v.Because = true, "the pod claims an RDMA device"
	case value == nil:
		v.Because = fmt.Sprintf("neither the pod nor its namespace has the annotation %s", v1alpha1.AnnotationEnabled)
	case *value == "true":
		v.OptedIn, v.Because = true, fmt.Sprintf("annotation of %s", whose)
	case *value == "false":
		v.Because = fmt.Sprintf("annotation of %s", whose)
	default:
		v.BadAnnotation = true
		v.Because = fmt.Sprintf("annotation %s of %s is %q, want \"true\" or \"false\" in quotes", v1alpha1.AnnotationEnabled, whose, clipped(*value))
	}
	return v
}

// clipped shortens a value of an object for a message.
func clipped(s string) string {
	if len(s) > maxShownValue {
		s = strings.ToValidUTF8(s[:maxShownValue], "") + "..."
	}
	return s
}

// rankedPolicy is a policy with its selector.
type rankedPolicy struct {
	object   *v1alpha1.SMCRPolicy
	selector labels.Selector
	policy   Policy
}

// rank translates the policies of each namespace and sorts them by rank.
func rank(base *Node, o Objects) (map[string][]rankedPolicy, []*PolicyError) {
	found, generations := map[policyKey][]netip.Addr{}, map[policyKey][]int64{}
	for _, s := range o.PeerSlices {
		k := policyKey{s.Namespace, s.Policy}
		generations[k] = append(generations[k], s.PolicyGeneration)
		for _, text := range s.Addresses {
			if a, err := netip.ParseAddr(text); err == nil {
				found[k] = append(found[k], a.Unmap().WithZone(""))
			}
		}
	}
	var bad []*PolicyError
	out := map[string][]rankedPolicy{}
	for i := range o.Policies {
		object := &o.Policies[i]
		r := rankedPolicy{object: object}
		k := keyOf(object)
		var err error
		if r.selector, err = object.Spec.PodSelector.Selector(); err == nil {
			r.policy, err = policyOf(base, object, found[k])
		}
		if peers := object.Spec.Peers; peers != nil && len(peers.Selectors) > 0 {
			r.policy.Version = versionOf(object, generations[k])
		}
		if err != nil {
			bad = append(bad, &PolicyError{object.Namespace, object.Name, err})
			continue
		}
		out[object.Namespace] = append(out[object.Namespace], r)
	}
	for _, rs := range out {
		slices.SortFunc(rs, func(a, b rankedPolicy) int { return v1alpha1.CompareRank(a.object, b.object) })
	}
	return out, bad
}

// versionOf is the version of a policy with peer selectors, whose slices are of the given generations of it.
func versionOf(object *v1alpha1.SMCRPolicy, slicesOf []int64) string {
	v := fmt.Sprintf("%s/%d", object.UID, object.Generation)
	if slices.ContainsFunc(slicesOf, func(g int64) bool { return g != object.Generation }) {
		v += " with peers of another generation" // some that the policy selects no more, perhaps
	}
	return v
}

// policyOf translates a policy. found are the addresses of the pods that its peer
// selectors select.
func policyOf(base *Node, object *v1alpha1.SMCRPolicy, found []netip.Addr) (Policy, error) {
	p := Policy{Name: object.Name}
	if object.Spec.Mode == v1alpha1.ModeRequired {
		p.Mode = ModeRequired
	}
	switch object.Spec.Datapath {
	case v1alpha1.DatapathKernel:
		p.Datapath = DatapathKernel
	case v1alpha1.DatapathKernelIfAvailable:
		p.Datapath = DatapathKernelIfAvailable
	case v1alpha1.DatapathAgent:
	}
	for i, port := range object.Spec.Ports {
		r := PortRange{First: uint16(port.Port), Last: uint16(port.Port)}
		if port.EndPort != nil {
			r.Last = uint16(*port.EndPort)
		}
		if port.Port < 1 || port.Port > 1<<16-1 || port.EndPort != nil && (*port.EndPort < port.Port || *port.EndPort > 1<<16-1) {
			return Policy{}, fmt.Errorf("spec.ports[%d] is no range of ports: want ports from 1 to 65535, and endPort not below port", i)
		}
		p.Ports = append(p.Ports, r)
	}
	peers := object.Spec.Peers
	if peers == nil {
		p.Peers, p.Except = base.DefaultPeers.CIDRs, base.DefaultPeers.Except
		return p, nil
	}
	var err error
	if p.Peers, err = prefixesOf("cidrs", peers.CIDRs); err != nil {
		return Policy{}, err
	}
	if p.Except, err = prefixesOf("except", peers.Except); err != nil {
		return Policy{}, err
	}
	if len(peers.CIDRs) == 0 && len(peers.Selectors) == 0 {
		p.Peers = base.DefaultPeers.CIDRs
		p.Except = append(p.Except, base.DefaultPeers.Except...)
	}
	if err := checkSelectors(peers.Selectors); err != nil {
		return Policy{}, err
	}
	if len(peers.Selectors) > 0 {
		slices.SortFunc(found, netip.Addr.Compare)
		p.Addresses = slices.Compact(found)
		p.NoPeers = len(p.Addresses) == 0 && len(p.Peers) == 0
	}
	return p, nil
}

// checkSelectors returns what is wrong with peer selectors, which the controller does not resolve then.
func checkSelectors(selectors []v1alpha1.PeerSelector) error {
	for i, p := range selectors {
		for _, s := range []*v1alpha1.LabelSelector{p.PodSelector, p.NamespaceSelector} {
			if s == nil {
				continue
			}
			if _, err := s.Selector(); err != nil {
				return fmt.Errorf("spec.peers.selectors[%d]: %w", i, err)
			}
		}
	}
	return nil
}

func prefixesOf(field string, cidrs []v1alpha1.CIDR) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for i, c := range cidrs {
		p, err := netip.ParsePrefix(string(c))
		if err != nil || p.Addr().Is4In6() {
			return nil, fmt.Errorf("spec.peers.%s[%d]: %q is no CIDR such as 10.0.0.0/8", field, i, clipped(string(c)))
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// unresolvedOf names the policies that select the pod and whose peers are not resolved yet.
func unresolvedOf(pod PodObject, unresolved []v1alpha1.SMCRPolicy) (names []string) {
	for i := range unresolved {
		if p := &unresolved[i]; selects(p, pod) {
			names = append(names, p.Name)
		}
	}
	return names
}

// selects says whether a policy selects the pod.
func selects(p *v1alpha1.SMCRPolicy, pod PodObject) bool {
	s, err := p.Spec.PodSelector.Selector()
	return err == nil && p.Namespace == pod.Namespace && s.Matches(labels.Set(pod.Labels))
}

// podConfig is the configuration of an opted-in pod. rules names the policies as they are now, and limited says where the first policy
// asks for more than the operator lets policies give.
func podConfig(base *Node, pod PodObject, ranked []rankedPolicy) (c PodConfig, rules, limited string) {
	c = PodConfig{UID: pod.nodeUID(), Settings: base.settings()}
	for _, r := range ranked {
		if !r.selector.Matches(labels.Set(pod.Labels)) {
			continue
		}
		if len(c.Policies) == 0 {
			c.Settings, limited = settingsOf(base, &r.object.Spec)
			if limited != "" {
				limited = fmt.Sprintf("SMCRPolicy %s asks for more than policies may give to a pod: %s; raise budgets.podMax of the agents, or lower budget of the policy", r.object.Name, limited)
			}
		}
		c.Policies = append(c.Policies, r.policy)
		rules += fmt.Sprintf("%s/%d\n", r.object.UID, r.object.Generation)
	}
	if len(c.Policies) == 0 {
		c.Policies = []Policy{{Name: DefaultPolicy, Peers: base.DefaultPeers.CIDRs, Except: base.DefaultPeers.Except}}
	}
	return c, rules, limited
}

// settingsOf are the settings that a policy gives to a pod. Fields that the policy leaves
// out are those of base. Where the policy asks for more than base.PodMax, the pod gets
// base.PodMax, and limited says so.
func settingsOf(base *Node, spec *v1alpha1.SMCRPolicySpec) (s Settings, limited string) {
	s = base.settings()
	if b := spec.Buffers; b != nil {
		s.RMBEBytes = bufferBytes(b.RMBE, s.RMBEBytes)
		s.SendBufferBytes = bufferBytes(b.Send, s.SendBufferBytes)
	}
	if b := spec.Budget; b != nil {
		var over []string
		if b.Memory != nil {
			most := base.PodMax.MemoryBytes
			s.Budget.MemoryBytes = memoryBytes(b.Memory, most)
			// As far as a float64 is inexact no budget reaches.
			if b.Memory.AsApproximateFloat64() > float64(most) {
				over = append(over, fmt.Sprintf("%s of memory, and gets %d bytes", b.Memory, most))
			}
		}
		if b.Connections != nil {
			s.Budget.Conns = max(0, min(int(*b.Connections), base.PodMax.Conns))
			if most := base.PodMax.Conns; int(*b.Connections) > most {
				over = append(over, fmt.Sprintf("%d connections, and gets %d", *b.Connections, most))
			}
		}
		limited = strings.Join(over, "; ")
	}
	s.SingleLink = spec.LinkRedundancy == v1alpha1.LinksSingle
	s.Shared = spec.Isolation == v1alpha1.IsolationNamespace
	if len(spec.Transports) > 0 && !slices.ContainsFunc(base.Devices, func(d Device) bool { return slices.Contains(spec.Transports, d.Transport()) }) {
		s.Mismatch = MismatchTransport
	}
	if len(spec.Transports) > 0 && !slices.Contains(spec.Transports, v1alpha1.TransportHardware) {
		s.MismatchOwn = MismatchTransport
	}
	if v1, v2 := slices.Contains(spec.Versions, v1alpha1.VersionV1), slices.Contains(spec.Versions, v1alpha1.VersionV2); v1 != v2 {
		want := VersionsV1
		if v2 {
			want = VersionsV2
		}
		if base.Versions != VersionsBoth && base.Versions != want {
			s.Mismatch, s.MismatchOwn = MismatchVersion, MismatchVersion
		}
		s.Versions = want
	}
	return s, limited
}

// memoryBytes is an amount of memory in bytes, at least 0 and at most most. Quantities go
// far beyond int64, and their Value is 0 there.
func memoryBytes(q *resource.Quantity, most int) int {
	if q.AsApproximateFloat64() >= float64(most) {
		return most
	}
	return int(max(0, q.Value()))
}

// Transport is the kind of the device as policies name it.
func (d Device) Transport() v1alpha1.Transport {
	if d.Soft() {
		return v1alpha1.TransportSoftwareRoCE
	}
	return v1alpha1.TransportHardware
}

// bufferBytes reads a buffer size of a policy. The API server has checked it; otherwise is
// returned if it is wrong all the same.
func bufferBytes(size v1alpha1.BufferSize, otherwise int) int {
	n, err := parseSize(string(size) + "B")
	if err != nil || n < minBufferBytes || n > maxBufferBytes || n&(n-1) != 0 {
		return otherwise
	}
	return n
}
