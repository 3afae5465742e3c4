// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

var server apiserver.Shared

func TestMain(m *testing.M) { os.Exit(server.Main(m)) }

// prompt is how soon a change of an object is to be in force.
const prompt = 2 * time.Second

// world is a namespace and a node of the API server.
type world struct {
	t         testing.TB
	client    client.Client
	namespace string
	node      string
	dir       string
	log       *logBuffer
}

type logBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.b.String(), text)
}

func newWorld(t testing.TB) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, corev1.AddToScheme, rbacv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	c, err := client.New(server.Config(t), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, client: c, dir: t.TempDir(), log: &logBuffer{}}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "shop-"}}
	w.create(ns)
	w.namespace, w.node = ns.Name, "node-"+ns.Name
	return w
}

func (w *world) create(o client.Object) {
	w.t.Helper()
	if err := w.client.Create(w.t.Context(), o); err != nil {
		w.t.Fatalf("create %T: %v", o, err)
	}
}

// change reads an object, changes and writes it.
func (w *world) change(o client.Object, f func()) {
	w.t.Helper()
	if err := w.client.Get(w.t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		w.t.Fatal(err)
	}
	f()
	if err := w.client.Update(w.t.Context(), o); err != nil {
		w.t.Fatalf("update %T: %v", o, err)
	}
}

func (w *world) remove(o client.Object) {
	w.t.Helper()
	if err := w.client.Delete(w.t.Context(), o, client.GracePeriodSeconds(0)); err != nil {
		w.t.Fatalf("delete %T: %v", o, err)
	}
}

// pod creates a pod on the node.
func (w *world) pod(name string, change func(*corev1.Pod)) *corev1.Pod {
	w.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, Labels: map[string]string{"app": name}, Annotations: map[string]string{"other": "x"}},
		Spec:       corev1.PodSpec{NodeName: w.node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	if change != nil {
		change(p)
	}
	w.create(p)
	return p
}

func enabled(value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = value }
}

func (w *world) policy(name string, change func(*v1alpha1.SMCRPolicySpec)) *v1alpha1.SMCRPolicy {
	w.t.Helper()
	p := &v1alpha1.SMCRPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	if change != nil {
		change(&p.Spec)
	}
	w.create(p)
	return p
}

func (w *world) base() (*config.Node, error) {
	b, err := os.ReadFile(filepath.Join(w.dir, "node-agent.yaml"))
	if os.IsNotExist(err) {
		b, err = []byte("node:\n  devices: [{soft: {address: node}}]\n"), nil
	}
	if err != nil {
		return nil, err
	}
	return config.ParseOn(config.Machine{Cluster: true, Name: w.node, Address: netip.MustParseAddr("127.0.0.77")}, "t", b)
}

// source starts a source that connects with rc.
func (w *world) source(rc *rest.Config) *Source {
	w.t.Helper()
	s, err := New(Config{
		REST: rc, Node: w.node, Pod: "kube-smcr/agent-x", Base: w.base, StateFile: filepath.Join(w.dir, "policies.json"),
		Log: slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx)
	}()
	w.t.Cleanup(func() {
		cancel()
		<-done
	})
	return s
}

// decides says what is decided for a connection of the pod to 10.1.1.1:80.
func (w *world) decides(s *Source, pod *corev1.Pod) config.Decision {
	n, _ := s.Load()
	id := config.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID)}
	return n.Decide(id, netip.MustParseAddrPort("10.1.1.1:80"))
}

func within(t testing.TB, d time.Duration, cond func() string) time.Duration {
	t.Helper()
	start := time.Now()
	for {
		problem := cond()
		if problem == "" {
			return time.Since(start)
		}
		if time.Since(start) > d {
			t.Fatalf("not within %v: %s", d, problem)
		}
		time.Sleep(5 * time.Millisecond) // polls what the API server's watches bring
	}
}

func (w *world) wait(s *Source, pod *corev1.Pod, what string, want config.Decision) {
	w.t.Helper()
	took := within(w.t, prompt, func() string {
		if got := w.decides(s, pod); got != want {
			return fmt.Sprintf("%s: decided %+v, want %+v", what, got, want)
		}
		return ""
	})
	w.t.Logf("%s: in force after %v", what, took.Round(time.Millisecond))
}

var (
	byDefault = config.Decision{Accelerate: true, Policy: config.DefaultPolicy, Reason: config.ReasonMatch}
	optedOut  = config.Decision{Reason: config.ReasonOptedOut}
)

func TestSource(t *testing.T) {
	w := newWorld(t)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}
	there := w.pod("there", enabled("true"))
	elsewhere := w.pod("elsewhere", func(p *corev1.Pod) {
		enabled("true")(p)
		p.Spec.NodeName = "another-" + w.node
	})
	s := w.source(server.Config(t))
	if n := s.First(t.Context()); len(n.Pods) != 1 || n.Name != w.node || !s.Live() {
		t.Fatalf("first configuration %+v", n)
	}
	if got := w.decides(s, there); got != byDefault {
		t.Errorf("decided %+v", got)
	}
	if got := w.decides(s, elsewhere); got != optedOut {
		t.Errorf("a pod of another node: decided %+v", got)
	}

	plain := w.pod("plain", nil)
	w.wait(s, plain, "no annotation", optedOut)
	w.change(plain, func() { plain.Annotations[v1alpha1.AnnotationEnabled] = "true" })
	w.wait(s, plain, "annotated", byDefault)
	w.change(plain, func() { plain.Annotations[v1alpha1.AnnotationEnabled] = "yes" })
	w.wait(s, plain, "junk", optedOut)
	var verdict config.Verdict
	for _, v := range s.Verdicts() {
		if v.Name == "plain" {
			verdict = v
		}
	}
	if !verdict.BadAnnotation || verdict.UID != string(plain.UID) {
		t.Errorf("verdict %+v", verdict)
	}
	w.change(plain, func() { delete(plain.Annotations, v1alpha1.AnnotationEnabled) })
	w.change(ns, func() { ns.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true"} })
	w.wait(s, plain, "annotated namespace", byDefault)

	// Policies: made, changed, deleted.
	pol := w.policy("p", func(s *v1alpha1.SMCRPolicySpec) {
		s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"app": "plain"}
		s.Mode = v1alpha1.ModeRequired
	})
	w.wait(s, plain, "policy", config.Decision{Accelerate: true, Required: true, Policy: "p", Reason: config.ReasonMatch})
	w.change(pol, func() { pol.Spec.Ports = []v1alpha1.PolicyPort{{Port: 81}} })
	w.wait(s, plain, "other port", config.Decision{Policy: "p", Reason: config.ReasonPort})
	if got := w.decides(s, there); got != byDefault {
		t.Errorf("a pod that the policy does not select: %+v", got)
	}
	w.change(pol, func() {
		pol.Spec.Ports = nil
		pol.Spec.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{}}}}
	})
	within(t, prompt, func() string {
		if n, _ := s.Load(); !slices.Equal(n.UnresolvedFor(config.Pod{Namespace: w.namespace, Name: "plain"}), []string{"p"}) || !w.log.has("waits for the controller") {
			return "nobody waits for the controller"
		}
		return ""
	})
	w.wait(s, plain, "selector without slices", config.Decision{Policy: "p", Reason: config.ReasonPort}) // as before
	yes := true
	slice := &v1alpha1.SMCRPeerSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.namespace, Name: v1alpha1.FirstPeerSlice("p"),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SMCRPolicy", Name: "p", UID: pol.UID, Controller: &yes}},
		},
		Policy: "p", PolicyGeneration: pol.Generation, Addresses: []string{"10.1.1.1"},
	}
	w.create(slice)
	w.wait(s, plain, "peers", config.Decision{Accelerate: true, Required: true, Policy: "p", Reason: config.ReasonMatch})
	w.remove(pol)
	w.wait(s, plain, "policy deleted", byDefault)

	// A pod that goes, and another one of its name.
	old := *plain
	w.remove(plain)
	w.wait(s, &old, "pod deleted", optedOut)
	again := w.pod("plain", enabled("false"))
	w.wait(s, again, "opted out itself", optedOut)
	w.change(again, func() { again.Annotations[v1alpha1.AnnotationEnabled] = "true" })
	w.wait(s, again, "opted in", byDefault)
	if got := w.decides(s, &old); got != optedOut {
		t.Errorf("the earlier pod of that name: %+v", got)
	}
	w.change(again, func() { again.Annotations[v1alpha1.AnnotationStatus] = "Enabled" })
	within(t, prompt, func() string {
		got, versions := s.StatusAnnotations()
		if len(got) != 1 || got[string(again.UID)] != "Enabled" || versions[string(again.UID)] != again.ResourceVersion {
			return fmt.Sprint(got, versions)
		}
		return ""
	})
}

// TestSource_policyBeingDeleted: a policy that is being deleted is in force no more, though somebody's finalizer keeps it, as for the
// controller, which deletes its slices.
func TestSource_policyBeingDeleted(t *testing.T) {
	w := newWorld(t)
	pod := w.pod("p", enabled("true"))
	policy := w.policy("p", func(s *v1alpha1.SMCRPolicySpec) { s.Mode = v1alpha1.ModeRequired })
	w.change(policy, func() { policy.Finalizers = []string{"example.com/waits"} })
	s := w.source(server.Config(t))
	s.First(t.Context())
	w.wait(s, pod, "policy", config.Decision{Accelerate: true, Required: true, Policy: "p", Reason: config.ReasonMatch})
	w.remove(policy)
	w.wait(s, pod, "policy being deleted", byDefault)
	w.change(policy, func() { policy.Finalizers = nil })
}

// TestSource_nodes: the addresses of other nodes' devices are known as soon as
// their SMCRNode is there, changes of anything else in it are no news, and an
// agent that starts without the API server has the last ones.
func TestSource_nodes(t *testing.T) {
	w := newWorld(t)
	has := func(s *Source, addr string) bool {
		n, _ := s.Load()
		return n.Wire.NodesKnown && slices.Contains(n.Wire.Nodes, netip.MustParseAddr(addr))
	}
	wait := func(s *Source, addr string, want bool) {
		t.Helper()
		within(t, prompt, func() string {
			if has(s, addr) != want {
				n, _ := s.Load()
				return fmt.Sprintf("%s among %+v: %t", addr, n.Wire, !want)
			}
			return ""
		})
	}
	node := func(name, addr string) *v1alpha1.SMCRNode {
		n := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.SMCRNodeStatus{
			Devices: []v1alpha1.NodeDevice{{Name: "soft0", Address: addr}},
		}}
		w.create(n)
		t.Cleanup(func() { _ = w.client.Delete(context.Background(), n) }) // most are deleted by then
		return n
	}
	node(w.node, "192.0.2.1")
	other := node("other-"+w.node, "192.0.2.2")
	s := w.source(server.Config(t))
	s.First(t.Context())
	wait(s, "192.0.2.2", true)
	if has(s, "192.0.2.1") {
		t.Error("the node's own address is another node's")
	}
	before, _ := s.Load()
	w.change(other, func() { other.Status.LinkGroups++ })
	joined := node("joined-"+w.node, "2001:db8::3")
	wait(s, "2001:db8::3", true)
	w.change(joined, func() {
		joined.Status.PodDevices = []v1alpha1.NodePodDevice{{ID: "eth7", Address: "192.0.2.7"}, {ID: "eth8"}}
	})
	wait(s, "192.0.2.7", true)
	w.change(joined, func() { joined.Status.Devices[0].OtherAddresses = []string{"192.0.2.8", "192.0.2.9"} })
	wait(s, "192.0.2.9", true)
	w.change(joined, func() { joined.Status.Devices[0].Address = "192.0.2.3" })
	wait(s, "192.0.2.3", true)
	wait(s, "2001:db8::3", false)
	state := filepath.Join(w.dir, "policies.json")
	if err := errors.Join(os.RemoveAll(state), os.MkdirAll(filepath.Join(state, "in the way"), 0o700)); err != nil {
		t.Fatal(err)
	}
	w.remove(other)
	wait(s, "192.0.2.2", false)
	if len(before.Wire.Nodes) == 0 {
		t.Error("a configuration that was in force was changed")
	}

	// What could not be saved is saved later, although nothing changes any more.
	within(t, saveEvery+slowly, func() string {
		s.complain.mu.Lock()
		defer s.complain.mu.Unlock()
		for said := range s.complain.last {
			if strings.HasPrefix(said, notSaved) {
				return ""
			}
		}
		return "nobody complains that the file cannot be written"
	})
	if err := os.RemoveAll(state); err != nil {
		t.Fatal(err)
	}
	within(t, saveEvery+slowly, func() string {
		if b, err := os.ReadFile(state); err != nil || !bytes.Contains(b, []byte("192.0.2.7")) || bytes.Contains(b, []byte("192.0.2.2")) {
			return "the file does not have the last addresses"
		}
		return ""
	})
	away := w.source(&rest.Config{Host: "127.0.0.1:1"})
	if away.First(t.Context()); !has(away, "192.0.2.3") {
		n, _ := away.Load()
		t.Errorf("without the API server: %+v", n.Wire)
	}
	// The file of an earlier version does not know of them.
	b, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	b = bytes.Replace(b, []byte(`"nodes":`), []byte(`"other":`), 1)
	if err := os.WriteFile(state, b, 0o600); err != nil {
		t.Fatal(err)
	}
	old := w.source(&rest.Config{Host: "127.0.0.1:1"})
	if n := old.First(t.Context()); n.Wire.NodesKnown || n.Wire.Nodes != nil {
		t.Errorf("with an older file: %+v", n.Wire)
	}
}

// TestSource_podsAsNode: an agent that has no right on pods reads those of its node,
// with the token of its pod.
func TestSource_podsAsNode(t *testing.T) {
	w := newWorld(t)
	admin, err := kubernetes.NewForConfig(server.Config(t))
	if err != nil {
		t.Fatal(err)
	}
	w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node}})
	w.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "agent"}})
	agent := w.pod("agent", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "agent" })
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "agent-" + w.namespace}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"authentication.k8s.io"}, Resources: []string{"nodes"}, Verbs: []string{"impersonate:associated-node"}},
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"impersonate-on:associated-node:list", "impersonate-on:associated-node:watch"}},
		{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"list", "watch"}},
		{APIGroups: []string{v1alpha1.Group}, Resources: []string{"smcrpolicies", "smcrpeerslices", "smcrnodes"}, Verbs: []string{"list", "watch"}},
	}}
	w.create(role)
	w.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: w.namespace, Name: "agent"}},
	})
	token, err := admin.CoreV1().ServiceAccounts(w.namespace).CreateToken(t.Context(), "agent", &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: agent.Name, UID: agent.UID},
	}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	rc := rest.AnonymousClientConfig(server.Config(t))
	rc.BearerToken = token.Status.Token
	text := "node:\n  podsAsNode: true\n  devices: [{soft: {address: node}}]\n"
	if err := os.WriteFile(filepath.Join(w.dir, "node-agent.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := w.source(rc)
	there := w.pod("there", enabled("true"))
	w.wait(s, there, "a pod of the node", byDefault)
	elsewhere := w.pod("elsewhere", func(p *corev1.Pod) {
		enabled("true")(p)
		p.Spec.NodeName = "another-" + w.node
	})
	later := w.pod("later", enabled("true"))
	w.wait(s, later, "a later pod", byDefault)
	if got := w.decides(s, elsewhere); got != optedOut {
		t.Errorf("a pod of another node: decided %+v", got)
	}
}

// TestSource_finished: a pod that ended needs nothing.
// TestSource_peerNodes: the addresses of the cluster's SMCRNodes name them. One
// that two nodes say they have names neither: one of them does not tell the truth.
func TestSource_peerNodes(t *testing.T) {
	w := newWorld(t)
	s := w.source(server.Config(t))
	named := func(name string, addresses ...string) *v1alpha1.SMCRNode {
		n := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: name + "-of-" + w.namespace}}
		for i, a := range addresses {
			n.Status.Devices = append(n.Status.Devices, v1alpha1.NodeDevice{Name: fmt.Sprint("soft", i), Address: a})
		}
		return n
	}
	ofPods := named("vf")
	ofPods.Status.PodDevices = []v1alpha1.NodePodDevice{{ID: "eth7", State: v1alpha1.PodDeviceInPod, Address: "203.0.113.17"}, {ID: "eth8", State: v1alpha1.PodDeviceUp}}
	kernel := named("kernel", "203.0.113.20")
	kernel.Status.Devices[0].OtherAddresses = []string{"203.0.113.21"}
	all := []*v1alpha1.SMCRNode{
		kernel, named("a", "203.0.113.1", "2001:db8::1"), named("b", "203.0.113.2", ""), named("liar", "203.0.113.2", "203.0.113.9", "junk"), named("twice", "203.0.113.7", "203.0.113.7"), ofPods,
	}
	for _, n := range all {
		w.create(n)
		t.Cleanup(func() { _ = w.client.Delete(context.Background(), n) }) // the server ends with the tests
	}
	want := map[netip.Addr]string{
		netip.MustParseAddr("203.0.113.1"): all[1].Name, netip.MustParseAddr("2001:db8::1"): all[1].Name, netip.MustParseAddr("203.0.113.2"): "",
		netip.MustParseAddr("203.0.113.9"): all[3].Name, netip.MustParseAddr("203.0.113.7"): all[4].Name, netip.MustParseAddr("203.0.113.17"): ofPods.Name,
		netip.MustParseAddr("203.0.113.20"): kernel.Name, netip.MustParseAddr("203.0.113.21"): kernel.Name,
	}
	within(t, prompt, func() string {
		got := map[netip.Addr]string{}
		for a, name := range s.peerNodes() {
			if _, ok := want[a]; ok { // other tests have nodes, too
				got[a] = name
			}
		}
		return cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }))
	})
}

func TestSource_finished(t *testing.T) {
	w := newWorld(t)
	p := w.pod("job", enabled("true"))
	host := w.pod("host", func(p *corev1.Pod) {
		enabled("true")(p)
		p.Spec.HostNetwork = true
	})
	s := w.source(server.Config(t))
	s.First(t.Context())
	w.wait(s, p, "running", byDefault)
	w.wait(s, host, "in the host's network", optedOut)
	p.Status.Phase = corev1.PodSucceeded
	if err := w.client.Status().Update(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	w.wait(s, p, "finished", optedOut)
}

// TestSource_changed: the agent hears of what matters to it and of nothing else.
func TestSource_changed(t *testing.T) {
	w := newWorld(t)
	p := w.pod("a", enabled("true"))
	s := w.source(server.Config(t))
	first := s.First(t.Context())
	w.change(p, func() { p.Annotations["unrelated"] = "x" })
	w.pod("b", nil)
	within(t, prompt, func() string {
		if len(s.Verdicts()) != 2 {
			return "the second pod was not seen"
		}
		return ""
	})
	if n, _ := s.Load(); n != first {
		t.Error("another configuration, though nothing changed")
	}
	select {
	case <-s.Changed():
		t.Error("told of a change that is none")
	default:
	}
	w.policy("p", nil)
	select {
	case <-s.Changed():
	case <-time.After(prompt):
		t.Error("not told of a policy")
	}

	// The file changes too.
	if err := os.WriteFile(filepath.Join(w.dir, "node-agent.yaml"), []byte("node:\n  devices: [{soft: {address: node}}]\n  defaultPeers: {cidrs: [192.0.2.0/24]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Rebase(); err != nil {
		t.Fatal(err)
	}
	w.wait(s, p, "default peers", config.Decision{Policy: "p", Reason: config.ReasonPeer})
	if err := os.WriteFile(filepath.Join(w.dir, "node-agent.yaml"), []byte("node: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Rebase(); err == nil {
		t.Error("a bad file was taken over")
	}

	// One that takes a restart is refused: the agent would refuse what is made with it, also of the cluster's changes.
	if err := os.WriteFile(filepath.Join(w.dir, "node-agent.yaml"), []byte("node:\n  devices: [{soft: {address: node}}]\n  rmbe: 16KiB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Rebase(); err == nil || !strings.Contains(err.Error(), "node.rmbe") {
		t.Errorf("a file that takes a restart: %v", err)
	}
	w.wait(s, p, "default peers still", config.Decision{Policy: "p", Reason: config.ReasonPeer})
}

// TestSource_serverAway: the last configuration stays, and what was missed is
// made up for.
func TestSource_serverAway(t *testing.T) {
	w := newWorld(t)
	p := w.pod("a", enabled("true"))
	proxy, rc := server.NewProxy(t)
	s := w.source(rc)
	s.First(t.Context())
	w.wait(s, p, "at first", byDefault)
	for _, tt := range []struct {
		name  string
		wreck func()
	}{
		{"away", proxy.TakeAway},
		{"errors", func() { proxy.TakeAway(); proxy.GiveBack(); proxy.Answer(http.StatusInternalServerError) }},
		{"slow", func() { proxy.TakeAway(); proxy.GiveBack(); proxy.Delay(300 * time.Millisecond) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := proxy.Refused()
			tt.wreck()
			w.change(p, func() { p.Annotations[v1alpha1.AnnotationEnabled] = "false" })
			if tt.name != "slow" {
				within(t, 10*time.Second, func() string {
					if tt.name == "away" && proxy.Refused() < before+5 || tt.name == "errors" && !w.log.has("watch pods") {
						return "nobody asks"
					}
					return ""
				})
				if got := w.decides(s, p); got != byDefault {
					t.Errorf("decided %+v while the API server is away", got)
				}
			}
			proxy.GiveBack()
			// A watch that failed several times is tried again after a pause.
			within(t, time.Minute, func() string {
				if got := w.decides(s, p); got != optedOut {
					return fmt.Sprintf("decided %+v", got)
				}
				return ""
			})
			w.change(p, func() { p.Annotations[v1alpha1.AnnotationEnabled] = "true" })
			w.wait(s, p, "afterwards", byDefault)
		})
	}
}

// TestSource_restart: an agent that starts without the API server goes on with
// what its predecessor had.
func TestSource_restart(t *testing.T) {
	w := newWorld(t)
	p := w.pod("a", enabled("true"))
	w.policy("p", func(s *v1alpha1.SMCRPolicySpec) { s.Mode = v1alpha1.ModeRequired })
	must := config.Decision{Accelerate: true, Required: true, Policy: "p", Reason: config.ReasonMatch}
	first := w.source(server.Config(t))
	first.First(t.Context())
	w.wait(first, p, "at first", must)
	state := filepath.Join(w.dir, "policies.json")
	var saved []byte
	within(t, prompt, func() (problem string) {
		st, err := os.Stat(state)
		if err != nil {
			return err.Error()
		}
		if st.Mode() != 0o600 {
			t.Errorf("mode %v", st.Mode())
		}
		if saved, err = os.ReadFile(state); err != nil || bytes.Contains(saved, []byte("managedFields")) {
			t.Errorf("file %s, %v", saved, err)
		}
		return ""
	})

	proxy, rc := server.NewProxy(t)
	proxy.TakeAway()
	second := w.source(rc)
	second.First(t.Context())
	if got := w.decides(second, p); got != must || second.Live() {
		t.Errorf("decided %+v", got)
	}
	proxy.GiveBack()
	within(t, time.Minute, func() string {
		if !second.Live() {
			return "not in line with the API server"
		}
		return ""
	})
	w.wait(second, p, "with the API server", must)
	within(t, prompt, func() string {
		if left, _ := filepath.Glob(filepath.Join(w.dir, ".tmp-*")); len(left) > 0 {
			return fmt.Sprintf("left behind: %v", left)
		}
		return ""
	})
}

// Whether a pod is ending is known of pods that are being deleted, that finished, and that are gone.
func TestSource_ending(t *testing.T) {
	w := newWorld(t)
	runs, finished, deleted := w.pod("runs", nil), w.pod("finished", nil), w.pod("deleted", nil)
	w.change(deleted, func() { deleted.Finalizers = []string{"example.com/waits"} })
	if (&Source{}).Ending("nobody") {
		t.Error("a pod is known to be gone before the API server has said what pods there are")
	}
	s := w.source(server.Config(t))
	s.First(t.Context())
	want := func(pod *corev1.Pod, want bool) {
		t.Helper()
		within(t, prompt, func() string {
			if got := s.Ending(string(pod.UID)); got != want {
				return fmt.Sprintf("pod %s is ending: %v", pod.Name, got)
			}
			return ""
		})
	}
	want(runs, false)
	want(finished, false)
	want(deleted, false)
	finished.Status.Phase = corev1.PodSucceeded
	if err := w.client.Status().Update(t.Context(), finished); err != nil {
		t.Fatal(err)
	}
	if err := w.client.Delete(t.Context(), deleted); err != nil {
		t.Fatal(err)
	}
	want(runs, false)
	want(finished, true)
	want(deleted, true)
	w.change(deleted, func() { deleted.Finalizers = nil })
	want(deleted, true) // gone
}

// A pod is gone when the API server has it no more, also when there is another one of its name.
func TestSource_gone(t *testing.T) {
	w := newWorld(t)
	pod := w.pod("p", nil)
	named := config.Pod{Namespace: pod.Namespace, Name: pod.Name}
	first := named
	first.UID = string(pod.UID)
	if (&Source{}).Gone(first) {
		t.Error("a pod is known to be gone before the API server has said what pods there are")
	}
	s := w.source(server.Config(t))
	s.First(t.Context())
	want := func(what string, pod config.Pod, want bool) {
		t.Helper()
		within(t, prompt, func() string {
			if got := s.Gone(pod); got != want {
				return fmt.Sprintf("%s: gone: %v", what, got)
			}
			return ""
		})
	}
	want("there", first, false)
	want("there, without UID", named, false)
	if err := w.client.Delete(t.Context(), pod, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	want("deleted", first, true)
	want("deleted, without UID", named, true)
	w.pod("p", nil)
	want("the next one of its name", named, false)
	want("the one before", first, true)
}

func TestSource_restore(t *testing.T) {
	s := &Source{cfg: Config{Node: "n", StateFile: filepath.Join(t.TempDir(), "policies.json")}}
	for _, tt := range []struct{ name, text, want string }{
		{"none", "", "no such file"},
		{"not JSON", "{", "parse"},
		{"version", `{"version":2,"node":"n"}`, "want node \"n\" in format 1"},
		{"another node", `{"version":1,"node":"m"}`, "is of node \"m\""},
		{"good", `{"version":1,"node":"n","objects":{"pods":[{"namespace":"a","name":"b","uid":"c"}]}}`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.text != "" {
				if err := os.WriteFile(s.cfg.StateFile, []byte(tt.text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			o, err := s.restore()
			if tt.want == "" && (err != nil || len(o.Pods) != 1) || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("objects %+v, error %v", o, err)
			}
		})
	}
}
