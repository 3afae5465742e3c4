// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// The status of a policy follows its pods, what their agents say, and their
// links, within the time that users are promised.
func TestPolicyStatus_followsPodsAndLinks(t *testing.T) {
	w := newWorld(t)
	w.node("n1-" + w.ns)
	node := "n1-" + w.ns
	w.run(w.asController())
	p := w.policy("web", selecting("web"))
	w.eventually("a policy without pods says so", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonNoPods),
			hasCondition(p.Status.Conditions, v1alpha1.ConditionAccepted, metav1.ConditionTrue, reasonValid))
	})

	pod := w.pod("web-0", node, "10.1.0.1", labelled("app", "web"))
	w.eventually("a pod that is not opted in is said so", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonNotOptedIn))
	})
	update(w, pod, func(p *corev1.Pod) { optedIn("")(p) })
	w.eventually("an opted-in pod is pending", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonPodsPending))
	})
	w.promptly("the status follows a pod", func() {
		update(w, pod, func(p *corev1.Pod) { optedIn("Fallback: X")(p) })
		w.eventually("a pod that fell back is said so", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonPodsFallback))
		})
	}, func() {
		update(w, pod, func(p *corev1.Pod) { optedIn("Enabled")(p) })
		w.eventually("an enabled pod makes the policy ready", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionTrue, reasonAllAccelerated))
		})
	})
	l := newLink("l1-"+w.ns, node, w.ns, "web-0")
	l.Status.Redundancy = v1alpha1.RedundancySingle
	w.create(l)
	w.eventually("a single link is not redundant", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionLinksRedundant, metav1.ConditionFalse, reasonNotRedundant))
	})
	w.promptly("the status follows a link", func() {
		update(w, l, func(l *v1alpha1.SMCRLink) { l.Status.State = v1alpha1.LinkActive })
		w.eventually("a link that is up does not degrade", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionFalse, reasonHealthy))
		})
	}, func() {
		update(w, l, func(l *v1alpha1.SMCRLink) {
			l.Status.State, l.Status.Redundancy = v1alpha1.LinkDown, v1alpha1.RedundancyNone
		})
		w.eventually("a link that is down degrades", func() error {
			return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionTrue, reasonLinksDown))
		})
	})
	update(w, pod, func(p *corev1.Pod) { optedIn("Fallback: PEER_NO_SMC")(p) })
	w.eventually("the reason of a fallback is counted", func() error {
		want := []v1alpha1.ReasonCount{{Reason: "PEER_NO_SMC", Pods: 1}}
		if err := w.get(p); err != nil {
			return err
		}
		if d := cmp.Diff(want, p.Status.FallbackReasons); d != "" {
			return errors.New(d)
		}
		return hasCondition(p.Status.Conditions, v1alpha1.ConditionReady, metav1.ConditionFalse, reasonPodsFallback)
	})
	if p.Status.ObservedGeneration != p.Generation {
		t.Errorf("observedGeneration is %d, want %d", p.Status.ObservedGeneration, p.Generation)
	}
	w.eventually("the change has an event", func() error {
		return w.hasEvent("SMCRPolicy", p.Name, reasonLinksDown)
	})

	// Nothing changes: nothing is written.
	w.eventually("the status has settled", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionTrue, reasonLinksDown))
	})
	w.settled(p, coalesce+coalesce/2)
	version := p.ResourceVersion
	update(w, pod, func(p *corev1.Pod) { p.Annotations["example.com/other"] = "1" })
	update(w, l, func(l *v1alpha1.SMCRLink) { l.Status.Connections = 7 })
	w.never("an event that changes nothing writes nothing", 2*coalesce, func() error {
		if err := w.get(p); err != nil {
			return err
		}
		if p.ResourceVersion != version {
			return fmt.Errorf("resourceVersion went from %s to %s", version, p.ResourceVersion)
		}
		return nil
	})
}

func (w *world) hasEvent(kind, name, reason string) error {
	var l eventsv1.EventList
	if err := w.List(w.t.Context(), &l); err != nil {
		return err
	}
	for _, e := range l.Items {
		if e.Regarding.Kind == kind && e.Regarding.Name == name && e.Reason == reason {
			return nil
		}
	}
	return fmt.Errorf("no event %s on %s %s among %d", reason, kind, name, len(l.Items))
}

// A namespace opts all its pods in; a pod's own word counts more.
func TestPolicyStatus_followsTheNamespacesOptIn(t *testing.T) {
	w := newWorld(t)
	w.node("n-" + w.ns)
	w.pod("a", "n-"+w.ns, "10.1.1.1")
	w.pod("b", "n-"+w.ns, "10.1.1.2", func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "false" })
	w.pod("c", "n-"+w.ns, "10.1.1.3", func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationEnabled] = "yes" })
	w.pod("d", "n-"+w.ns, "10.1.1.4", func(p *corev1.Pod) { p.Spec.HostNetwork = true })
	p := w.policy("all")
	w.run(w.asController())
	counts := func(want v1alpha1.PolicyPods) func() error {
		return func() error {
			if err := w.get(p); err != nil {
				return err
			}
			if d := cmp.Diff(want, p.Status.Pods); d != "" {
				return errors.New(d)
			}
			return nil
		}
	}
	w.eventually("nobody is opted in", counts(v1alpha1.PolicyPods{Matched: 3}))
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}}
	update(w, ns, func(n *corev1.Namespace) { n.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true"} })
	w.eventually("one pod is opted in by its namespace", counts(v1alpha1.PolicyPods{Matched: 3, OptedIn: 1, Pending: 1}))
}

func TestConflictingPolicies(t *testing.T) {
	w := newWorld(t)
	w.pod("a", "n-"+w.ns, "10.1.2.1")
	first := w.policy("prefer")
	second := w.policy("require", func(s *v1alpha1.SMCRPolicySpec) { s.Mode = v1alpha1.ModeRequired })
	w.run(w.asController())
	w.eventually("both are told", func() error {
		return errors.Join(w.get(first), w.get(second),
			hasCondition(first.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionTrue, reasonOtherPolicy),
			hasCondition(second.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionTrue, reasonOtherPolicy))
	})
	update(w, second, func(p *v1alpha1.SMCRPolicy) { p.Spec.Priority = 5 })
	w.eventually("a priority resolves it", func() error {
		return errors.Join(w.get(first), w.get(second),
			hasCondition(first.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionFalse, reasonNoConflict),
			hasCondition(second.Status.Conditions, v1alpha1.ConditionConflicting, metav1.ConditionFalse, reasonNoConflict))
	})
}

// Peers by selectors become addresses that agents can use, and follow pods,
// Services and namespaces.
func TestPeerSlices(t *testing.T) {
	w := newWorld(t)
	w.pod("redis-0", "n", "10.2.0.1", labelled("app", "redis"))
	w.pod("redis-1", "n", "10.2.0.2", labelled("app", "redis"))
	w.pod("other", "n", "10.2.0.3")
	w.create(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "redis"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "redis"}, Ports: []corev1.ServicePort{{Port: 6379}}},
	})
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "redis"}}
	if err := w.get(svc); err != nil {
		t.Fatal(err)
	}
	p := w.policy("cache", func(s *v1alpha1.SMCRPolicySpec) {
		s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{
			PodSelector: &v1alpha1.LabelSelector{MatchLabels: map[string]v1alpha1.LabelValue{"app": "redis"}},
		}}}
	})
	w.run(w.asController())
	has := func(want ...string) func() error {
		return func() error {
			got := map[string]bool{}
			var l v1alpha1.SMCRPeerSliceList
			if err := w.List(t.Context(), &l, client.InNamespace(w.ns)); err != nil {
				return err
			}
			for _, s := range l.Items {
				for _, a := range s.Addresses {
					got[a] = true
				}
				if !metav1.IsControlledBy(&s, p) {
					return fmt.Errorf("slice %s is not owned by the policy", s.Name)
				}
			}
			wanted := map[string]bool{}
			for _, a := range want {
				wanted[a] = true
			}
			if d := cmp.Diff(wanted, got); d != "" {
				return errors.New(d)
			}
			return nil
		}
	}
	w.eventually("pods and their Service", has("10.2.0.1", "10.2.0.2", svc.Spec.ClusterIP))
	w.eventually("the status counts them", func() error {
		if err := w.get(p); err != nil {
			return err
		}
		if p.Status.PeerAddresses != 3 {
			return fmt.Errorf("peerAddresses is %d, want 3", p.Status.PeerAddresses)
		}
		return nil
	})
	third := w.pod("redis-2", "n", "10.2.0.4", labelled("app", "redis"))
	w.eventually("a new pod", has("10.2.0.1", "10.2.0.2", "10.2.0.4", svc.Spec.ClusterIP))
	if err := w.Delete(t.Context(), third, client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	w.eventually("a deleted pod", has("10.2.0.1", "10.2.0.2", svc.Spec.ClusterIP))
	update(w, svc, func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "other"} })
	w.eventually("a Service of other pods", has("10.2.0.1", "10.2.0.2"))

	// Somebody deletes or changes what is not his.
	var l v1alpha1.SMCRPeerSliceList
	if err := w.List(t.Context(), &l, client.InNamespace(w.ns)); err != nil || len(l.Items) != 1 {
		t.Fatalf("slices: %v, %v", l.Items, err)
	}
	update(w, &l.Items[0], func(s *v1alpha1.SMCRPeerSlice) { s.Addresses = []string{"192.0.2.1"} })
	w.eventually("a slice that somebody changed", has("10.2.0.1", "10.2.0.2"))
	if err := w.Delete(t.Context(), &l.Items[0]); err != nil {
		t.Fatal(err)
	}
	w.eventually("a slice that somebody deleted", has("10.2.0.1", "10.2.0.2"))
	if err := w.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	w.eventually("a deleted policy has no slices", has())
}

func TestPeerSlices_ofOtherNamespaces(t *testing.T) {
	w := newWorld(t)
	other := w.namespace(nil)
	q := newPod(other, "client", "n", "10.2.1.1")
	w.create(q)
	p := w.policy("clients", func(s *v1alpha1.SMCRPolicySpec) {
		s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{
			NamespaceSelector: &v1alpha1.LabelSelector{MatchLabels: map[string]v1alpha1.LabelValue{"team": v1alpha1.LabelValue(w.ns)}},
		}}}
	})
	w.run(w.asController())
	peers := func(n int32) func() error {
		return func() error {
			if err := w.get(p); err != nil {
				return err
			}
			if p.Status.PeerAddresses != n || p.Status.ObservedGeneration == 0 {
				return fmt.Errorf("peerAddresses is %d, want %d", p.Status.PeerAddresses, n)
			}
			return nil
		}
	}
	w.eventually("no namespace has the label", peers(0))
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: other}}
	update(w, ns, func(n *corev1.Namespace) { n.Labels["team"] = w.ns })
	w.eventually("the namespace got the label", peers(1))
	update(w, ns, func(n *corev1.Namespace) { delete(n.Labels, "team") })
	w.eventually("the namespace lost the label", peers(0))
}

// An agent that dies is noticed; its links are Unknown until it writes them again.
func TestAgentDeath(t *testing.T) {
	w := newWorld(t)
	name := "n-" + w.ns
	node, agent, smcr := w.node(name)
	w.pod("web-0", name, "10.3.0.1", optedIn("Enabled"))
	p := w.policy("web")
	l := newLink("l-"+w.ns, name, w.ns, "web-0")
	w.create(l)
	w.run(w.asController())
	is := func(status metav1.ConditionStatus, reason string) func() error {
		return func() error {
			return errors.Join(w.get(smcr), hasCondition(smcr.Status.Conditions, v1alpha1.ConditionAgentAlive, status, reason))
		}
	}
	state := func(want v1alpha1.LinkState) func() error {
		return func() error {
			if err := w.get(l); err != nil {
				return err
			}
			if l.Status.State != want || l.Status.LastError != "kept" {
				return fmt.Errorf("the link is %s (last error %q), want %s", l.Status.State, l.Status.LastError, want)
			}
			return nil
		}
	}
	w.eventually("the agent is alive", is(metav1.ConditionTrue, reasonAgentReady))
	ready := func(s corev1.ConditionStatus) {
		updateStatus(w, agent, func(p *corev1.Pod) { p.Status.Conditions[0].Status = s })
	}

	ready(corev1.ConditionFalse)
	ready(corev1.ConditionTrue)
	w.never("a container that starts again is nothing", agentGrace+time.Second, state(v1alpha1.LinkActive))

	ready(corev1.ConditionFalse)
	w.eventually("the agent's pod is not ready", is(metav1.ConditionFalse, reasonAgentNotReady))
	w.eventually("its link is unknown", state(v1alpha1.LinkUnknown))
	w.eventually("its policy is degraded", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionTrue, reasonAgentsMissing))
	})
	w.eventually("there is an event", func() error { return w.hasEvent("SMCRNode", name, "AgentLost") })

	ready(corev1.ConditionTrue)
	w.eventually("the agent is back", is(metav1.ConditionTrue, reasonAgentReady))
	w.eventually("its link is what it was, though the agent had nothing to write", state(v1alpha1.LinkActive))
	if a := l.Annotations[v1alpha1.AnnotationStateBefore]; a != "" {
		t.Errorf("the link still has the annotation of its former state, %q", a)
	}
	w.eventually("its policy is healthy", func() error {
		return errors.Join(w.get(p), hasCondition(p.Status.Conditions, v1alpha1.ConditionDegraded, metav1.ConditionFalse, reasonHealthy))
	})

	updateStatus(w, node, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown })
	w.eventually("the node is not ready", is(metav1.ConditionFalse, reasonNodeNotReady))
	w.eventually("its link is unknown", state(v1alpha1.LinkUnknown))
	w.applyLink(l.Name, map[string]any{"node": name, "state": "Active", "lastError": "kept"})
	w.never("an agent that writes though its node is not ready has the last word", 2*time.Second, state(v1alpha1.LinkActive))
	w.applyLink(l.Name, map[string]any{"node": name, "state": "Down", "lastError": "kept"})
	updateStatus(w, node, func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionTrue })
	w.eventually("the node is back", is(metav1.ConditionTrue, reasonAgentReady))
	w.never("what the agent wrote meanwhile stays", 2*time.Second, state(v1alpha1.LinkDown))
}

// applyLink writes a link as an agent does.
func (w *world) applyLink(name string, status map[string]any) {
	w.t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	u.SetGroupVersionKind(v1alpha1.GroupVersion().WithKind("SMCRLink"))
	u.SetName(name)
	if err := w.Apply(w.t.Context(), client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership); err != nil {
		w.t.Fatal(err)
	}
}

// The objects of a node that is gone go, also when it went while no controller
// was there, and nothing else does.
func TestNodeGarbage(t *testing.T) {
	w := newWorld(t)
	gone, kept := "gone-"+w.ns, "kept-"+w.ns
	node, agent, smcr := w.node(gone)
	_, _, smcrKept := w.node(kept)
	l, lKept := newLink("gone-"+w.ns, gone, w.ns, "x"), newLink("kept-"+w.ns, kept, w.ns, "x")
	w.create(l)
	w.create(lKept)
	never := newLink("never-"+w.ns, "never-"+w.ns, w.ns, "x")
	w.create(never)
	w.run(w.asController())
	isGone := func(obj client.Object) error {
		switch err := w.get(obj); {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return fmt.Errorf("%T %s is there", obj, obj.GetName())
	}
	w.eventually("a link of a node that never was", func() error { return isGone(never) })
	for _, o := range []client.Object{node, agent} {
		if err := w.Delete(t.Context(), o, client.GracePeriodSeconds(0)); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("the objects of the node", func() error { return errors.Join(isGone(smcr), isGone(l)) })
	w.never("the objects of another node", time.Second, func() error { return errors.Join(w.get(smcrKept), w.get(lKept)) })
	w.never("nothing brings them back", time.Second, func() error { return errors.Join(isGone(smcr), isGone(l)) })
}

func TestStartupTaint(t *testing.T) {
	w := newWorld(t)
	name := "n-" + w.ns
	n := newNode(name)
	n.Spec.Taints = []corev1.Taint{
		{Key: v1alpha1.TaintAgentNotReady, Effect: corev1.TaintEffectNoSchedule},
		{Key: "example.com/mine", Value: "1", Effect: corev1.TaintEffectNoSchedule},
	}
	w.create(n)
	agent, smcr := newAgent(name), newSMCRNode(name)
	smcr.Status.Conditions[0].Status = metav1.ConditionFalse
	w.create(agent)
	w.create(smcr)
	w.run(w.limited(w.config, "controller.yaml", "kube-smcr-controller", "kube-smcr-controller-startup-taint"), func(c *Config) { c.StartupTaint = true })
	taints := func() (out []string) {
		for _, t := range n.Spec.Taints {
			if t.Key != corev1.TaintNodeNotReady { // the API server puts it on new nodes
				out = append(out, t.Key)
			}
		}
		return out
	}
	w.never("the taint stays while the agent is not ready", 2*time.Second, func() error {
		if err := w.get(n); err != nil {
			return err
		}
		if len(taints()) != 2 {
			return fmt.Errorf("taints are %v", taints())
		}
		return nil
	})
	update(w, smcr, func(n *v1alpha1.SMCRNode) {
		meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionReady).Status = metav1.ConditionTrue
	})
	w.eventually("only the taint goes", func() error {
		if err := w.get(n); err != nil {
			return err
		}
		if d := cmp.Diff([]string{"example.com/mine"}, taints()); d != "" {
			return errors.New(d)
		}
		return nil
	})
}

// quick makes leader election fail over within seconds.
func quick(c *Config) {
	c.LeaderElect = true
	c.LeaseDuration, c.RenewDeadline, c.RetryPeriod = 2*time.Second, 1500*time.Millisecond, 250*time.Millisecond
}

// One of two replicas works; when it ends, or loses the API server, the other
// one does.
func TestLeaderFailover(t *testing.T) {
	w := newWorld(t)
	proxy, through := server.NewProxy(t)
	api := w.limited(through, "controller.yaml", "kube-smcr-controller")
	p := w.policy("web")
	observed := func(generation int64) func() error {
		return func() error {
			if err := w.get(p); err != nil {
				return err
			}
			if p.Status.ObservedGeneration != generation {
				return fmt.Errorf("observedGeneration is %d, want %d", p.Status.ObservedGeneration, generation)
			}
			return nil
		}
	}
	// The first one leads before the second one is there.
	stopFirst := w.run(api, quick)
	w.eventually("the first replica works", observed(1))
	direct := w.direct(api)
	stopSecond := w.run(direct, quick)

	proxy.TakeAway()
	began := time.Now()
	update(w, p, func(p *v1alpha1.SMCRPolicy) { p.Spec.Priority = 1 })
	w.eventually("the second replica takes over when the first loses the API server", observed(2))
	t.Logf("failover took %v with leases of 2 s", time.Since(began))
	proxy.GiveBack()

	// The first one has started again in its process, and waits for the lease.
	stopSecond()
	update(w, p, func(p *v1alpha1.SMCRPolicy) { p.Spec.Priority = 2 })
	w.eventually("the first replica takes over again", observed(3))
	stopFirst()
}

// A single controller goes on when the API server comes back, whatever it did
// meanwhile.
func TestAPIServerLoss(t *testing.T) {
	const outage = 3 * time.Second // longer than the lease
	w := newWorld(t)
	w.node("n-" + w.ns)
	proxy, through := server.NewProxy(t)
	p := w.policy("web")
	w.run(w.limited(through, "controller.yaml", "kube-smcr-controller"), quick)
	matched := func(n int32) func() error {
		return func() error {
			if err := w.get(p); err != nil {
				return err
			}
			if p.Status.Pods.Matched != n || p.Status.ObservedGeneration == 0 {
				return fmt.Errorf("matched is %d, want %d", p.Status.Pods.Matched, n)
			}
			return nil
		}
	}
	w.eventually("the controller works", matched(0))
	for _, fault := range []struct {
		name  string
		works bool // meanwhile
		do    func()
	}{
		{name: "no answer", do: proxy.TakeAway},
		{name: "errors", do: func() { proxy.Answer(500) }},
		{name: "too many requests", do: func() { proxy.Answer(429) }},
		{name: "slow", works: true, do: func() { proxy.Delay(700 * time.Millisecond) }},
	} {
		fault.do()
		p0 := p.Status.Pods.Matched
		w.pod(fmt.Sprintf("p%d", p0), "n-"+w.ns, fmt.Sprintf("10.4.0.%d", p0+1))
		if fault.works {
			w.eventually(fault.name+": the controller works", matched(p0+1))
		} else {
			w.never(fault.name+": the controller writes", outage, matched(p0))
		}
		proxy.GiveBack()
		began := time.Now()
		w.eventually(fault.name+": the controller works again", matched(p0+1))
		t.Logf("%s: converged %v after it ended", fault.name, time.Since(began))
	}
}
