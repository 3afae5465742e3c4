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
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// UsageError is a mistake in the question: a name or an address that cannot be read.
type UsageError struct{ Text string }

func (e *UsageError) Error() string { return e.Text }

func usage(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

// A ref names a pod or a Service.
type ref struct{ namespace, name string }

func (r ref) String() string { return r.namespace + "/" + r.name }

// OptIn says whether a pod is opted in, and why.
type OptIn struct {
	Enabled bool `json:"enabled"`
	// Unknown says that the annotations and claims that decide could not be read, and that the
	// pod's agent did not say whether the pod is opted in, either.
	Unknown bool `json:"unknown,omitempty"`
	// By is "pod", "claim", "namespace", "host network", "agent" or "nothing".
	By string `json:"by"`
	// HostNetwork says that the pod is in its node's network. There only its own annotation opts
	// it in, and only onto the kernel's datapath.
	HostNetwork bool `json:"hostNetwork,omitempty"`
	// Value is the value of the annotation.
	Value string `json:"value,omitempty"`
	// Detail says what is wrong with the value, or why it could not be read.
	Detail string `json:"detail,omitempty"`
}

// optIn reads the annotations as agents do.
func (c *Cluster) optIn(ctx context.Context, p *corev1.Pod) OptIn {
	if p.Spec.HostNetwork {
		return hostOptIn(p)
	}
	if v, ok := p.Annotations[v1alpha1.AnnotationEnabled]; ok {
		return byAnnotation("pod", v)
	}
	claims, unread := c.claimsDevice(ctx, p)
	if claims {
		return OptIn{Enabled: true, By: "claim"}
	}
	ns, err := c.client.CoreV1().Namespaces().Get(ctx, p.Namespace, metav1.GetOptions{})
	if err != nil {
		return OptIn{Unknown: true, By: "nothing", Detail: fmt.Sprintf("the annotations of namespace %s are not known: %v", p.Namespace, err)}
	}
	o := OptIn{By: "nothing"}
	if v, ok := ns.Annotations[v1alpha1.AnnotationEnabled]; ok {
		o = byAnnotation("namespace", v)
	}
	if unread != nil && !o.Enabled { // the claim would count more than the namespace
		return OptIn{Unknown: true, By: "nothing", Detail: fmt.Sprintf("whether the pod claims an RDMA device is not known: %v", unread)}
	}
	return o
}

// learn sets the opt-in by what the agent answers about the pod.
func (o *OptIn) learn(pod string, e *agentapi.Explanation) {
	switch {
	case e.Pod != pod, e.Code == agentapi.CodeNotAttached:
	case e.Code == agentapi.CodeOptedOut:
		*o = OptIn{By: "agent", Detail: "its agent says so"}
	default:
		*o = OptIn{Enabled: true, By: "agent"}
	}
}

// hostOptIn is the opt-in of a pod in its node's network, by its annotation. Only its agent knows
// whether the policies put it on the kernel's datapath.
func hostOptIn(p *corev1.Pod) OptIn {
	o := OptIn{By: "host network", Detail: "the pod is in its node's network, and neither the annotation of its namespace nor a claim counts there"}
	if v, ok := p.Annotations[v1alpha1.AnnotationEnabled]; ok {
		o = byAnnotation("pod", v)
	}
	o.HostNetwork = true
	return o
}

// claimsDevice says whether a pod has an RDMA device through a claim. If no claim that can be read has
// one, unread says why others could not be read. If the user may not read claims, the status that the
// pod's agent writes is the sign: a pod that is not opted in otherwise has it only because of a claim.
func (c *Cluster) claimsDevice(ctx context.Context, p *corev1.Pod) (claims bool, unread error) {
	for _, name := range claimsOf(p) {
		claim, err := c.client.ResourceV1().ResourceClaims(p.Namespace).Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsForbidden(err) && p.Annotations[v1alpha1.AnnotationStatus] != "":
			return true, nil
		case apierrors.IsNotFound(err):
			continue
		case err != nil:
			unread = err
			continue
		case claim.Status.Allocation == nil:
			continue
		}
		if slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(d resourceapi.DeviceRequestAllocationResult) bool {
			return d.Driver == v1alpha1.DRADriver
		}) {
			return true, nil
		}
	}
	return false, unread
}

// claimsOf are the names of a pod's claims: those that its spec names, those that were made from a
// template, and the claim that was made for its extended resources.
func claimsOf(p *corev1.Pod) (names []string) {
	for _, r := range p.Spec.ResourceClaims {
		name := r.ResourceClaimName
		for _, s := range p.Status.ResourceClaimStatuses {
			if s.Name == r.Name {
				name = s.ResourceClaimName
			}
		}
		if name != nil {
			names = append(names, *name)
		}
	}
	if s := p.Status.ExtendedResourceClaimStatus; s != nil {
		names = append(names, s.ResourceClaimName)
	}
	return names
}

// byAnnotation is the opt-in that the annotation of a pod or its namespace says, which by names.
func byAnnotation(by, value string) OptIn {
	o := OptIn{Enabled: value == "true", By: by, Value: value}
	if value != "true" && value != "false" {
		o.Detail = fmt.Sprintf("%s: %q on the %s is neither \"true\" nor \"false\", and so means off", v1alpha1.AnnotationEnabled, value, by)
	}
	return o
}

// String is the opt-in in a few words.
func (o OptIn) String() string {
	switch {
	case o.Unknown:
		return "not known: " + o.Detail
	case o.Detail != "":
		return "no: " + o.Detail
	case o.By == "agent":
		return "yes: its agent says so"
	case o.By == "claim":
		return "yes: the pod claims an RDMA device"
	case o.By == "nothing":
		return "no: neither the pod nor its namespace has the annotation " + v1alpha1.AnnotationEnabled
	}
	word := "no"
	if o.Enabled {
		word = "yes"
	}
	where := ""
	if o.HostNetwork {
		where = ", which is in its node's network"
	}
	return fmt.Sprintf("%s: %s=%q on the %s%s", word, v1alpha1.AnnotationEnabled, o.Value, o.By, where)
}

// parseRef reads [KIND/][NAMESPACE/]NAME. A name without namespace is in the given one.
func parseRef(s, kind, namespace string) (ref, error) {
	parts := strings.Split(s, "/")
	if len(parts) > 1 && kindOf(parts[0]) == kind {
		parts = parts[1:]
	}
	switch {
	case slices.Contains(parts, ""):
	case len(parts) == 1:
		return ref{namespace, parts[0]}, nil
	case len(parts) == 2:
		return ref{parts[0], parts[1]}, nil
	}
	return ref{}, usage("%q is no %s: want NAME, NAMESPACE/NAME or %s/NAME with --namespace", s, kind, kind)
}

// Kinds of objects that people name, as KIND/NAME. All but pods and Services stand for their pods.
const (
	kindPod         = "pod"
	kindService     = "service"
	kindDeployment  = "deployment"
	kindStatefulSet = "statefulset"
	kindDaemonSet   = "daemonset"
	kindReplicaSet  = "replicaset"
	kindJob         = "job"
)

// kindOf is the kind that a word before a slash means, as for kubectl; "" if it means none.
func kindOf(word string) string {
	switch strings.ToLower(word) {
	case "pod", "pods", "po":
		return kindPod
	case "service", "services", "svc":
		return kindService
	case "deployment", "deployments", "deploy", "deployment.apps", "deployments.apps":
		return kindDeployment
	case "statefulset", "statefulsets", "sts", "statefulset.apps", "statefulsets.apps":
		return kindStatefulSet
	case "daemonset", "daemonsets", "ds", "daemonset.apps", "daemonsets.apps":
		return kindDaemonSet
	case "replicaset", "replicasets", "rs", "replicaset.apps", "replicasets.apps":
		return kindReplicaSet
	case "job", "jobs", "job.batch", "jobs.batch":
		return kindJob
	}
	return ""
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
	r, err := parseRef(name, kindPod, c.namespace)
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

// podByIP looks for the pod that has an address; nil if there is none. ofNode says that pods in their
// node's network have the address, which is the node's. The API server finds pods by their first
// address only. So if it finds none, all pods are read, as a pod of two families has a second one.
func (c *Cluster) podByIP(ctx context.Context, ip netip.Addr) (pod *corev1.Pod, ofNode bool, err error) {
	for _, selector := range []string{"status.podIP=" + ip.String(), ""} {
		pod, ofNode, err = c.podWith(ctx, ip, selector)
		if pod != nil || ofNode || err != nil {
			return pod, ofNode, err
		}
	}
	return nil, false, nil
}

// podWith is podByIP among the pods that the field selector selects.
func (c *Cluster) podWith(ctx context.Context, ip netip.Addr, selector string) (pod *corev1.Pod, ofNode bool, err error) {
	for p, err := range c.list(ctx, metav1.NamespaceAll, metav1.ListOptions{FieldSelector: selector}) {
		if err != nil {
			return nil, false, fmt.Errorf("look for the pod of %s: %w", ip, err)
		}
		// The address of an ended pod may be another pod's now, and pods in the node's network all
		// have the node's address.
		switch {
		case !hasAddresses(p) || !slices.Contains(podIPs(p), ip):
		case p.Spec.HostNetwork:
			ofNode = true
		default:
			return p, false, nil
		}
	}
	return nil, ofNode, nil
}

// hasAddresses says whether a pod's programs may use its addresses. Init containers may, while the pod
// is Pending.
func hasAddresses(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodPending && len(podIPs(p)) > 0
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

// A target is a destination that was resolved.
type target struct {
	kind  string // Address, Pod, Service, Deployment and so on
	name  string // NAMESPACE/NAME, but of an Address
	addrs []netip.AddrPort
	peers []peer
	note  string
}

// A peer is an endpoint behind a target that is a pod of the cluster. A pod of two families
// is there twice.
type peer struct {
	pod  *corev1.Pod
	addr netip.AddrPort
}

// resolve finds out what a destination is: an address, a pod, a Service, or another object
// that stands for its pods. Names without namespace are in the given one, as for the pod that
// connects.
func (c *Cluster) resolve(ctx context.Context, dst, namespace string) (target, error) {
	host, port, err := net.SplitHostPort(dst)
	if err != nil || host == "" || port == "" {
		return target{}, usage("destination %q: want HOST:PORT, where HOST is an address ([ADDRESS] for IPv6), SERVICE[.NAMESPACE], "+
			"POD.SERVICE[.NAMESPACE], or KIND/NAME, such as pod/NAME and deploy/NAME", dst)
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		return c.resolveAddress(ctx, ip.Unmap(), port)
	}
	word, rest, slash := strings.Cut(host, "/")
	switch kind := kindOf(word); {
	case !slash:
		return c.resolveName(ctx, host, port, namespace)
	case kind == kindService && !strings.Contains(rest, "/"):
		return c.resolveName(ctx, rest, port, namespace)
	case kind == kindService:
		r, err := parseRef(host, kindService, namespace)
		if err != nil {
			return target{}, err
		}
		return c.resolveService(ctx, r, port)
	case kind != "" && kind != kindPod:
		return c.resolveWorkload(ctx, host, kind, port, namespace)
	}
	return c.resolvePod(ctx, host, port, namespace)
}

// resolveName resolves a name as the cluster's DNS does for a pod of the namespace: SERVICE,
// SERVICE.NAMESPACE, POD.SERVICE and POD.SERVICE.NAMESPACE, the ones with a namespace also with
// .svc and the cluster's domain behind.
func (c *Cluster) resolveName(ctx context.Context, host, port, namespace string) (target, error) {
	labels := strings.Split(strings.TrimSuffix(host, "."), ".")
	full := slices.Index(labels, "svc")
	switch n := len(labels); {
	case slices.Contains(labels, ""):
		return target{}, usage("%q is no name of a Service or a pod", host)
	case n == 1:
		return c.resolveService(ctx, ref{namespace, labels[0]}, port)
	case n == 2:
		t, err := c.resolveService(ctx, ref{labels[1], labels[0]}, port)
		if IsUsage(err) { // perhaps POD.SERVICE
			if t, err := c.resolvePodOf(ctx, ref{namespace, labels[1]}, labels[0], port); err == nil {
				return t, nil
			}
		}
		return t, err
	case full == 2:
		return c.resolveService(ctx, ref{labels[1], labels[0]}, port)
	case full == 3 || full < 0 && n == 3:
		t, err := c.resolvePodOf(ctx, ref{labels[2], labels[1]}, labels[0], port)
		if !IsUsage(err) || full == 3 {
			return t, err
		}
	}
	return target{}, usage("destination %q is no Service and no pod of one: names outside the cluster are not looked up; give the address", host)
}

// resolvePodOf resolves the name that a pod has in a headless Service, POD.SERVICE: that of
// one of a StatefulSet, for example.
func (c *Cluster) resolvePodOf(ctx context.Context, service ref, host, port string) (target, error) {
	p, err := c.pod(ctx, ref{service.namespace, host})
	if err != nil {
		return target{}, err
	}
	if p.Spec.Subdomain != service.name {
		return target{}, usage("pod %s/%s has no name in Service %s: its spec.subdomain is %q", p.Namespace, p.Name, service, p.Spec.Subdomain)
	}
	return targetOf(p, port)
}

// resolveWorkload resolves an object that stands for its pods.
func (c *Cluster) resolveWorkload(ctx context.Context, name, kind, port, namespace string) (target, error) {
	r, err := parseRef(name, kind, namespace)
	if err != nil {
		return target{}, err
	}
	pods, err := c.podsOf(ctx, r, kind)
	if err != nil {
		return target{}, err
	}
	t := target{kind: strings.ToUpper(kind[:1]) + kind[1:], name: r.String()}
	for i := range pods {
		one, err := targetOf(&pods[i], port)
		switch {
		case err != nil && len(podIPs(&pods[i])) > 0: // the port
			return target{}, err
		case err != nil:
			continue
		case len(t.peers) == maxPeers:
			t.note = fmt.Sprintf("%d further pods are of %s %s", len(pods)-i, kind, r)
			return t, nil
		}
		t.addrs, t.peers = append(t.addrs, one.addrs...), append(t.peers, one.peers...)
	}
	if len(t.addrs) == 0 {
		return target{}, usage("no pod of %s %s runs", kind, r)
	}
	return t, nil
}

// podsOf returns the running pods of a Deployment or the like, or behind a Service, by their
// names.
func (c *Cluster) podsOf(ctx context.Context, r ref, kind string) ([]corev1.Pod, error) {
	selector, err := c.selectorOf(ctx, r, kind)
	if apierrors.IsNotFound(err) {
		return nil, usage("there is no %s %s in namespace %s", kind, r.name, r.namespace)
	}
	if err != nil {
		return nil, fmt.Errorf("get %s %s: %w", kind, r, err)
	}
	var pods []corev1.Pod
	for p, err := range c.list(ctx, r.namespace, metav1.ListOptions{LabelSelector: selector, FieldSelector: "status.phase=" + string(corev1.PodRunning)}) {
		if err != nil {
			return nil, fmt.Errorf("list the pods of %s %s: %w", kind, r, err)
		}
		if p.DeletionTimestamp == nil {
			pods = append(pods, *p)
		}
	}
	slices.SortFunc(pods, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods, nil
}

// selectorOf returns what selects the pods of an object.
func (c *Cluster) selectorOf(ctx context.Context, r ref, kind string) (string, error) {
	var s *metav1.LabelSelector
	apps, get := c.client.AppsV1(), metav1.GetOptions{}
	switch kind {
	case kindDeployment:
		o, err := apps.Deployments(r.namespace).Get(ctx, r.name, get)
		if err != nil {
			return "", err
		}
		s = o.Spec.Selector
	case kindStatefulSet:
		o, err := apps.StatefulSets(r.namespace).Get(ctx, r.name, get)
		if err != nil {
			return "", err
		}
		s = o.Spec.Selector
	case kindDaemonSet:
		o, err := apps.DaemonSets(r.namespace).Get(ctx, r.name, get)
		if err != nil {
			return "", err
		}
		s = o.Spec.Selector
	case kindReplicaSet:
		o, err := apps.ReplicaSets(r.namespace).Get(ctx, r.name, get)
		if err != nil {
			return "", err
		}
		s = o.Spec.Selector
	case kindJob:
		o, err := c.client.BatchV1().Jobs(r.namespace).Get(ctx, r.name, get)
		if err != nil {
			return "", err
		}
		s = o.Spec.Selector
	default:
		o, err := c.client.CoreV1().Services(r.namespace).Get(ctx, r.name, get)
		if err != nil {
			return "", err
		}
		if len(o.Spec.Selector) == 0 {
			return "", usage("Service %s selects no pods", r)
		}
		s = &metav1.LabelSelector{MatchLabels: o.Spec.Selector}
	}
	selector, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return "", fmt.Errorf("read its selector: %w", err)
	}
	return selector.String(), nil
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
	// If the user may not list Services and pods, the address alone is the target. Services come
	// first, of which there are fewer.
	s, serr := c.serviceByIP(ctx, ip)
	if s != nil {
		t.kind, t.name = "Service", s.Namespace+"/"+s.Name
		t.peers, t.note = c.endpoints(ctx, s, port)
		return t, nil
	}
	p, ofNode, perr := c.podByIP(ctx, ip)
	switch {
	case p != nil:
		t.kind, t.name = "Pod", p.Namespace+"/"+p.Name
		t.peers = []peer{{p, t.addrs[0]}}
		return t, nil
	case ofNode:
		t.note = fmt.Sprintf("%s is the address of a node: name the pod that listens there, as pod/NAME:%s, and it is asked about, too", ip, port)
	}
	if err := errors.Join(perr, serr); err != nil {
		t.note = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return t, nil
}

func (c *Cluster) resolvePod(ctx context.Context, name, port, namespace string) (target, error) {
	r, err := parseRef(name, kindPod, namespace)
	if err != nil {
		return target{}, err
	}
	p, err := c.pod(ctx, r)
	if err != nil {
		return target{}, err
	}
	return targetOf(p, port)
}

// targetOf is a pod as a destination.
func targetOf(p *corev1.Pod, port string) (target, error) {
	n, err := number(port)
	if err != nil {
		return target{}, err
	}
	t := target{kind: "Pod", name: p.Namespace + "/" + p.Name}
	for _, ip := range podIPs(p) {
		a := netip.AddrPortFrom(ip, n)
		t.addrs, t.peers = append(t.addrs, a), append(t.peers, peer{p, a})
	}
	if len(t.addrs) == 0 {
		return target{}, usage("pod %s has no address: it is %s", t.name, p.Status.Phase)
	}
	return t, nil
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
	pods, more := map[string]*corev1.Pod{}, map[string]bool{} // a Service of two families has a slice for each
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
			r := ref{cmp.Or(e.TargetRef.Namespace, s.Namespace), e.TargetRef.Name}
			p := pods[r.String()]
			if p == nil && len(pods) == maxPeers {
				more[r.String()] = true
				continue
			}
			if p == nil {
				p, err = c.pod(ctx, r)
				var ue *UsageError
				if errors.As(err, &ue) {
					continue // the pod is gone
				}
				if err != nil {
					return out, err.Error()
				}
				pods[r.String()] = p
			}
			out = append(out, peer{p, netip.AddrPortFrom(ip, n)})
		}
	}
	if n := len(more); n > 0 {
		note = fmt.Sprintf("%d further pods are behind Service %s/%s", n, s.Namespace, s.Name)
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
