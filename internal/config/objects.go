// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// DefaultPolicy is the name of the built-in policy of opted-in pods that no
// policy of their namespace selects. No object can have it.
const DefaultPolicy = "(default)"

// Objects are the objects of a cluster that one node's configuration is made
// of. They have only what is needed here, so that a file can hold them.
type Objects struct {
	// Pods are those of the node.
	Pods []PodObject `json:"pods"`
	// Namespaces are at least those of the pods.
	Namespaces []NamespaceObject        `json:"namespaces"`
	Policies   []v1alpha1.SMCRPolicy    `json:"policies"`
	PeerSlices []v1alpha1.SMCRPeerSlice `json:"peerSlices"`
	// Nodes are the other nodes; nil: they are not known.
	Nodes []NodeObject `json:"nodes"`
}

// NodeObject is an SMCRNode of another node.
type NodeObject struct {
	Name string `json:"name"`
	// Addresses are those of its RDMA devices, as it says.
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
	// Claimed says that the pod has a device of the node by a ResourceClaim.
	Claimed bool `json:"claimed,omitempty"`
}

// NamespaceObject is a namespace.
type NamespaceObject struct {
	Name    string  `json:"name"`
	Enabled *string `json:"enabled,omitempty"` // annotation smcr.io/enabled
}

// Verdict is what became of a pod.
type Verdict struct {
	Namespace, Name, UID string
	// OptedIn says that the pod is to be accelerated; Because says why, or why
	// not.
	OptedIn bool
	Because string
	// BadAnnotation is set when an annotation is neither true nor false.
	BadAnnotation bool
	// Policies are the policies that select an opted-in pod, by rank.
	Policies []string
	// Limited says what the first policy asks for beyond what the operator lets
	// policies give to a pod; "" if nothing.
	Limited string
	// Required says that one of them has that mode.
	Required bool
	Settings Settings
}

// PolicyError is a policy that cannot be used. The others are.
type PolicyError struct {
	Namespace, Name string
	Err             error
}

func (e *PolicyError) Error() string {
	return fmt.Sprintf("policy %s/%s is not used: %v", e.Namespace, e.Name, e.Err)
}

func (e *PolicyError) Unwrap() error { return e.Err }

// FromObjects returns base with what the objects want in it, a verdict for
// each pod in the order of the pods, and the policies that cannot be used.
//
// A pod opts in by its annotation, else by a claim on one of the node's devices,
// else by the annotation of its namespace; a value that is neither true nor false
// means no. Pods in the host's network never do. The
// policies of its namespace that select an opted-in pod are ranked by priority,
// age and name. The first that selects a connection decides it; the first of
// all gives the settings of the pod. Without any the built-in policy decides:
// Prefer, all ports, and the peers of base.
func FromObjects(base *Node, o Objects) (*Node, []Verdict, []*PolicyError) {
	n := *base
	n.Policies, n.Pods = nil, make(map[PodName]PodConfig, len(o.Pods))
	namespaces := map[string]*string{}
	for _, ns := range o.Namespaces {
		namespaces[ns.Name] = ns.Enabled
	}
	n.Wire.Nodes, n.Wire.NodesKnown = deviceAddresses(o.Nodes), o.Nodes != nil
	ranked, bad := rank(base, o)
	verdicts := make([]Verdict, 0, len(o.Pods))
	for _, pod := range o.Pods {
		v := optIn(pod, namespaces[pod.Namespace])
		if v.OptedIn {
			c, limited := podConfig(base, pod, ranked[pod.Namespace])
			n.Pods[PodName{pod.Namespace, pod.Name}] = c
			v.Settings, v.Limited = c.Settings, limited
			for _, p := range c.Policies {
				v.Policies = append(v.Policies, p.Name)
				v.Required = v.Required || p.Mode == ModeRequired
			}
		}
		verdicts = append(verdicts, v)
	}
	return &n, verdicts, bad
}

// deviceAddresses are the addresses of nodes' devices. A device without a good
// one is none that could send.
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

// optIn reads the annotations of a pod and its namespace.
func optIn(pod PodObject, namespace *string) Verdict {
	v := Verdict{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	value, whose := pod.Enabled, "the pod"
	if value == nil {
		value, whose = namespace, "namespace "+pod.Namespace
	}
	switch {
	case pod.HostNetwork:
		v.Because = "the pod is in the host's network"
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

// clipped shortens what somebody wrote for a message.
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

// rank translates the policies of each namespace and brings them into order.
func rank(base *Node, o Objects) (map[string][]rankedPolicy, []*PolicyError) {
	type key struct{ namespace, policy string }
	found := map[key][]netip.Addr{}
	for _, s := range o.PeerSlices {
		k := key{s.Namespace, s.Policy}
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
		var err error
		if r.selector, err = object.Spec.PodSelector.Selector(); err == nil {
			r.policy, err = policyOf(base, object, found[key{object.Namespace, object.Name}])
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

// policyOf translates which connections a policy selects.
func policyOf(base *Node, object *v1alpha1.SMCRPolicy, found []netip.Addr) (Policy, error) {
	p := Policy{Name: object.Name}
	if object.Spec.Mode == v1alpha1.ModeRequired {
		p.Mode = ModeRequired
	}
	for i, port := range object.Spec.Ports {
		r := PortRange{First: uint16(port.Port), Last: uint16(port.Port)}
		if port.EndPort != nil {
			r.Last = uint16(*port.EndPort)
		}
		if port.Port < 1 || port.Port > 1<<16-1 || port.EndPort != nil && (*port.EndPort < port.Port || *port.EndPort > 1<<16-1) {
			return Policy{}, fmt.Errorf("spec.ports[%d] is no range of ports", i)
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
	if len(peers.Selectors) > 0 {
		slices.SortFunc(found, netip.Addr.Compare)
		p.Addresses = slices.Compact(found)
		p.NoPeers = len(p.Addresses) == 0 && len(p.Peers) == 0
	}
	return p, nil
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

// podConfig picks the policies of an opted-in pod, and its settings. limited
// says what of these is less than the policy wants.
func podConfig(base *Node, pod PodObject, ranked []rankedPolicy) (c PodConfig, limited string) {
	c = PodConfig{UID: pod.UID, Settings: base.settings()}
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
	}
	if len(c.Policies) == 0 {
		c.Policies = []Policy{{Name: DefaultPolicy, Peers: base.DefaultPeers.CIDRs, Except: base.DefaultPeers.Except}}
	}
	return c, limited
}

// settingsOf are the settings that a policy wants for a pod. What it leaves
// out is as in base; nothing goes beyond what the operator lets policies give,
// and limited says where they wanted to.
func settingsOf(base *Node, spec *v1alpha1.SMCRPolicySpec) (s Settings, limited string) {
	s = base.settings()
	if b := spec.Buffers; b != nil {
		s.RMBEBytes = bufferBytes(b.RMBE, s.RMBEBytes)
		s.SendBufferBytes = bufferBytes(b.Send, s.SendBufferBytes)
	}
	if b := spec.Budget; b != nil {
		var over []string
		if b.Memory != nil {
			s.Budget.MemoryBytes = int(max(0, min(b.Memory.Value(), int64(base.PodMax.MemoryBytes))))
			if most := base.PodMax.MemoryBytes; b.Memory.Value() > int64(most) {
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
		s.Bar = BarTransport
	}
	if len(spec.Transports) > 0 && !slices.Contains(spec.Transports, v1alpha1.TransportHardware) {
		s.BarOwn = BarTransport
	}
	if v1, v2 := slices.Contains(spec.Versions, v1alpha1.VersionV1), slices.Contains(spec.Versions, v1alpha1.VersionV2); v1 != v2 {
		want := VersionsV1
		if v2 {
			want = VersionsV2
		}
		if base.Versions != VersionsBoth && base.Versions != want {
			s.Bar, s.BarOwn = BarVersion, BarVersion
		}
		s.Versions = want
	}
	return s, limited
}

// Transport is the kind of the device in the words of policies.
func (d Device) Transport() v1alpha1.Transport {
	if d.Soft() {
		return v1alpha1.TransportSoftwareRoCE
	}
	return v1alpha1.TransportHardware
}

// bufferBytes reads a size, which the API server has checked.
func bufferBytes(size v1alpha1.BufferSize, otherwise int) int {
	n, err := parseSize(string(size) + "B")
	if err != nil || n < minBufferBytes || n > maxBufferBytes || n&(n-1) != 0 {
		return otherwise
	}
	return n
}
