// SPDX-License-Identifier: Apache-2.0

package report

import (
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

func newTestPlanner() *planner {
	q := newQueue(rand.New(rand.NewPCG(1, 2)))
	q.blocked = false
	p := newPlanner(identity{node: node, agentPod: "kube-smcr/agent-x"}, q, newEvents())
	p.owner = "uid-of-node"
	return p
}

func TestSightOf(t *testing.T) {
	link := &v1alpha1.SMCRLink{ObjectMeta: metav1.ObjectMeta{Name: "l", UID: "1", ResourceVersion: "5", Labels: map[string]string{v1alpha1.LabelAgent: "agent-y"}}}
	s, ok := observationOf(link)
	if !ok || s.key != (key{kind: kindLink, name: "l"}) || s.agent != "agent-y" || s.uid != "1" || s.version != "5" || !s.target.present {
		t.Errorf("link: %+v, %t", s, ok)
	}
	// The condition that the controller writes is not ours to compare with.
	of := func(extra ...metav1.Condition) *v1alpha1.SMCRNode {
		n := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: node, ResourceVersion: "6"}}
		n.Status.Conditions = append([]metav1.Condition{{Type: v1alpha1.ConditionReady, Status: "True"}}, extra...)
		return n
	}
	mine, _ := observationOf(of())
	both, ok := observationOf(of(metav1.Condition{Type: v1alpha1.ConditionAgentAlive, Status: "True"}))
	if !ok || mine.key.kind != kindNode || !mine.target.same(&both.target) {
		t.Errorf("node: %+v and %+v", mine, both)
	}
	if s, ok := observationOf(&corev1.Pod{}); ok {
		t.Errorf("pod: %+v", s)
	}
}

func TestTrim(t *testing.T) {
	link := &v1alpha1.SMCRLink{ObjectMeta: metav1.ObjectMeta{Name: "l", ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "x"}}}}
	got, err := trim(link)
	if err != nil || got != link || link.ManagedFields != nil || link.Name != "l" {
		t.Errorf("trimmed to %+v, %v", got, err)
	}
}

func TestOlder(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"9", "10", true},
		{"10", "10", true},
		{"11", "10", false},
		{"", "10", false}, // no version: it must be looked at
		{"10", "", false},
	} {
		if got := older(tt.a, tt.b); got != tt.want {
			t.Errorf("older(%q, %q) = %t", tt.a, tt.b, got)
		}
	}
}

// link is an SMCRLink of the agent of newTestPlanner.
func link(name, version string) *v1alpha1.SMCRLink {
	return &v1alpha1.SMCRLink{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version, Labels: map[string]string{v1alpha1.LabelAgent: "agent-x"}}}
}

// missed is the observation of an object that a list lacks, after the watch was not connected. last is its last state that the
// watch saw.
func missed(last metav1.Object) (s observation) {
	handler(func(o observation) { s = o }).OnDelete(cache.DeletedFinalStateUnknown{Key: last.GetName(), Obj: last})
	return s
}

func TestHandler(t *testing.T) {
	var got []observation
	h := handler(func(s observation) { got = append(got, s) })
	h.OnAdd(link("l", "5"), false)
	h.OnUpdate(link("l", "5"), link("l", "6"))
	h.OnDelete(link("l", "7"))
	h.OnDelete(cache.DeletedFinalStateUnknown{Key: "l", Obj: link("l", "6")})
	h.OnDelete(cache.DeletedFinalStateUnknown{Key: "l"}) // of what, is not known
	for i, want := range []struct {
		version string
		present bool
	}{{"5", true}, {"6", true}, {"7", false}, {"", false}} {
		if i >= len(got) || got[i].key.name != "l" || got[i].version != want.version || got[i].target.present != want.present {
			t.Errorf("event %d: %+v, want version %q, present %t", i, got, want.version, want.present)
		}
	}
	if len(got) != 4 {
		t.Errorf("%d observations, want 4", len(got))
	}
}

// What the watch tells is written again only if it is news, and not our own write.
func TestPlanner_seen(t *testing.T) {
	k := key{kind: kindLink, name: "node-a-1"}
	ours, theirs := target{present: true, state: "ours"}, target{present: true, state: "theirs"}
	for _, tt := range []struct {
		name string
		see  observation
		want difference
	}{
		{"our own write", observation{key: k, target: ours, version: "7"}, inNothing},
		{"what was there before it", observation{key: k, target: theirs, version: "6"}, inNothing},
		{"somebody else's after it", observation{key: k, target: theirs, version: "8"}, inState},
		{"deleted", observation{key: k, version: "8"}, inState},
		{"deleted while the watch was not connected", missed(link(k.name, "7")), inState},
		{"deleted before the watch saw our write", missed(link(k.name, "6")), inState},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newTestPlanner()
			p.queue.want(k, ours, began())
			p.queue.wrote(k, ours, "7", began())
			if p.seen(tt.see, began()) {
				t.Error("it says that the node was deleted")
			}
			if got := p.queue.entries[k].differs; got != tt.want {
				t.Errorf("differs %d, want %d", got, tt.want)
			}
		})
	}
}

func TestPlanner_seenNodeDeleted(t *testing.T) {
	p, k := newTestPlanner(), key{kind: kindNode, name: node}
	p.queue.want(k, target{present: true}, began())
	p.queue.wrote(k, target{present: true}, "7", began())
	if !p.seen(observation{key: k, version: "8"}, began()) {
		t.Error("the SMCRNode was deleted, and nobody reads the node again")
	}
	p.queue.wrote(k, target{present: true}, "9", began())
	if !p.seen(missed(&v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: node, ResourceVersion: "9"}}), began()) {
		t.Error("the SMCRNode was deleted while the watch was not connected, and nobody reads the node again")
	}
	p.uninstalled = true
	p.queue.wrote(k, target{present: true}, "9", began())
	if p.seen(observation{key: k, version: "10"}, began()) || p.queue.entries[k].differs != inNothing {
		t.Error("the SMCRNode of an uninstalled node comes back")
	}
}

// SMCRLinks of other agents are remembered as long as they are there.
func TestPlanner_seenOthers(t *testing.T) {
	p, k := newTestPlanner(), key{kind: kindLink, name: "node-a-2"}
	p.seen(observation{key: k, target: target{present: true}, agent: "agent-y"}, began())
	if len(p.others) != 1 || len(p.queue.entries) != 0 {
		t.Errorf("others %v, queue %v", p.others, p.queue.entries)
	}
	p.seen(observation{key: k, agent: "agent-y"}, began())
	if len(p.others) != 0 {
		t.Errorf("others %v after it was deleted", p.others)
	}
}
