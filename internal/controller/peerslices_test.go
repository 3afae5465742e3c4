// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

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
	if err := w.get(&l.Items[0]); err != nil {
		t.Fatal(err)
	}
	update(w, &l.Items[0], func(s *v1alpha1.SMCRPeerSlice) { s.Labels, s.Addresses = nil, []string{"192.0.2.1"} })
	w.eventually("a slice without its label", has("10.2.0.1", "10.2.0.2"))
	if err := w.get(&l.Items[0]); err != nil || l.Items[0].Labels[v1alpha1.LabelPolicy] != p.Name {
		t.Errorf("the slice has the labels %v, %v", l.Items[0].Labels, err)
	}
	update(w, &l.Items[0], func(s *v1alpha1.SMCRPeerSlice) { s.Policy = "nobody" })
	w.eventually("a slice of another policy", func() error {
		if err := w.get(&l.Items[0]); err != nil || l.Items[0].Policy != p.Name {
			return fmt.Errorf("the slice is of policy %s, %w", l.Items[0].Policy, err)
		}
		return nil
	})
	if err := w.Delete(t.Context(), &l.Items[0]); err != nil {
		t.Fatal(err)
	}
	w.eventually("a slice that somebody deleted", has("10.2.0.1", "10.2.0.2"))
	if err := w.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	w.eventually("a deleted policy has no slices", func() error {
		var l v1alpha1.SMCRPeerSliceList
		if err := w.List(t.Context(), &l, client.InNamespace(w.ns)); err != nil || len(l.Items) > 0 {
			return fmt.Errorf("%d slices, %w", len(l.Items), err)
		}
		return nil
	})
}

// TestOwnersOf: an event of a slice concerns each policy that the slice named, in its field or its label, before or after.
func TestOwnersOf(t *testing.T) {
	slice := func(policy, label string) *v1alpha1.SMCRPeerSlice {
		s := &v1alpha1.SMCRPeerSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "s"}, Policy: policy}
		if label != "" {
			s.Labels = map[string]string{v1alpha1.LabelPolicy: label}
		}
		return s
	}
	for _, tt := range []struct {
		name     string
		old, now *v1alpha1.SMCRPeerSlice
		want     []string
	}{
		{"new", nil, slice("a", "a"), []string{"a"}},
		{"gone", slice("a", "a"), nil, []string{"a"}},
		{"another field", slice("a", "a"), slice("b", "a"), []string{"a", "b"}},
		{"other field and label", slice("a", "a"), slice("b", "c"), []string{"a", "b", "c"}},
		{"no label and no field any more", slice("a", "b"), slice("", ""), []string{"a", "b"}},
		{"wrong before the controller began", nil, slice("b", "a"), []string{"b", "a"}},
	} {
		var got []string
		for _, k := range ownersOf(tt.old, tt.now) {
			if k.Namespace != "shop" {
				t.Errorf("%s: %v", tt.name, k)
			}
			got = append(got, k.Name)
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}

// lagging is a cache that has pods of a node, and no namespace yet.
type lagging struct {
	client.Client // nil: nothing else is asked
	node          string
}

func (lagging) Get(_ context.Context, k client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
	return apierrors.NewNotFound(corev1.Resource("namespaces"), k.Name)
}

func (l lagging) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*corev1.PodList).Items = []corev1.Pod{{Spec: corev1.PodSpec{NodeName: l.node}}}
	return nil
}

// refusing is an API server that answers updates with an error.
type refusing struct {
	client.Client // nil: nothing else is asked
	err           error
	deleted       int
}

func (r *refusing) Update(context.Context, client.Object, ...client.UpdateOption) error { return r.err }

func (r *refusing) Delete(context.Context, client.Object, ...client.DeleteOption) error {
	r.deleted++
	return nil
}

// TestPeers_carryOut: slices whose addresses go to another one stay until that one has them.
func TestPeers_carryOut(t *testing.T) {
	obj := newPolicy("shop", "p")
	have := carriedOut(nil, placeAddresses(obj, nil, addrs(0, 2*v1alpha1.MaxPeerAddresses+1)))
	todo := placeAddresses(obj, have, slices.Concat(addrs(0, 2), addrs(v1alpha1.MaxPeerAddresses, 2), addrs(2*v1alpha1.MaxPeerAddresses, 1)))
	if len(todo.update) == 0 || len(todo.remove) == 0 {
		t.Fatalf("%d slices changed, %d removed: want three that become one", len(todo.update), len(todo.remove))
	}
	slice := v1alpha1.GroupVersion().WithResource("smcrpeerslices").GroupResource()
	for _, tt := range []struct {
		name    string
		err     error
		deletes int
	}{
		{"the update is done", nil, len(todo.remove)},
		{"somebody else changed the slice", apierrors.NewConflict(slice, "p-0", errors.New("changed")), 0},
		{"somebody else deleted it", apierrors.NewNotFound(slice, "p-0"), 0},
	} {
		c := &refusing{err: tt.err}
		err := (&peers{client: c}).carryOut(t.Context(), todo)
		if c.deleted != tt.deletes || (err != nil) != (tt.err != nil) {
			t.Errorf("%s: %d deleted, want %d; error %v", tt.name, c.deleted, tt.deletes, err)
		}
	}
}

// writing is an API server that keeps the names of what is written, and refuses one of them.
type writing struct {
	client.Client // nil: nothing else is asked
	refused       string
	written       []string
}

func (w *writing) write(o client.Object) error {
	if o.GetName() == w.refused {
		return errors.New("refused")
	}
	w.written = append(w.written, o.GetName())
	return nil
}

func (w *writing) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	return w.write(o)
}

func (w *writing) Update(_ context.Context, o client.Object, _ ...client.UpdateOption) error {
	return w.write(o)
}

// TestPeers_firstIsLast: the first slice is written when all others are, as agents take it as the sign of that.
func TestPeers_firstIsLast(t *testing.T) {
	obj := newPolicy("shop", "p")
	obj.Generation = 1
	all := addrs(0, 3*v1alpha1.MaxPeerAddresses)
	anew := placeAddresses(obj, nil, all)
	have := carriedOut(nil, anew)
	next := obj.DeepCopy()
	next.Generation = 2
	for name, todo := range map[string]placement{
		"new":                   anew,
		"another generation":    placeAddresses(next, have, all),
		"the first one deleted": placeAddresses(next, slices.DeleteFunc(slices.Clone(have), func(s v1alpha1.SMCRPeerSlice) bool { return isFirst(&s) }), all),
	} {
		var c writing
		if err := (&peers{client: &c}).carryOut(t.Context(), todo); err != nil || len(c.written) != 3 || c.written[2] != "p-0" {
			t.Errorf("%s: written %v, %v", name, c.written, err)
		}
		c = writing{refused: "p-2"}
		if err := (&peers{client: &c}).carryOut(t.Context(), todo); err == nil || slices.Contains(c.written, "p-0") {
			t.Errorf("%s: written %v though one is missing, %v", name, c.written, err)
		}
	}
}

// TestPeers_podsBeforeTheirNamespace: a pod's event that comes before its namespace is known leads to no policy, so that
// of the namespace has to.
func TestPeers_podsBeforeTheirNamespace(t *testing.T) {
	p := compile(newPolicy("shop", "clients", func(s *v1alpha1.SMCRPolicySpec) {
		s.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{
			NamespaceSelector: &v1alpha1.LabelSelector{MatchLabels: map[string]v1alpha1.LabelValue{"team": "x"}},
		}}}
	}))
	want := []types.NamespacedName{client.ObjectKeyFromObject(p.obj)}
	r := &peers{client: lagging{}, compiled: map[types.NamespacedName]*policy{want[0]: p}}
	if got := r.lookingAt("new"); len(got) != 0 {
		t.Fatalf("%v of a pod whose namespace is not known", got)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "new", Labels: map[string]string{"team": "x"}}}
	if d := cmp.Diff(want, r.lookingAtChanged(nil, ns)); d != "" {
		t.Errorf("of the new namespace (-want +got):\n%s", d)
	}
	if d := cmp.Diff(want, r.lookingAtChanged(ns, nil)); d != "" { // before the last event of its pods
		t.Errorf("of the namespace that is gone (-want +got):\n%s", d)
	}
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
	if got := append(r.lookingAtChanged(nil, other), r.lookingAtChanged(ns, ns)...); len(got) != 0 {
		t.Errorf("%v of a namespace without peers, and of one that is as it was", got)
	}
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
			if g := p.Status.PeersGeneration; g == nil || *g != p.Generation {
				return fmt.Errorf("peersGeneration is %v, want %d", g, p.Generation)
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
