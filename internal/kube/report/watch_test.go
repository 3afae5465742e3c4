// SPDX-License-Identifier: Apache-2.0

package report

import (
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
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
			p.links[k.name] = &linkPlan{}
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

// TestReporter_linkComesBack: an SMCRLink of this agent that is there again after it was deleted, as by a write that timed
// out and was carried out later, is deleted again; the late news of its time before cost one write at most.
func TestReporter_linkComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		g := group("shop/web", 1, 1)
		src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{g} })
		start(t, srv, src)
		oneSecond()
		name := linkName(node, &g)
		src.change(func(s *Snapshot) { s.Links = nil })
		pass(2 * collectEvery)
		deleted := "delete SMCRLink " + name
		if w := srv.taken(); len(w) == 0 || w[len(w)-1] != deleted {
			t.Fatalf("when the link group ended: %v", w)
		}
		for range 2 {
			again := linkOf("agent-x", name)
			again.ResourceVersion = "100"
			srv.observations <- observationOfLink(&again)
			pass(2 * collectEvery)
			if diff := cmp.Diff([]string{deleted}, srv.taken()); diff != "" {
				t.Errorf("when it is there again (-want +got):\n%s", diff)
			}
			gone := observationOfLink(&again)
			gone.target = target{}
			srv.observations <- gone
			pass(time.Minute)
			if w := srv.taken(); len(w) != 0 {
				t.Errorf("when it is gone: %v", w)
			}
		}
		again := linkOf("agent-x", name)
		srv.observations <- observationOfLink(&again)
		gone := observationOfLink(&again)
		gone.target = target{}
		srv.observations <- gone
		pass(time.Minute)
		if w := srv.taken(); len(w) > 1 {
			t.Errorf("late news of what is gone: %v", w)
		}
	})
}

// An SMCRLink that is not planned, as its group has ended or the agent does not know its pods yet, is not written again
// as it was read when somebody changes or deletes it.
func TestPlanner_seenUnplanned(t *testing.T) {
	k := key{kind: kindLink, name: "node-a-1"}
	for _, present := range []bool{true, false} {
		p := newTestPlanner()
		p.takeLink(observation{key: k, target: target{present: true, state: "before"}, version: "7", agent: "agent-x"}, began())
		p.seen(observation{key: k, target: target{present: present, state: "after"}, version: "8", agent: "agent-x"}, began())
		e := p.queue.entries[k]
		if present != (e != nil) {
			t.Fatalf("present %t: the entry is %+v", present, e)
		}
		if e != nil && e.differs != inNothing {
			t.Errorf("changed: it is to be written as %v over %v", e.want.state, e.wrote.state)
		}
		if _, ok := p.uids[k.name]; ok != present {
			t.Errorf("present %t: its UID is remembered: %t", present, ok)
		}
	}
}

// An SMCRLink that is not known yet may be of a link group that is: its object is left, or written as it is to be.
func TestPlanner_seenOwn(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	g := group("shop/web", 1, 1)
	s.Links = []agentapi.LinkGroup{g}
	k := key{kind: kindLink, name: linkName(node, &g)}
	p.seen(observation{key: k, target: target{present: true, state: "old"}, agent: "agent-x", uid: "of-link"}, began())
	if len(p.others) != 0 || p.uids[k.name] != "of-link" || p.queue.entries[k] == nil {
		t.Fatalf("others %v, uids %v, queue %v", p.others, p.uids, p.queue.entries)
	}
	p.planLinks(&s, began())
	if e := p.queue.entries[k]; e.differs != inState || !e.want.present {
		t.Errorf("the link of a group that is there: %+v", e)
	}
}

// TestReporter_longNodeMadeAnew: a node whose name is too long for a label has another label when it was made anew, which
// is watched then instead.
func TestReporter_longNodeMadeAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		long := strings.Repeat("n", maxLabelValue+7)
		run(t, newReporter(Config{
			Node: long, AgentPod: "kube-smcr/agent-x", AgentVersion: "v0.4.0", Source: src.get, Preflight: noPreflight, Log: slog.New(slog.DiscardHandler),
		}, srv))
		oneSecond()
		srv.mu.Lock()
		srv.found.owner = "uid-of-new-node"
		srv.mu.Unlock()
		srv.observations <- observation{key: key{kind: kindNode, name: long}, version: "2000"}
		pass(2 * repairFirst)
		if was, is := srv.count("watch uid-of-node"), srv.count("watch uid-of-new-node"); was != 0 || is != 1 {
			t.Errorf("%d watches of the label from before, and %d of the new one", was, is)
		}
	})
}
