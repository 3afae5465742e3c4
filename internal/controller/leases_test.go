// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestLeases: what the renewals of its Lease say of an agent.
func TestLeases(t *testing.T) {
	start := time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	now := start
	l := newLeases()
	is := func(what, label string, want verdict) {
		t.Helper()
		if got, _ := l.judge(label); got != want {
			t.Errorf("%v: %s: %v, want %v", now.Sub(start), what, got, want)
		}
	}
	// pass lets time pass in which the leader and these agents renew.
	pass := func(d time.Duration, agents ...string) {
		for end := now.Add(d); now.Before(end); {
			now = now.Add(time.Second)
			l.saw("", "", now)
			for _, a := range agents {
				l.saw(a, a, now)
			}
		}
	}
	l.saw("", "", now)
	is("an agent that was never seen", "a", noLease)
	l.saw("a", "a", now)
	l.saw("old", "old", now)
	is("the first sight of a Lease", "a", unproved)
	pass(3*time.Second, "a")
	is("a Lease that was renewed", "a", renewed)
	is("a Lease that was not", "old", unproved)
	pass(silentAfter, "a")
	is("a Lease that goes on", "a", renewed)
	is("a Lease of an agent that was gone when the controller started", "old", silent)
	pass(silentAfter - time.Second)
	is("shortly before", "a", renewed)
	now = now.Add(time.Hour)
	is("nobody renews, since the API server hangs", "a", renewed)
	l.saw("", "", now)
	is("the API server is back", "a", renewed)
	pass(time.Second)
	is("the API server was back for long enough", "a", silent)
	l.takeNews()
	l.saw("a", "a", now)
	if news := l.takeNews(); !slices.Equal(news, []string{"a"}) {
		t.Errorf("the return of an agent is the news %q", news)
	}
	l.saw("a", "a", now)
	if news := l.takeNews(); len(news) > 0 {
		t.Errorf("a renewal is the news %q", news)
	}
	is("the agent is back", "a", renewed)
	l.forget("a", "a")
	is("its Lease was deleted", "a", noLease)
}

// TestLeases_follow: which events of the watch are renewals, and whose.
func TestLeases_follow(t *testing.T) {
	l := newLeases()
	h := l.follow()
	lease := func(name, node string, renewed int) *coordinationv1.Lease {
		x := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}
		x.Spec.RenewTime = &metav1.MicroTime{Time: time.Unix(int64(renewed), 0)}
		if node != "" {
			x.OwnerReferences = []metav1.OwnerReference{{Kind: "Node", Name: node}}
		}
		return x
	}
	const long = v1alpha1.AgentLeasePrefix + "6f1c"
	expect := func(what, label string, want verdict, news ...string) {
		t.Helper()
		if got, _ := l.judge(label); got != want {
			t.Errorf("%s: verdict %v, want %v", what, got, want)
		}
		if got := l.takeNews(); !slices.Equal(got, news) {
			t.Errorf("%s: news of %q, want of %q", what, got, news)
		}
	}
	h.OnAdd(lease("kube-smcr-controller", "", 1), true)
	expect("the controller's own Lease", "kube-smcr-controller", noLease)
	h.OnAdd(lease(long, "node-with-a-long-name", 1), true)
	expect("an agent's Lease is found", "6f1c", unproved, "node-with-a-long-name")
	h.OnUpdate(lease(long, "node-with-a-long-name", 1), lease(long, "node-with-a-long-name", 1))
	expect("the Lease changed, but was not renewed", "6f1c", unproved)
	h.OnUpdate(lease(long, "node-with-a-long-name", 1), lease(long, "node-with-a-long-name", 2))
	expect("the Lease is renewed", "6f1c", renewed, "node-with-a-long-name")
	h.OnDelete(toolscache.DeletedFinalStateUnknown{Obj: lease(long, "node-with-a-long-name", 2)})
	expect("the watch missed how the Lease was deleted", "6f1c", noLease, "node-with-a-long-name")
	h.OnAdd(lease(v1alpha1.AgentLeasePrefix+"b", "", 1), false)
	expect("a Lease without an owner", "b", unproved, "b")
}
