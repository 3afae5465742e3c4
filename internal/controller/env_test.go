// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

var server apiserver.Shared

func TestMain(m *testing.M) {
	// The libraries tell each failed call; the tests say what came of it.
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	ctrllog.SetLogger(logr.Discard())
	os.Exit(server.Main(m))
}

const (
	system  = "kube-smcr" // where the add-on is installed
	patient = time.Minute // a machine that builds and tests other packages meanwhile
)

// world is a cluster as its other inhabitants make it.
type world struct {
	client.Client
	t      testing.TB
	config *rest.Config
	ns     string // of the test
}

func newWorld(t testing.TB) *world {
	t.Helper()
	config := server.Config(t)
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Client: c, t: t, config: config}
	w.ns = w.namespace(nil)
	if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	return w
}

// limited returns how a user connects who has exactly the rights of a file of
// config/rbac.
func (w *world) limited(base *rest.Config, file string, names ...string) *rest.Config {
	w.t.Helper()
	f, err := os.Open("../../config/rbac/" + file)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	user := fmt.Sprintf("user-%s", w.ns)
	subjects := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}}
	found := 0
	for d := utilyaml.NewYAMLOrJSONDecoder(f, 4096); ; {
		u := &unstructured.Unstructured{}
		if err := d.Decode(&u.Object); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			w.t.Fatal(err)
		}
		wanted := false
		for _, n := range names {
			wanted = wanted || u.GetName() == n
		}
		if !wanted {
			continue
		}
		found++
		meta := metav1.ObjectMeta{Name: u.GetName() + "-" + w.ns, Namespace: u.GetNamespace()}
		ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: u.GetKind(), Name: meta.Name}
		u.SetName(meta.Name)
		w.create(u)
		if u.GetKind() == "Role" {
			w.create(&rbacv1.RoleBinding{ObjectMeta: meta, RoleRef: ref, Subjects: subjects})
		} else {
			w.create(&rbacv1.ClusterRoleBinding{ObjectMeta: meta, RoleRef: ref, Subjects: subjects})
		}
	}
	if found < len(names) {
		w.t.Fatalf("%s has not all of the roles %v", file, names)
	}
	out := rest.CopyConfig(base)
	out.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	return out
}

// create creates an object, and its status if it has one, and deletes it when
// the test ends.
func (w *world) create(obj client.Object) {
	w.t.Helper()
	status := obj.DeepCopyObject().(client.Object)
	if err := w.Create(w.t.Context(), obj); err != nil {
		w.t.Fatalf("create %T %s: %v", obj, obj.GetName(), err)
	}
	w.t.Cleanup(func() {
		err := w.Delete(context.Background(), obj, client.GracePeriodSeconds(0))
		if client.IgnoreNotFound(err) != nil {
			w.t.Errorf("clean up %T %s: %v", obj, obj.GetName(), err)
		}
	})
	switch obj.(type) {
	case *corev1.Pod, *corev1.Node:
		status.SetResourceVersion(obj.GetResourceVersion())
		status.SetUID(obj.GetUID())
		if err := w.Status().Update(w.t.Context(), status); err != nil {
			w.t.Fatalf("status of %T %s: %v", obj, obj.GetName(), err)
		}
		obj.SetResourceVersion(status.GetResourceVersion())
	}
}

func (w *world) namespace(annotations map[string]string) string {
	w.t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-", Annotations: annotations}}
	if err := w.Create(w.t.Context(), ns); err != nil {
		w.t.Fatal(err)
	}
	return ns.Name
}

// pod makes a running pod. edits change it before.
func (w *world) pod(name, node, ip string, edits ...func(*corev1.Pod)) *corev1.Pod {
	w.t.Helper()
	p := newPod(w.ns, name, node, ip)
	for _, e := range edits {
		e(p)
	}
	w.create(p)
	return p
}

func newPod(ns, name, node, ip string) *corev1.Pod {
	no := false
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"app": name}, Annotations: map[string]string{}},
		Spec: corev1.PodSpec{
			NodeName: node, AutomountServiceAccountToken: &no,
			Containers: []corev1.Container{{Name: "c", Image: "i"}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if ip != "" {
		p.Status.PodIP, p.Status.PodIPs = ip, []corev1.PodIP{{IP: ip}}
	}
	return p
}

func optedIn(status string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		p.Annotations[v1alpha1.AnnotationEnabled] = "true"
		if status != "" {
			p.Annotations[v1alpha1.AnnotationStatus] = status
		}
	}
}

// claims makes a pod that has a ResourceClaim, and the status that its agent wrote therefore.
func claims(status string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "nic"}}
		p.Annotations[v1alpha1.AnnotationStatus] = status
	}
}

func labelled(kv ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for i := 0; i < len(kv); i += 2 {
			p.Labels[kv[i]] = kv[i+1]
		}
	}
}

// node makes a node that is ready, with an agent whose pod is ready, and its
// SMCRNode.
func (w *world) node(name string) (*corev1.Node, *corev1.Pod, *v1alpha1.SMCRNode) {
	w.t.Helper()
	n := newNode(name)
	w.create(n)
	agent := newAgent(name)
	w.create(agent)
	s := newSMCRNode(name)
	w.create(s)
	return n, agent, s
}

func newNode(name string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
}

func newAgent(node string) *corev1.Pod {
	p := newPod(system, "agent-"+node, node, "")
	p.Spec.HostNetwork = true
	p.Labels = map[string]string{"app.kubernetes.io/part-of": "kube-smcr", "app.kubernetes.io/component": "agent"}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return p
}

func newSMCRNode(name string) *v1alpha1.SMCRNode {
	return &v1alpha1.SMCRNode{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1alpha1.LabelNode: name}},
		Status: v1alpha1.SMCRNodeStatus{
			AgentVersion: "v0.0.0", AgentPod: system + "/agent-" + name,
			Conditions: []metav1.Condition{{
				Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Running", LastTransitionTime: metav1.Now(),
			}},
		},
	}
}

func newLink(name, node, ns, pod string) *v1alpha1.SMCRLink {
	return &v1alpha1.SMCRLink{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1alpha1.LabelNode: node, v1alpha1.LabelNamespace: ns}},
		Status: v1alpha1.SMCRLinkStatus{
			Node: node, Namespace: ns, Pod: ns + "/" + pod, Role: "Client",
			State: v1alpha1.LinkActive, Redundancy: v1alpha1.RedundancySymmetric, LastError: "kept",
		},
	}
}

func newPolicy(ns, name string, edits ...func(*v1alpha1.SMCRPolicySpec)) *v1alpha1.SMCRPolicy {
	p := &v1alpha1.SMCRPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	for _, e := range edits {
		e(&p.Spec)
	}
	return p
}

func selecting(app string) func(*v1alpha1.SMCRPolicySpec) {
	return func(s *v1alpha1.SMCRPolicySpec) {
		s.PodSelector.MatchLabels = map[string]v1alpha1.LabelValue{"app": v1alpha1.LabelValue(app)}
	}
}

// policy makes a policy with the given spec.
func (w *world) policy(name string, edits ...func(*v1alpha1.SMCRPolicySpec)) *v1alpha1.SMCRPolicy {
	w.t.Helper()
	p := newPolicy(w.ns, name, edits...)
	w.create(p)
	return p
}

// run runs a controller until the test ends or the returned function is called.
func (w *world) run(api *rest.Config, edits ...func(*Config)) (stop func()) {
	w.t.Helper()
	c := Config{Namespace: system, AgentSelector: DefaultAgentSelector, Log: testLog(w.t)}
	for _, e := range edits {
		e(&c)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, api, c) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			select {
			case err := <-done:
				if err != nil {
					w.t.Errorf("run: %v", err)
				}
			case <-time.After(time.Minute):
				w.t.Error("the controller did not end")
			}
		})
	}
	w.t.Cleanup(stop)
	return stop
}

// asController is the connection of a controller with the rights that it is given.
func (w *world) asController() *rest.Config {
	return w.limited(w.config, "controller.yaml", "kube-smcr-controller")
}

// testLog logs to the test as long as it runs.
func testLog(t testing.TB) *slog.Logger {
	w := &testWriter{t: t}
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.t = nil
	})
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

type testWriter struct {
	mu sync.Mutex
	t  testing.TB
}

func (w *testWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.t != nil {
		w.t.Log(strings.TrimSpace(string(b)))
	}
	return len(b), nil
}

// eventually looks at the world until check returns nil.
func (w *world) eventually(what string, check func() error) {
	w.t.Helper()
	var err error
	for deadline := time.Now().Add(patient); time.Now().Before(deadline); {
		if err = check(); err == nil {
			return
		}
		time.Sleep(20 * time.Millisecond) // polls the API server
	}
	w.t.Fatalf("%s: not within %v: %v", what, patient, err)
}

// promptly makes sure that step takes at most the 5 s that users are promised. On
// a machine that does other things it may take several attempts, each of which
// undo begins.
func (w *world) promptly(what string, undo, step func()) {
	w.t.Helper()
	best := patient
	for range 3 {
		undo()
		began := time.Now()
		step()
		if best = min(best, time.Since(began)); best <= 5*time.Second {
			return
		}
	}
	w.t.Errorf("%s: after %v, want 5 s at most", what, best)
}

// never makes sure that check does not fail for a while.
func (w *world) never(what string, d time.Duration, check func() error) {
	w.t.Helper()
	for deadline := time.Now().Add(d); time.Now().Before(deadline); {
		if err := check(); err != nil {
			w.t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond) // polls the API server
	}
}

// quiesced waits until nothing was written to an object for a while.
func (w *world) quiesced(obj client.Object, d time.Duration) {
	w.t.Helper()
	version, since := "", time.Now()
	w.eventually(obj.GetName()+" is stable", func() error {
		if err := w.get(obj); err != nil {
			return err
		}
		if v := obj.GetResourceVersion(); v != version {
			version, since = v, time.Now()
		}
		if quiet := time.Since(since); quiet < d {
			return fmt.Errorf("the last write was %v ago", quiet)
		}
		return nil
	})
}

func (w *world) get(obj client.Object) error {
	return w.Get(w.t.Context(), client.ObjectKeyFromObject(obj), obj)
}

// hasCondition returns an error if the object's condition is not as wanted.
func hasCondition(conditions []metav1.Condition, kind string, status metav1.ConditionStatus, reason string) error {
	c := meta.FindStatusCondition(conditions, kind)
	if c == nil {
		return fmt.Errorf("no condition %s", kind)
	}
	if c.Status != status || c.Reason != reason {
		return fmt.Errorf("condition %s is %s, %s (%s), want %s, %s", kind, c.Status, c.Reason, c.Message, status, reason)
	}
	return nil
}

// update changes an object and writes it, again if somebody else did meanwhile.
func update[T client.Object](w *world, obj T, change func(T)) {
	w.t.Helper()
	w.eventually("update "+obj.GetName(), func() error {
		if err := w.get(obj); err != nil {
			return err
		}
		change(obj)
		return w.Update(w.t.Context(), obj)
	})
}

func updateStatus[T client.Object](w *world, obj T, change func(T)) {
	w.t.Helper()
	w.eventually("update the status of "+obj.GetName(), func() error {
		if err := w.get(obj); err != nil {
			return err
		}
		change(obj)
		return w.Status().Update(w.t.Context(), obj)
	})
}

// direct is the connection of the same user without the proxy.
func (w *world) direct(api *rest.Config) *rest.Config {
	out := rest.CopyConfig(w.config)
	out.Impersonate = api.Impersonate
	return out
}

// releaseLease lets the controller of the next test lead at once.
func (w *world) releaseLease() {
	w.t.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: LeaseName}}
	if err := w.Delete(context.Background(), lease); client.IgnoreNotFound(err) != nil {
		w.t.Error(err)
	}
}
