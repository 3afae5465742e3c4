// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

var shared apiserver.Shared

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // the tests say what came of calls
	os.Exit(shared.Main(m))
}

// patient is for a machine that does much else.
const patient = 30 * time.Second

// rules are all rights that the reporter uses. The chart's ClusterRole has them,
// and those of the informers.
func rules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}},
		{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{v1alpha1.Group}, Resources: []string{"smcrnodes"}, Verbs: []string{"get", "list", "watch", "create", "patch"}},
		{APIGroups: []string{v1alpha1.Group}, Resources: []string{"smcrlinks"}, Verbs: []string{"list", "watch", "create", "patch", "delete"}},
	}
}

// eventRules are what the chart's Roles allow in the namespaces of the agent and of
// objects without one.
func eventRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create"}}}
}

// leaseRules are what the chart's Role allows in the namespace of the agent.
func leaseRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"create", "patch"}}}
}

// world is a cluster with one node and one namespace.
type world struct {
	ctrl.Client
	t        testing.TB
	node, ns string
	agent    *rest.Config // with the rights of an agent
	proxy    *apiserver.Proxy
}

func newWorld(t *testing.T) *world {
	t.Helper()
	admin := shared.Config(t)
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, coordinationv1.AddToScheme, rbacv1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	c, err := ctrl.New(admin, ctrl.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Client: c, t: t}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "report-"}}
	w.create(space)
	w.ns, w.node = space.Name, "node-of-"+space.Name
	w.create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node}})
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: w.ns}, Rules: rules()}
	w.create(role)
	w.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: w.ns},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "agent-" + w.ns}},
	})
	for _, space := range []string{metav1.NamespaceDefault, w.ns + "-agent"} {
		rules := eventRules()
		if space != metav1.NamespaceDefault {
			rules = append(rules, leaseRules()...)
		}
		if space != metav1.NamespaceDefault {
			w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: space}})
		}
		w.create(&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: w.ns}, Rules: rules})
		w.create(&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: w.ns},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: w.ns},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "agent-" + w.ns}},
		})
	}
	w.proxy, w.agent = shared.NewProxy(t)
	w.agent.Impersonate = rest.ImpersonationConfig{UserName: "agent-" + w.ns, Groups: []string{"system:authenticated"}}
	return w
}

func (w *world) create(o ctrl.Object) {
	w.t.Helper()
	if err := w.Create(w.t.Context(), o); err != nil {
		w.t.Fatalf("create %T: %v", o, err)
	}
}

// pod makes a pod, which needs no kubelet to exist.
func (w *world) pod(name string) *corev1.Pod {
	w.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Annotations: map[string]string{"example.com/own": "1"}},
		Spec:       corev1.PodSpec{NodeName: w.node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	w.create(p)
	return p
}

// eventually asks until f has nothing to complain about.
func (w *world) eventually(what string, f func() error) {
	w.t.Helper()
	deadline := time.Now().Add(patient)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond) // polls the API server
	}
}

// run starts a reporter that reports src.
func (w *world) run(src *source) (r *Reporter, stop func()) {
	w.t.Helper()
	r, err := New(Config{
		Client: w.agent, Node: w.node, AgentPod: w.ns + "-agent/agent-x", AgentVersion: "v0.4.0", Source: src.get,
		Preflight: noPreflight, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	stop = func() { cancel(); <-done }
	w.t.Cleanup(stop)
	return r, stop
}

func (w *world) smcrNode() (*v1alpha1.SMCRNode, error) {
	n := &v1alpha1.SMCRNode{}
	return n, w.Get(w.t.Context(), types.NamespacedName{Name: w.node}, n)
}

func (w *world) links() []v1alpha1.SMCRLink {
	w.t.Helper()
	var list v1alpha1.SMCRLinkList
	if err := w.List(w.t.Context(), &list, ctrl.MatchingLabels{v1alpha1.LabelNode: w.node}); err != nil {
		w.t.Fatal(err)
	}
	return list.Items
}

func (w *world) reasons(about string) []string {
	w.t.Helper()
	var list corev1.EventList
	if err := w.List(w.t.Context(), &list); err != nil {
		w.t.Fatal(err)
	}
	var out []string
	for _, e := range list.Items {
		if e.Source.Component != component {
			continue
		}
		if e.InvolvedObject.Name == about {
			out = append(out, e.Reason)
		}
		// What is said of a pod is about the agent's own one.
		if r := e.Related; r != nil && r.Name == about && r.Namespace == w.ns && e.InvolvedObject.Namespace == w.ns+"-agent" && e.InvolvedObject.Name == "agent-x" {
			out = append(out, e.Reason)
		}
	}
	slices.Sort(out)
	return out
}

// apply writes a status as the controller does.
func (w *world) apply(kind, name string, status map[string]any) {
	w.t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	u.SetAPIVersion(v1alpha1.GroupVersion().String())
	u.SetKind(kind)
	u.SetName(name)
	err := w.Apply(w.t.Context(), ctrl.ApplyConfigurationFromUnstructured(u), ctrl.FieldOwner(v1alpha1.ManagerController), ctrl.ForceOwnership)
	if err != nil {
		w.t.Fatalf("apply %s %s: %v", kind, name, err)
	}
}

func statusIs(p *corev1.Pod, want string) error {
	if got := p.Annotations[v1alpha1.AnnotationStatus]; got != want {
		return fmt.Errorf("%s is %q, want %q", v1alpha1.AnnotationStatus, got, want)
	}
	return nil
}

// TestAPIServer_objects: a real API server takes what is written, with the
// rights of an agent, beside what the controller writes.
func TestAPIServer_objects(t *testing.T) {
	w := newWorld(t)
	pod := w.pod("web")
	name := w.ns + "/web"
	src := &source{snap: healthy()}
	v := verdict("web")
	v.Namespace, v.UID = w.ns, string(pod.UID)
	g := group(name, 7, 2)
	g.Error = "link 2: the port is down"
	src.snap.Verdicts = []config.Verdict{v}
	src.snap.Attachments = []agentapi.Attachment{attachment(name, agentapi.StateReady)}
	src.snap.Links = []agentapi.LinkGroup{g}
	src.snap.Nodes = nodesOfTheTests()
	src.snap.Status.Devices = append(src.snap.Status.Devices, device("soft1", "DOWN"))
	r, stop := w.run(src)
	w.eventually("link", func() error {
		if n := len(w.links()); n != 1 {
			return fmt.Errorf("%d SMCRLinks", n)
		}
		return nil
	})
	core := &corev1.Node{}
	if err := w.Get(t.Context(), types.NamespacedName{Name: w.node}, core); err != nil {
		t.Fatal(err)
	}
	owners := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: w.node, UID: core.UID}}
	link := w.links()[0]
	want := v1alpha1.SMCRLinkStatus{
		Node: w.node, Peer: "node-b", PeerClaimedName: "node-b", Namespace: w.ns, Pod: name, Datapath: string(v1alpha1.DatapathAgent), Policy: "cache", Role: "Client", State: v1alpha1.LinkActive,
		Redundancy: v1alpha1.RedundancySymmetric, Connections: 1, RMBBytes: 1 << 20, Devices: "soft0,soft1", Version: 2,
		GIDs: "192.0.2.1-192.0.2.2,192.0.2.1-192.0.2.2", QPNs: "17-18,17-18", MTUBytes: 1024, LastError: g.Error,
		OpenedAt: metav1.Time{Time: g.Opened.Local()}, Links: link.Status.Links, Conditions: link.Status.Conditions,
		CountedAt: link.Status.CountedAt,
	}
	if link.Status.CountedAt.IsZero() {
		t.Error("the counters of the link have no time")
	}
	if diff := cmp.Diff(want, link.Status); diff != "" || len(link.Status.Links) != 2 || len(link.Status.Conditions) != 2 {
		t.Errorf("link (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(owners, link.OwnerReferences); diff != "" {
		t.Errorf("owners of the link (-want +got):\n%s", diff)
	}

	w.eventually("pod", func() error {
		if err := w.Get(t.Context(), ctrl.ObjectKeyFromObject(pod), pod); err != nil {
			return err
		}
		return statusIs(pod, "Enabled")
	})
	if pod.Annotations["example.com/own"] != "1" {
		t.Errorf("annotations of the pod: %v", pod.Annotations)
	}
	w.eventually("event", func() error {
		if got := w.reasons("web"); !slices.Equal(got, []string{eventEnabled}) {
			return fmt.Errorf("events %v", got)
		}
		return nil
	})

	// What the controller says of the node survives, also when the agent writes.
	now := metav1.Now().Rfc3339Copy()
	w.apply("SMCRNode", w.node, map[string]any{"conditions": []any{map[string]any{
		"type": v1alpha1.ConditionAgentAlive, "status": "True", "reason": "AgentReady", "message": "x", "lastTransitionTime": now.Format(time.RFC3339),
	}}})
	src.change(func(s *Snapshot) { s.Status.Devices[1].Port = "ACTIVE" })
	r.Poke()
	w.eventually("node", func() error {
		n, err := w.smcrNode()
		if err != nil {
			return err
		}
		for _, c := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionAccelerating, v1alpha1.ConditionDevicesHealthy, v1alpha1.ConditionCNIInstalled, v1alpha1.ConditionAgentAlive} {
			if !meta.IsStatusConditionTrue(n.Status.Conditions, c) {
				return fmt.Errorf("%s is not true: %+v", c, n.Status.Conditions)
			}
		}
		if len(n.Status.Conditions) != 5 || n.Status.DeviceSummary != "2/2" || n.Status.Kernel != "6.12.0" || !slices.Equal(n.OwnerReferences, owners) {
			return fmt.Errorf("%+v", n)
		}
		return nil
	})

	// The Lease is renewed, with the rights of an agent.
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns + "-agent", Name: v1alpha1.AgentLeasePrefix + w.node}}
	var renewed metav1.MicroTime
	w.eventually("renewals", func() error {
		if err := w.Get(t.Context(), ctrl.ObjectKeyFromObject(lease), lease); err != nil {
			return err
		}
		if renewed.IsZero() {
			renewed = *lease.Spec.RenewTime
		}
		if !lease.Spec.RenewTime.After(renewed.Time) {
			return fmt.Errorf("the Lease was renewed once, at %v", renewed)
		}
		return nil
	})
	if !slices.Equal(lease.OwnerReferences, owners) || lease.Labels[v1alpha1.LabelNode] != w.node {
		t.Errorf("the Lease is %+v", lease)
	}

	// What the controller writes and deletes when it takes the agent for gone.
	w.apply("SMCRNode", w.node, map[string]any{"conditions": []any{map[string]any{
		"type": v1alpha1.ConditionReady, "status": "Unknown", "reason": v1alpha1.ReasonAgentGone, "message": "", "lastTransitionTime": "2026-11-21T08:00:00Z",
	}}})
	if err := w.Delete(t.Context(), &link); err != nil {
		t.Fatal(err)
	}
	w.eventually("repair", func() error {
		if ls := w.links(); len(ls) != 1 || ls[0].Status.State != v1alpha1.LinkActive {
			return fmt.Errorf("links %+v", ls)
		}
		n, err := w.smcrNode()
		if err == nil && !meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionReady) {
			err = fmt.Errorf("%+v", n.Status.Conditions)
		}
		return err
	})

	// The next agent of the node removes what is no longer true.
	stop()
	src.change(func(s *Snapshot) {
		s.Verdicts[0].OptedIn, s.Links = false, nil
		s.Annotations = map[string]string{string(pod.UID): "Enabled"}
	})
	w.run(src)
	w.eventually("removal", func() error {
		if n := len(w.links()); n != 0 {
			return fmt.Errorf("%d SMCRLinks", n)
		}
		if err := w.Get(t.Context(), ctrl.ObjectKeyFromObject(pod), pod); err != nil {
			return err
		}
		return statusIs(pod, "")
	})
}

// TestAPIServer_bad: pods that are gone, were made anew, or whose status
// somebody else wrote; and annotations that mean nothing.
func TestAPIServer_bad(t *testing.T) {
	w := newWorld(t)
	src := &source{snap: healthy()}
	add := func(name string, uid types.UID) *config.Verdict {
		v := verdict(name)
		v.Namespace, v.UID = w.ns, string(uid)
		src.snap.Verdicts = append(src.snap.Verdicts, v)
		src.snap.Attachments = append(src.snap.Attachments, attachment(w.ns+"/"+name, agentapi.StateReady))
		return &src.snap.Verdicts[len(src.snap.Verdicts)-1]
	}
	add("gone", "0123")
	anew := w.pod("anew")
	add("anew", "an-earlier-one")
	junk := w.pod("junk")
	v := add("junk", junk.UID)
	v.OptedIn, v.BadAnnotation, v.Because = false, true, `annotation smcr.io/enabled of the pod is "yes"`
	greedy := w.pod("greedy")
	add("greedy", greedy.UID).Limited = "SMCRPolicy p asks for more"
	last := w.pod("last")
	add("last", last.UID)
	w.run(src)
	w.eventually("last pod", func() error {
		if err := w.Get(t.Context(), ctrl.ObjectKeyFromObject(last), last); err != nil {
			return err
		}
		return statusIs(last, "Enabled")
	})
	if err := w.Get(t.Context(), types.NamespacedName{Namespace: w.ns, Name: "gone"}, &corev1.Pod{}); !apierrors.IsNotFound(err) {
		t.Errorf("a pod that does not exist: %v", err)
	}
	for _, p := range []*corev1.Pod{anew, junk} {
		if err := w.Get(t.Context(), ctrl.ObjectKeyFromObject(p), p); err != nil {
			t.Fatal(err)
		}
		if err := statusIs(p, ""); err != nil {
			t.Errorf("pod %s: %v", p.Name, err)
		}
	}
	w.eventually("event", func() error {
		if got := w.reasons("junk"); !slices.Equal(got, []string{eventBadAnnotation}) {
			return fmt.Errorf("events %v", got)
		}
		if got := w.reasons("greedy"); !slices.Contains(got, eventBudgetLimited) {
			return fmt.Errorf("events %v", got)
		}
		return nil
	})
}

// TestAPIServer_madeAnew: that a pod is gone, or another one of its name is there, is no refusal, of which people would
// look for the reason; and what is one, the API server says in words.
func TestAPIServer_madeAnew(t *testing.T) {
	w := newWorld(t)
	pod := w.pod("anew")
	c, err := newClient(w.agent)
	if err != nil {
		t.Fatal(err)
	}
	apply := func(name string, uid types.UID, annotation string) error {
		n := types.NamespacedName{Namespace: w.ns, Name: name}
		target := podTarget(n, string(uid), annotation)
		_, err := c.apply(t.Context(), podKey(n), target.body)
		return err
	}
	if err := apply("anew", "an-earlier-one", "Enabled"); !isAnother(err) || isGone(err) {
		t.Errorf("another one is there: %v", err)
	}
	for _, annotation := range []string{"Enabled", stateNothing} {
		if err := apply("nobody", "an-earlier-one", annotation); !isGone(err) && !apierrors.IsConflict(err) || isAnother(err) {
			t.Errorf("nobody is there: %v", err)
		}
	}
	if err := apply("anew", pod.UID, "Enabled"); err != nil {
		t.Error(err)
	}
	link := &v1alpha1.SMCRLink{TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion().String(), Kind: "SMCRLink"}, ObjectMeta: metav1.ObjectMeta{Name: "l"}}
	link.Status.State = "NoSuchState"
	if _, err := c.apply(t.Context(), key{kind: kindLink, name: "l"}, link); !isAboutObject(err) || isAnother(err) || !strings.Contains(err.Error(), "NoSuchState") {
		t.Errorf("refused: %v", err)
	}
}

// TestAPIServer_away: what happens while the API server is away, or answers
// with errors, is written when it is back.
func TestAPIServer_away(t *testing.T) {
	for name, spoil := range map[string]func(*apiserver.Proxy){
		"away": (*apiserver.Proxy).TakeAway,
		"500":  func(p *apiserver.Proxy) { p.Answer(500) },
		"slow": func(p *apiserver.Proxy) { p.Delay(time.Second) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			src := &source{snap: healthy()}
			r, _ := w.run(src)
			w.eventually("node", func() error { _, err := w.smcrNode(); return err })
			spoil(w.proxy)
			g := group(w.ns+"/web", 1, 1)
			src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{g} })
			const changes = 5
			var last atomic.Value // the error that the reporter saw
			src.mu.Lock()
			src.each = func(s *Snapshot, _ time.Time) { last.Store(s.Links[0].Error) }
			src.mu.Unlock()
			for i := range changes {
				text := fmt.Sprint("error ", i)
				src.change(func(s *Snapshot) { s.Links[0].Error = text })
				r.Poke()
				w.eventually("look", func() error {
					if got := last.Load(); got != text {
						return fmt.Errorf("the reporter has not seen %q, but %q", text, got)
					}
					return nil
				})
			}
			w.proxy.GiveBack()
			w.eventually("link", func() error {
				if l := w.links(); len(l) != 1 || !strings.HasSuffix(l[0].Status.LastError, fmt.Sprint(" ", changes-1)) {
					return fmt.Errorf("%+v", l)
				}
				return nil
			})
		})
	}
}
