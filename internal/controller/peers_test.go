// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestResolvePeers(t *testing.T) {
	pod := func(ns, name, app, ip string, edits ...func(*corev1.Pod)) corev1.Pod {
		p := newPod(ns, name, "n", ip)
		p.Labels["app"] = app
		for _, e := range edits {
			e(p)
		}
		return *p
	}
	service := func(ns, app string, ips ...string) corev1.Service {
		return corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: app},
			Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": app}, ClusterIPs: ips},
		}
	}
	matching := func(k, v string) *v1alpha1.LabelSelector {
		return &v1alpha1.LabelSelector{MatchLabels: map[string]v1alpha1.LabelValue{k: v1alpha1.LabelValue(v)}}
	}
	everything := &v1alpha1.LabelSelector{}
	hostNetwork := func(p *corev1.Pod) { p.Spec.HostNetwork = true }
	terminating := func(p *corev1.Pod) { now := metav1.Now(); p.DeletionTimestamp = &now }
	pending := func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }
	for _, tt := range []struct {
		name      string
		selectors []v1alpha1.PeerSelector
		pods      []corev1.Pod
		services  []corev1.Service
		want      []string
	}{
		{
			name: "pods of the own namespace", selectors: []v1alpha1.PeerSelector{{PodSelector: everything}},
			pods: []corev1.Pod{pod("shop", "a", "a", "10.0.0.2"), pod("shop", "b", "b", "10.0.0.1"), pod("other", "c", "c", "10.0.0.3")},
			want: []string{"10.0.0.1", "10.0.0.2"},
		},
		{
			name: "namespace and pod must both match", selectors: []v1alpha1.PeerSelector{{NamespaceSelector: matching("team", "other"), PodSelector: matching("app", "db")}},
			pods: []corev1.Pod{pod("shop", "a", "db", "10.0.0.1"), pod("other", "b", "db", "10.0.0.2"), pod("other", "c", "web", "10.0.0.3")},
			want: []string{"10.0.0.2"},
		},
		{
			name: "the union of several", selectors: []v1alpha1.PeerSelector{{PodSelector: matching("app", "a")}, {NamespaceSelector: everything, PodSelector: matching("app", "c")}},
			pods: []corev1.Pod{pod("shop", "a", "a", "10.0.0.1"), pod("shop", "b", "b", "10.0.0.2"), pod("other", "c", "c", "10.0.0.3")},
			want: []string{"10.0.0.1", "10.0.0.3"},
		},
		{
			name: "both families", selectors: []v1alpha1.PeerSelector{{PodSelector: everything}},
			pods: []corev1.Pod{pod("shop", "a", "a", "10.0.0.1", func(p *corev1.Pod) {
				p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: "fd00::1"})
			})},
			want: []string{"10.0.0.1", "fd00::1"},
		},
		{
			name: "no pods of the host's network, none that ended or has no address yet", selectors: []v1alpha1.PeerSelector{{PodSelector: everything}},
			pods: []corev1.Pod{
				pod("shop", "a", "a", "192.0.2.1", hostNetwork), pod("shop", "b", "b", ""),
				pod("shop", "c", "c", "10.0.0.3", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }),
			},
		},
		{
			name: "a Service all of whose pods are selected", selectors: []v1alpha1.PeerSelector{{PodSelector: matching("app", "db")}},
			pods:     []corev1.Pod{pod("shop", "a", "db", "10.0.0.1"), pod("shop", "b", "web", "10.0.0.2")},
			services: []corev1.Service{service("shop", "db", "10.96.0.1", "fd00:96::1"), service("shop", "web", "10.96.0.2")},
			want:     []string{"10.0.0.1", "10.96.0.1", "fd00:96::1"},
		},
		{
			name: "a Service that also has other pods", selectors: []v1alpha1.PeerSelector{{PodSelector: matching("version", "2")}},
			pods:     []corev1.Pod{pod("shop", "a", "db", "10.0.0.1", labelled("version", "1")), pod("shop", "b", "db", "10.0.0.2", labelled("version", "2"))},
			services: []corev1.Service{service("shop", "db", "10.96.0.1")},
			want:     []string{"10.0.0.2"},
		},
		{
			name: "a pod that terminates, and its Service", selectors: []v1alpha1.PeerSelector{{PodSelector: matching("app", "db")}},
			pods:     []corev1.Pod{pod("shop", "a", "db", "10.0.0.1", terminating)},
			services: []corev1.Service{service("shop", "db", "10.96.0.1")},
			want:     []string{"10.0.0.1", "10.96.0.1"},
		},
		{
			name: "a Service of which another pod terminates", selectors: []v1alpha1.PeerSelector{{PodSelector: matching("version", "2")}},
			pods:     []corev1.Pod{pod("shop", "a", "db", "10.0.0.1", labelled("version", "1"), terminating), pod("shop", "b", "db", "10.0.0.2", labelled("version", "2"))},
			services: []corev1.Service{service("shop", "db", "10.96.0.1")},
			want:     []string{"10.0.0.2"},
		},
		{
			name: "a pod whose init containers run, and its Service", selectors: []v1alpha1.PeerSelector{{PodSelector: matching("app", "db")}},
			pods:     []corev1.Pod{pod("shop", "a", "db", "10.0.0.1", pending)},
			services: []corev1.Service{service("shop", "db", "10.96.0.1")},
			want:     []string{"10.0.0.1", "10.96.0.1"},
		},
		{
			name: "a Service of which the init containers of another pod run", selectors: []v1alpha1.PeerSelector{{PodSelector: matching("version", "2")}},
			pods:     []corev1.Pod{pod("shop", "a", "db", "10.0.0.1", labelled("version", "1"), pending), pod("shop", "b", "db", "10.0.0.2", labelled("version", "2"))},
			services: []corev1.Service{service("shop", "db", "10.96.0.1")},
			want:     []string{"10.0.0.2"},
		},
		{
			name: "pods that wait for a node or an image, of which one is in the host's network and has its address", selectors: []v1alpha1.PeerSelector{{PodSelector: everything}},
			pods: []corev1.Pod{
				pod("shop", "a", "db", "10.0.0.1"), pod("shop", "b", "db", "", pending, labelled("version", "1")),
				pod("shop", "c", "web", "192.0.2.1", pending, hostNetwork), pod("shop", "d", "web", "10.0.0.2"),
			},
			services: []corev1.Service{service("shop", "db", "10.96.0.1"), service("shop", "web", "10.96.0.2")},
			want:     []string{"10.0.0.1", "10.0.0.2", "10.96.0.1"},
		},
		{
			name: "a Service with a pod in the host's network", selectors: []v1alpha1.PeerSelector{{PodSelector: everything}},
			pods:     []corev1.Pod{pod("shop", "a", "db", "10.0.0.1"), pod("shop", "b", "db", "192.0.2.1", hostNetwork)},
			services: []corev1.Service{service("shop", "db", "10.96.0.1")},
			want:     []string{"10.0.0.1"},
		},
		{
			name: "Services without address, pods or selector", selectors: []v1alpha1.PeerSelector{{PodSelector: everything}},
			pods: []corev1.Pod{pod("shop", "a", "db", "10.0.0.1")},
			services: []corev1.Service{
				service("shop", "db", "None"), service("shop", "db"), service("shop", "nobody", "10.96.0.3"),
				{Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.4"}}},
			},
			want: []string{"10.0.0.1"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := compile(newPolicy("shop", "p", func(s *v1alpha1.SMCRPolicySpec) { s.Peers = &v1alpha1.PolicyPeers{Selectors: tt.selectors} }))
			got, err := resolvePeers(p, peerView{
				namespaces: []corev1.Namespace{
					{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"team": "shop"}}},
					{ObjectMeta: metav1.ObjectMeta{Name: "other", Labels: map[string]string{"team": "other"}}},
				},
				pods: func(ns string) (out []corev1.Pod, err error) {
					for _, p := range tt.pods {
						if p.Namespace == ns {
							out = append(out, p)
						}
					}
					return out, nil
				},
				services: func(ns string) (out []corev1.Service, err error) {
					if ns == "shop" {
						out = tt.services
					}
					return out, nil
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			var texts []string
			for _, a := range got {
				texts = append(texts, a.String())
			}
			if d := cmp.Diff(tt.want, texts); d != "" {
				t.Errorf("addresses (-want +got):\n%s", d)
			}
		})
	}
}

// addrs are n addresses from the first one on.
func addrs(first, n int) (out []netip.Addr) {
	for i := first; i < first+n; i++ {
		out = append(out, netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}))
	}
	return out
}

// carriedOut is what slices are after a placement.
func carriedOut(have []v1alpha1.SMCRPeerSlice, p placement) []v1alpha1.SMCRPeerSlice {
	byName := map[string]v1alpha1.SMCRPeerSlice{}
	for _, s := range have {
		byName[s.Name] = s
	}
	for _, s := range p.remove {
		delete(byName, s.Name)
	}
	for _, s := range append(p.update, p.create...) {
		byName[s.Name] = *s
	}
	var out []v1alpha1.SMCRPeerSlice
	for _, s := range byName {
		out = append(out, s)
	}
	return out
}

func check(t *testing.T, have []v1alpha1.SMCRPeerSlice, want []netip.Addr) {
	t.Helper()
	var got []netip.Addr
	for _, s := range have {
		if n := len(s.Addresses); n == 0 && !isFirst(&s) || n > v1alpha1.MaxPeerAddresses {
			t.Fatalf("slice %s has %d addresses", s.Name, n)
		}
		for _, a := range s.Addresses {
			got = append(got, netip.MustParseAddr(a))
		}
	}
	slices.SortFunc(got, netip.Addr.Compare)
	if !slices.Equal(got, want) {
		t.Fatalf("the slices hold %d addresses, want %d", len(got), len(want))
	}
}

func TestPlaceAddresses(t *testing.T) {
	p := newPolicy("shop", "p")
	p.Generation = 1
	start := carriedOut(nil, placeAddresses(p, nil, addrs(0, 600)))
	check(t, start, addrs(0, 600))
	if len(start) != 3 {
		t.Fatalf("600 addresses take %d slices, want 3", len(start))
	}
	without := func(all []netip.Addr, i ...int) []netip.Addr {
		var out []netip.Addr
		for n, a := range all {
			if !slices.Contains(i, n) {
				out = append(out, a)
			}
		}
		return out
	}
	for _, tt := range []struct {
		name                   string
		want                   []netip.Addr
		create, update, remove int
	}{
		{name: "nothing changed", want: addrs(0, 600)},
		{name: "one more goes where there is room", want: addrs(0, 601), update: 1},
		{name: "one less", want: without(addrs(0, 600), 100), update: 1},
		{name: "one replaced is one write", want: without(addrs(0, 601), 100), update: 1},
		{name: "more than there is room for", want: addrs(0, 800), update: 1, create: 1},
		{name: "an emptied slice goes", want: addrs(0, 512), remove: 1},
		{name: "the first one stays", want: addrs(256, 344), update: 1},
		{name: "none left", want: nil, update: 1, remove: 2},
		{name: "nearly empty slices are put together", want: append(append(addrs(0, 10), addrs(256, 10)...), addrs(512, 10)...), update: 1, remove: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := placeAddresses(p, start, tt.want)
			check(t, carriedOut(start, got), tt.want)
			if len(got.create) != tt.create || len(got.update) != tt.update || len(got.remove) != tt.remove {
				t.Errorf("%d created, %d updated, %d removed, want %d, %d, %d",
					len(got.create), len(got.update), len(got.remove), tt.create, tt.update, tt.remove)
			}
		})
	}
	t.Run("a new address goes where something changes anyway", func(t *testing.T) {
		have := carriedOut(start, placeAddresses(p, start, addrs(100, 500))) // room in the first slice
		want := append(without(addrs(100, 500), 300), addrs(600, 1)...)
		got := placeAddresses(p, have, want)
		check(t, carriedOut(have, got), want)
		if len(got.update) != 1 || len(got.create)+len(got.remove) > 0 {
			t.Errorf("%d slices updated, want the one that loses an address only", len(got.update))
		}
	})
	t.Run("none at all is a slice, too", func(t *testing.T) {
		got := placeAddresses(p, nil, nil)
		if len(got.create) != 1 || got.create[0].Name != v1alpha1.FirstPeerSlice(p.Name) || len(got.create[0].Addresses) > 0 {
			t.Fatalf("%d slices made, want the first one, empty", len(got.create))
		}
		have := carriedOut(nil, got)
		if got := placeAddresses(p, have, nil); len(got.create)+len(got.update)+len(got.remove) > 0 {
			t.Error("written again")
		}
		if got := placeAddresses(p, have, addrs(0, 1)); len(got.update) != 1 || len(got.create) > 0 {
			t.Errorf("%d slices updated for an address, want 1", len(got.update))
		}
	})
	t.Run("another generation of the policy is written", func(t *testing.T) {
		q := p.DeepCopy()
		q.Generation = 2
		if got := placeAddresses(q, start, addrs(0, 600)); len(got.update) != 3 || got.update[0].PolicyGeneration != 2 {
			t.Errorf("%d slices updated, want all 3", len(got.update))
		}
	})
	t.Run("slices of a former policy of the name become this one's", func(t *testing.T) {
		q := p.DeepCopy()
		q.UID = "anew"
		got := placeAddresses(q, start, addrs(0, 600))
		if len(got.update) != 3 || len(got.create)+len(got.remove) > 0 {
			t.Fatalf("%d slices updated, want all 3: the garbage collector deletes those of a policy that is gone", len(got.update))
		}
		if s := got.update[0]; !metav1.IsControlledBy(s, q) {
			t.Errorf("slice %s belongs to %v", s.Name, s.OwnerReferences)
		}
	})
	t.Run("an address in two slices stays in one", func(t *testing.T) {
		twice := slices.Clone(start)
		for i := range twice {
			if twice[i].Name == "p-2" {
				twice[i].Addresses = append(slices.Clone(twice[i].Addresses), "10.0.0.1")
			}
		}
		check(t, carriedOut(twice, placeAddresses(p, twice, addrs(0, 600))), addrs(0, 600))
	})
	t.Run("too many", func(t *testing.T) {
		got := placeAddresses(p, nil, addrs(0, maxPeerAddresses+5))
		if got.truncated != 5 || len(got.create) != maxPeerSlices {
			t.Errorf("%d left out of %d slices, want 5 of %d", got.truncated, len(got.create), maxPeerSlices)
		}
		// The first slice says how many, and no other one.
		says := func(have []v1alpha1.SMCRPeerSlice, want int) {
			t.Helper()
			for i := range have {
				s := &have[i]
				if got := leftOut(s); isFirst(s) && got != want || !isFirst(s) && len(s.Annotations) > 0 {
					t.Errorf("slice %s says %d, want %d; annotations %v", s.Name, got, want, s.Annotations)
				}
			}
		}
		have := carriedOut(nil, got)
		says(have, 5)
		if again := placeAddresses(p, have, addrs(0, maxPeerAddresses+5)); len(again.create)+len(again.update)+len(again.remove) > 0 {
			t.Errorf("the same addresses again are written again: %d slices", len(again.update))
		}
		more := placeAddresses(p, have, addrs(0, maxPeerAddresses+6))
		if len(more.update) != 1 || len(more.create)+len(more.remove) > 0 {
			t.Errorf("%d slices updated for another one too many, want 1", len(more.update))
		}
		says(carriedOut(have, more), 6)
		says(carriedOut(have, placeAddresses(p, have, addrs(0, maxPeerAddresses))), 0)
	})
}

// However addresses come and go, the slices hold exactly them, few of them are
// written, and there are not many more than needed.
func TestPlaceAddresses_random(t *testing.T) {
	seed := testenv.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	p := newPolicy("shop", "p")
	var have []v1alpha1.SMCRPeerSlice
	present := map[int]bool{}
	for step := range 300 {
		n := r.IntN(40)
		if step%50 == 49 {
			n = 2000 // a large scale-up or scale-down
		}
		grow := r.IntN(2) == 0
		for range n {
			if i := r.IntN(3000); grow {
				present[i] = true
			} else {
				delete(present, i)
			}
		}
		var want []netip.Addr
		for i := range present {
			want = append(want, addrs(i, 1)...)
		}
		slices.SortFunc(want, netip.Addr.Compare)
		have = carriedOut(have, placeAddresses(p, have, want))
		check(t, have, want)
		if need := (len(want) + v1alpha1.MaxPeerAddresses - 1) / v1alpha1.MaxPeerAddresses; len(have) > 2*need+1 {
			t.Fatalf("seed %d, step %d: %d slices for %d addresses", seed, step, len(have), len(want))
		}
		if got := placeAddresses(p, have, want); len(got.create)+len(got.update)+len(got.remove) != 0 {
			t.Fatalf("seed %d, step %d: the same addresses again are written again", seed, step)
		}
	}
}

func TestSliceNumber(t *testing.T) {
	for _, tt := range []struct {
		policy, slice string
		want          int
	}{
		{"p", "p-0", 0},
		{"p", "p-12", 12},
		{"p-1", "p-1-3", 3},
		{"p", "p-1-3", maxPeerSlices},
		{"p", "p-01", maxPeerSlices},
		{"p", "other", maxPeerSlices},
	} {
		if got := sliceNumber(tt.policy, tt.slice); got != tt.want {
			t.Errorf("sliceNumber(%s, %s) = %d, want %d", tt.policy, tt.slice, got, tt.want)
		}
	}
}

func TestCompareRank(t *testing.T) {
	at := func(name string, priority int32, seconds int64) *v1alpha1.SMCRPolicy {
		p := newPolicy("shop", name)
		p.Spec.Priority, p.CreationTimestamp = priority, metav1.Unix(seconds, 0)
		return p
	}
	want := []string{"high", "old", "a", "b"}
	ps := []*v1alpha1.SMCRPolicy{at("b", 0, 20), at("a", 0, 20), at("high", 1, 30), at("old", 0, 10)}
	slices.SortFunc(ps, v1alpha1.CompareRank)
	var got []string
	for _, p := range ps {
		got = append(got, p.Name)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
