// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// UsageError is a name or an address that means nothing.
type UsageError struct{ Text string }

func (e *UsageError) Error() string { return e.Text }

func usage(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

// A ref names a pod or a Service.
type ref struct{ namespace, name string }

func (r ref) String() string { return r.namespace + "/" + r.name }

// OptIn says whether a pod is opted in, and what decided.
type OptIn struct {
	Enabled bool `json:"enabled"`
	// By is "pod", "claim", "namespace", "host network" or "nothing".
	By string `json:"by"`
	// Value is the annotation's.
	Value string `json:"value,omitempty"`
	// Detail says what is wrong with it, or why it could not be read.
	Detail string `json:"detail,omitempty"`
}

// optIn reads the annotations as agents do.
func (c *Cluster) optIn(ctx context.Context, p *corev1.Pod) OptIn {
	if p.Spec.HostNetwork {
		return OptIn{By: "host network", Detail: "pods in the node's network are never touched"}
	}
	if v, ok := p.Annotations[v1alpha1.AnnotationEnabled]; ok {
		return judge("pod", v)
	}
	if c.claimsDevice(ctx, p) {
		return OptIn{Enabled: true, By: "claim"}
	}
	ns, err := c.client.CoreV1().Namespaces().Get(ctx, p.Namespace, metav1.GetOptions{})
	if err != nil {
		return OptIn{By: "nothing", Detail: fmt.Sprintf("the annotations of namespace %s are not known: %v", p.Namespace, err)}
	}
	if v, ok := ns.Annotations[v1alpha1.AnnotationEnabled]; ok {
		return judge("namespace", v)
	}
	return OptIn{By: "nothing"}
}

// claimsDevice says whether a pod has an RDMA device by a claim. Who may not read
// claims sees whether the pod's agent reports on it, which it does then.
func (c *Cluster) claimsDevice(ctx context.Context, p *corev1.Pod) bool {
	for _, r := range p.Spec.ResourceClaims {
		name := r.ResourceClaimName
		for _, s := range p.Status.ResourceClaimStatuses {
			if s.Name == r.Name {
				name = s.ResourceClaimName // made by a template
			}
		}
		if name == nil {
			continue
		}
		claim, err := c.client.ResourceV1().ResourceClaims(p.Namespace).Get(ctx, *name, metav1.GetOptions{})
		switch {
		case apierrors.IsForbidden(err) && p.Annotations[v1alpha1.AnnotationStatus] != "":
			return true
		case err != nil || claim.Status.Allocation == nil:
			continue
		}
		if slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(d resourceapi.DeviceRequestAllocationResult) bool {
			return d.Driver == v1alpha1.DRADriver
		}) {
			return true
		}
	}
	return false
}

func judge(by, value string) OptIn {
	o := OptIn{Enabled: value == "true", By: by, Value: value}
	if value != "true" && value != "false" {
		o.Detail = fmt.Sprintf("%s: %q on the %s is neither \"true\" nor \"false\", and so means off", v1alpha1.AnnotationEnabled, value, by)
	}
	return o
}

// String is the opt-in in a few words.
func (o OptIn) String() string {
	switch {
	case o.Detail != "":
		return "no: " + o.Detail
	case o.By == "claim":
		return "yes: the pod claims an RDMA device"
	case o.By == "nothing":
		return "no: neither the pod nor its namespace has the annotation " + v1alpha1.AnnotationEnabled
	}
	word := "no"
	if o.Enabled {
		word = "yes"
	}
	return fmt.Sprintf("%s: %s=%q on the %s", word, v1alpha1.AnnotationEnabled, o.Value, o.By)
}

// parseRef reads [KIND/][NAMESPACE/]NAME.
func (c *Cluster) parseRef(s, kind string) (ref, error) {
	parts := strings.Split(s, "/")
	if len(parts) > 1 && slices.Contains(kinds(kind), parts[0]) {
		parts = parts[1:]
	}
	switch {
	case slices.Contains(parts, ""):
	case len(parts) == 1:
		return ref{c.namespace, parts[0]}, nil
	case len(parts) == 2:
		return ref{parts[0], parts[1]}, nil
	}
	return ref{}, usage("%q is no %s: want NAME, NAMESPACE/NAME or %s/NAME with --namespace", s, kind, kind)
}

func kinds(kind string) []string {
	if kind == "pod" {
		return []string{"pod", "pods", "po"}
	}
	return []string{"service", "services", "svc"}
}

// pod gets a pod.
func (c *Cluster) pod(ctx context.Context, r ref) (*corev1.Pod, error) {
	p, err := c.client.CoreV1().Pods(r.namespace).Get(ctx, r.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, usage("there is no pod %s in namespace %s; kubectl get pods -n %s lists them", r.name, r.namespace, r.namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("get pod %s: %w", r, err)
	}
	return p, nil
}

// PodNode returns NAMESPACE/NAME of a pod and the node that it is on.
func (c *Cluster) PodNode(ctx context.Context, name string) (pod, node string, err error) {
	r, err := c.parseRef(name, "pod")
	if err != nil {
		return "", "", err
	}
	p, err := c.pod(ctx, r)
	switch {
	case err != nil:
		return "", "", err
	case p.Spec.NodeName == "":
		return "", "", usage("pod %s is %s and on no node yet", r, p.Status.Phase)
	}
	return r.String(), p.Spec.NodeName, nil
}

// podByIP looks for the pod that has an address. It is nil if there is none.
func (c *Cluster) podByIP(ctx context.Context, ip netip.Addr) (*corev1.Pod, error) {
	opts := metav1.ListOptions{FieldSelector: "status.podIP=" + ip.String(), Limit: listLimit}
	pods, err := c.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("look for the pod of %s: %w", ip, err)
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		// An ended pod's address may belong to another one, and pods in the
		// node's network share the node's.
		if p.Status.Phase == corev1.PodRunning && !p.Spec.HostNetwork && slices.Contains(podIPs(p), ip) {
			return p, nil
		}
	}
	return nil, nil
}

func podIPs(p *corev1.Pod) (out []netip.Addr) {
	for _, ip := range append([]corev1.PodIP{{IP: p.Status.PodIP}}, p.Status.PodIPs...) {
		if a, err := netip.ParseAddr(ip.IP); err == nil && !slices.Contains(out, a.Unmap()) {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// serviceByIP looks for the Service that has an address. It is nil if there is
// none.
func (c *Cluster) serviceByIP(ctx context.Context, ip netip.Addr) (*corev1.Service, error) {
	opts := metav1.ListOptions{Limit: listLimit}
	for {
		list, err := c.client.CoreV1().Services(metav1.NamespaceAll).List(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("look for the Service of %s: %w", ip, err)
		}
		for i := range list.Items {
			for _, s := range list.Items[i].Spec.ClusterIPs {
				if a, err := netip.ParseAddr(s); err == nil && a == ip {
					return &list.Items[i], nil
				}
			}
		}
		if opts.Continue = list.Continue; opts.Continue == "" {
			return nil, nil
		}
	}
}

// A target is a destination that was understood.
type target struct {
	kind  string // Address, Pod or Service
	name  string // NAMESPACE/NAME of a Pod or Service
	addrs []netip.AddrPort
	peers []peer
	note  string
}

// A peer is an endpoint behind a target that is a pod of the cluster.
type peer struct {
	pod  *corev1.Pod
	addr netip.AddrPort
}

// resolve understands a destination.
func (c *Cluster) resolve(ctx context.Context, dst string) (target, error) {
	host, port, err := net.SplitHostPort(dst)
	if err != nil || host == "" || port == "" {
		return target{}, usage("destination %q: want HOST:PORT, where HOST is an address ([ADDRESS] for IPv6), SERVICE[.NAMESPACE] or pod/NAME", dst)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return c.resolveAddress(ctx, ip.Unmap(), port)
	}
	if strings.Contains(host, "/") {
		if kind, _, _ := strings.Cut(host, "/"); !slices.Contains(kinds("service"), kind) {
			return c.resolvePod(ctx, host, port)
		}
		r, err := c.parseRef(host, "service")
		if err != nil {
			return target{}, err
		}
		return c.resolveService(ctx, r, port)
	}
	// SERVICE, SERVICE.NAMESPACE, SERVICE.NAMESPACE.svc and what the cluster's
	// domain adds.
	labels := strings.Split(strings.TrimSuffix(host, "."), ".")
	r := ref{c.namespace, labels[0]}
	switch {
	case len(labels) == 1:
	case len(labels) == 2 || labels[2] == "svc":
		r.namespace = labels[1]
	default:
		return target{}, usage("destination %q: names outside the cluster are not looked up; give the address", dst)
	}
	return c.resolveService(ctx, r, port)
}

func number(port string) (uint16, error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return 0, usage("port %q: want a number from 1 to 65535, or the name of a port of a Service", port)
	}
	return uint16(n), nil
}

func (c *Cluster) resolveAddress(ctx context.Context, ip netip.Addr, port string) (target, error) {
	n, err := number(port)
	if err != nil {
		return target{}, err
	}
	t := target{kind: "Address", addrs: []netip.AddrPort{netip.AddrPortFrom(ip, n)}}
	// Without the right to look, the address alone will do.
	p, perr := c.podByIP(ctx, ip)
	if p != nil {
		t.kind, t.name = "Pod", p.Namespace+"/"+p.Name
		t.peers = []peer{{p, t.addrs[0]}}
		return t, nil
	}
	s, serr := c.serviceByIP(ctx, ip)
	if s != nil {
		t.kind, t.name = "Service", s.Namespace+"/"+s.Name
		t.peers, t.note = c.endpoints(ctx, s, port)
	}
	if err := errors.Join(perr, serr); err != nil {
		t.note = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return t, nil
}

func (c *Cluster) resolvePod(ctx context.Context, name, port string) (target, error) {
	r, err := c.parseRef(name, "pod")
	if err != nil {
		return target{}, err
	}
	p, err := c.pod(ctx, r)
	if err != nil {
		return target{}, err
	}
	n, err := number(port)
	if err != nil {
		return target{}, err
	}
	ips := podIPs(p)
	if len(ips) == 0 {
		return target{}, usage("pod %s has no address: it is %s", r, p.Status.Phase)
	}
	a := netip.AddrPortFrom(ips[0], n)
	return target{kind: "Pod", name: r.String(), addrs: []netip.AddrPort{a}, peers: []peer{{p, a}}}, nil
}

func (c *Cluster) resolveService(ctx context.Context, r ref, port string) (target, error) {
	s, err := c.client.CoreV1().Services(r.namespace).Get(ctx, r.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return target{}, usage("there is no Service %s in namespace %s; for a pod write pod/NAME, for another namespace NAME.NAMESPACE", r.name, r.namespace)
	}
	if err != nil {
		return target{}, fmt.Errorf("get Service %s: %w", r, err)
	}
	t := target{kind: "Service", name: r.String()}
	sp, err := servicePort(s, port)
	if err != nil {
		return target{}, err
	}
	t.peers, t.note = c.endpoints(ctx, s, port)
	for _, text := range s.Spec.ClusterIPs {
		if ip, err := netip.ParseAddr(text); err == nil { // not "None"
			t.addrs = append(t.addrs, netip.AddrPortFrom(ip, uint16(sp.Port)))
		}
	}
	if len(t.addrs) == 0 { // headless: clients connect to the pods
		for _, p := range t.peers {
			t.addrs = append(t.addrs, p.addr)
		}
	}
	switch {
	case len(t.addrs) > 0:
		return t, nil
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return target{}, usage("Service %s stands for the name %s outside the cluster; give its address", r, s.Spec.ExternalName)
	}
	return target{}, usage("Service %s has no address and no endpoint that is ready: %s", r, cmp.Or(t.note, "does its selector match pods?"))
}

// servicePort finds a port of a Service by number or name.
func servicePort(s *corev1.Service, port string) (corev1.ServicePort, error) {
	var have []string
	for _, p := range s.Spec.Ports {
		if port == p.Name || port == strconv.Itoa(int(p.Port)) {
			if p.Protocol != "" && p.Protocol != corev1.ProtocolTCP {
				return p, usage("port %s of Service %s/%s is %s; SMC-R carries TCP", port, s.Namespace, s.Name, p.Protocol)
			}
			return p, nil
		}
		have = append(have, strings.TrimSpace(fmt.Sprintf("%d %s", p.Port, p.Name)))
	}
	return corev1.ServicePort{}, usage("Service %s/%s has no port %s; it has %s", s.Namespace, s.Name, port, cmp.Or(strings.Join(have, ", "), "none"))
}

// endpoints returns some pods behind a Service that are ready.
func (c *Cluster) endpoints(ctx context.Context, s *corev1.Service, port string) (out []peer, note string) {
	sp, err := servicePort(s, port)
	if err != nil {
		return nil, err.Error()
	}
	found, err := c.client.DiscoveryV1().EndpointSlices(s.Namespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + s.Name, Limit: listLimit,
	})
	if err != nil {
		return nil, fmt.Sprintf("the pods behind Service %s/%s are not known: %v", s.Namespace, s.Name, err)
	}
	more := 0
	for _, es := range found.Items {
		n := targetPort(es, sp.Name)
		for _, e := range es.Endpoints {
			if n == 0 || e.TargetRef == nil || e.TargetRef.Kind != "Pod" || e.Conditions.Ready != nil && !*e.Conditions.Ready || len(e.Addresses) == 0 {
				continue
			}
			ip, err := netip.ParseAddr(e.Addresses[0])
			if err != nil {
				continue
			}
			if len(out) == maxPeers {
				more++
				continue
			}
			p, err := c.pod(ctx, ref{cmp.Or(e.TargetRef.Namespace, s.Namespace), e.TargetRef.Name})
			var ue *UsageError
			if errors.As(err, &ue) {
				continue // gone meanwhile
			}
			if err != nil {
				return out, err.Error()
			}
			out = append(out, peer{p, netip.AddrPortFrom(ip, n)})
		}
	}
	if more > 0 {
		note = fmt.Sprintf("%d further pods are behind Service %s/%s", more, s.Namespace, s.Name)
	}
	return out, note
}

func targetPort(es discoveryv1.EndpointSlice, name string) uint16 {
	for _, p := range es.Ports {
		if p.Port != nil && (p.Name == nil && name == "" || p.Name != nil && *p.Name == name) {
			return uint16(*p.Port)
		}
	}
	return 0
}
