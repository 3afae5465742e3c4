// SPDX-License-Identifier: Apache-2.0

package report

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// wanted names the objects that the planner wants in Kubernetes.
func wanted(p *planner) []string {
	var out []string
	for k, e := range p.queue.entries {
		if e.want.present {
			out = append(out, k.String())
		}
	}
	slices.Sort(out)
	return out
}

// news are the reasons of the events that wait.
func news(p *planner) []string {
	var out []string
	for _, e := range p.news.waiting {
		out = append(out, e.reason)
	}
	return out
}

func TestPlanner_plan(t *testing.T) {
	g := group("shop/web", 1, 1)
	link := "SMCRLink " + linkName(node, &g)
	ofKernel := agentapi.LinkGroup{ID: 768, Datapath: "Kernel"}
	linkOfKernel := "SMCRLink " + linkName(node, &ofKernel)
	tests := []struct {
		name   string
		id     func(*identity)
		change func(*Snapshot)
		want   []string
	}{
		{name: "reconciled", want: []string{link, "SMCRNode node-a", "status of pod shop/web"}},
		{
			name:   "the node's kernel has a link group, of no pod",
			change: func(s *Snapshot) { s.Links = append(s.Links, ofKernel) },
			want:   []string{linkOfKernel, link, "SMCRNode node-a", "status of pod shop/web"},
		},
		{
			name: "another agent manages the node, and tells of the kernel's", id: func(id *identity) { id.linksOnly = true },
			change: func(s *Snapshot) { s.Links = append(s.Links, ofKernel) },
			want:   []string{link},
		},
		{name: "not reconciled", change: func(s *Snapshot) { s.Reconciled = false }, want: []string{"SMCRNode node-a"}},
		{name: "not up", change: func(s *Snapshot) { s.Status.Started, s.Reconciled = time.Time{}, false }},
		{name: "early", change: func(s *Snapshot) { s.Early = true }, want: []string{link, "status of pod shop/web"}},
		{name: "left early", change: func(s *Snapshot) { s.Early, s.Uninstalled = true, true }, want: []string{"SMCRNode node-a"}},
		{name: "draining", change: func(s *Snapshot) { s.Status.Draining = true }, want: []string{link, "SMCRNode node-a"}},
		{name: "another agent manages the node", id: func(id *identity) { id.linksOnly = true }, want: []string{link}},
		{name: "uninstalled", change: func(s *Snapshot) { s.Uninstalled = true }, want: []string{"SMCRNode node-a"}},
		{name: "left", change: func(s *Snapshot) { s.Uninstalled, s.Left = true, "x" }, want: []string{"SMCRNode node-a", "status of pod shop/web"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, s := newTestPlanner(), healthy()
			s.Links, s.Verdicts = []agentapi.LinkGroup{g}, []config.Verdict{verdict("web")}
			s.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
			if tt.id != nil {
				tt.id(&p.id)
			}
			if tt.change != nil {
				tt.change(&s)
			}
			p.plan(&s, began())
			if diff := cmp.Diff(tt.want, wanted(p)); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
		})
	}
}

// TestPlanner_lostLink: of a link group that was lost there is an event, and for a while an SMCRLink that is Down and says
// why, and what it was on. Then it goes.
func TestPlanner_lostLink(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	g := group("shop/web", 1, 1)
	s.Links, s.Verdicts = []agentapi.LinkGroup{g}, []config.Verdict{verdict("web")}
	p.plan(&s, began())
	name := linkName(node, &g)
	before := p.links[name].status
	lost := g
	lost.State, lost.Error, lost.Links = "DEAD", "link failed: retries exceeded", nil
	s.Links = []agentapi.LinkGroup{lost}
	p.plan(&s, began().Add(time.Second))
	at := slices.IndexFunc(p.news.waiting, func(e event) bool { return e.reason == eventLinkDown })
	if at < 0 {
		t.Fatalf("events %q", news(p))
	}
	if want := "the link group of pod shop/web with " + before.Peer + " is lost: link failed: retries exceeded"; p.news.waiting[at].note != want {
		t.Errorf("told %q, want %q", p.news.waiting[at].note, want)
	}
	is := p.links[name].status
	if is.State != v1alpha1.LinkDown || is.LastError != lost.Error || is.Conditions[0].Reason != reasonLost || is.Redundancy != v1alpha1.RedundancyNone {
		t.Errorf("%+v", is)
	}
	if is.Devices != before.Devices || is.GIDs != before.GIDs || len(is.Links) != 1 || is.Links[0].State != v1alpha1.LinkDown || before.Links[0].State != v1alpha1.LinkActive {
		t.Errorf("links %+v, before %+v", is, before)
	}
	n := len(p.news.waiting)
	p.plan(&s, began().Add(2*time.Second))
	s.Links = nil
	p.plan(&s, began().Add(3*time.Second))
	if got := wanted(p); slices.Contains(got, "SMCRLink "+name) || len(p.news.waiting) != n {
		t.Errorf("wanted %q, events %q", got, news(p))
	}
}

// TestPlanner_kernelNotAsked: an SMCRLink of the kernel's stays while the kernel cannot be asked for its link groups, that of an earlier
// agent, too. One of a pod's goes.
func TestPlanner_kernelNotAsked(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	mine, earlier := agentapi.LinkGroup{ID: 768, Datapath: "Kernel"}, agentapi.LinkGroup{ID: 769, Datapath: "Kernel"}
	s.Links = []agentapi.LinkGroup{group("shop/web", 1, 1), mine}
	p.plan(&s, began())
	name := linkName(node, &earlier)
	found := &v1alpha1.SMCRLink{Status: linkStatus(node, &earlier, "", nil)}
	p.takeLink(observation{key: key{kind: kindLink, name: name}, target: linkTarget(found), agent: p.id.agentLabel()}, began())
	s.Links, s.LinksProblem = nil, "link groups of the kernel: no buffer space"
	p.plan(&s, began().Add(time.Second))
	want := []string{"SMCRLink " + linkName(node, &mine), "SMCRLink " + name, "SMCRNode node-a"}
	slices.Sort(want)
	if diff := cmp.Diff(want, wanted(p)); diff != "" {
		t.Errorf("not asked: objects (-want +got):\n%s", diff)
	}
	for _, gone := range []func(*planner, *Snapshot){
		func(_ *planner, s *Snapshot) { s.LinksProblem = "" },
		func(_ *planner, s *Snapshot) { s.Uninstalled = true },
		func(p *planner, _ *Snapshot) { p.id.linksOnly = true },
	} {
		p, s := newTestPlanner(), healthy()
		s.Links = []agentapi.LinkGroup{mine}
		p.plan(&s, began())
		s.Links, s.LinksProblem = nil, "link groups of the kernel: no buffer space"
		gone(p, &s)
		p.plan(&s, began().Add(time.Second))
		if got := wanted(p); slices.ContainsFunc(got, func(k string) bool { return strings.HasPrefix(k, "SMCRLink ") }) {
			t.Errorf("%+v: wanted %q", s, got)
		}
	}
}

// If a node has more link groups than it may have SMCRLinks, the oldest link groups have one each.
func TestPlanner_plansTheOldestLinks(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	ofKernel := agentapi.LinkGroup{ID: 768, Datapath: "Kernel"}
	s.Links = append(s.Links, ofKernel)
	for i := range maxLinkObjects + 10 {
		s.Links = append(s.Links, group("shop/web", uint32(maxLinkObjects+10-i), 1))
	}
	p.plan(&s, began())
	if n := len(p.links); n != maxLinkObjects {
		t.Fatalf("%d SMCRLinks", n)
	}
	oldest, newest := s.Links[len(s.Links)-1], s.Links[1]
	if p.links[linkName(node, &ofKernel)] != nil {
		t.Error("one of the kernel, of which it is not known how old it is, has one")
	}
	if p.links[linkName(node, &oldest)] == nil || p.links[linkName(node, &newest)] != nil {
		t.Error("the oldest link group has none, or the newest has one")
	}
	s.Links = nil
	p.plan(&s, began().Add(time.Second))
	if left := wanted(p); len(left) != 1 || len(p.links) != 0 {
		t.Errorf("when all have ended: %v, %d are remembered", left, len(p.links))
	}
}

// The planner deletes the SMCRLinks of an agent whose pod is gone. It leaves those of an agent whose pod
// is there, and which hands its connections over.
func TestPlanner_inherit(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	for _, agent := range []string{"agent-alive", "agent-dead"} {
		p.takeLink(observation{key: key{kind: kindLink, name: "of-" + agent}, target: target{present: true}, agent: agent, uid: types.UID(agent)}, began())
	}
	p.takeLink(observation{key: key{kind: kindLink, name: "of-this"}, target: target{present: true}, agent: "agent-x", uid: "x"}, began())
	s.Verdicts = []config.Verdict{{Namespace: "kube-smcr", Name: "agent-alive", UID: "1"}, {Namespace: "shop", Name: "agent-dead", UID: "2"}}
	p.plan(&s, began())
	deleted := map[string]bool{}
	for k, e := range p.queue.entries {
		deleted[k.name] = k.kind == kindLink && !e.want.present && e.differs == inState
	}
	if !deleted["of-agent-dead"] || !deleted["of-this"] || deleted["of-agent-alive"] {
		t.Errorf("deleted: %v", deleted)
	}
	if _, ok := p.others["of-agent-alive"]; !ok || len(p.others) != 1 {
		t.Errorf("of others: %v", p.others)
	}
}

// A decision that is older than the pod is about an earlier pod of the same name.
func TestPlanner_decisionsOfAnEarlierPod(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	s.Verdicts = []config.Verdict{verdict("web")}
	s.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
	no := agentapi.CodeOf(clc.ReasonPeerNoSMC)
	s.Decisions = []agentapi.Decision{decided("shop/web", "TCP", no, began().Add(-attachGrace-time.Second))}
	p.plan(&s, began())
	if diff := cmp.Diff([]string{eventEnabled}, news(p)); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	s.Decisions = append(s.Decisions, decided("shop/web", "TCP", no, began().Add(time.Second)))
	p.plan(&s, began().Add(time.Second))
	p.plan(&s, began().Add(2*time.Second)) // the snapshot has the same decisions, which count once
	if diff := cmp.Diff([]string{eventEnabled, eventFallback}, news(p)); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if !p.pods[types.NamespacedName{Namespace: "shop", Name: "web"}].traffic.latest.Equal(began().Add(time.Second)) {
		t.Error("the decision was not noted")
	}
}

// A connection that is refused right after the policies changed has its event. The pod's status does not
// change, because the former policies may have refused the connection.
func TestPlanner_justAfterPolicies(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	v := verdict("web")
	s.Verdicts, s.Attachments = []config.Verdict{v}, []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
	p.plan(&s, began())
	s.Verdicts[0].Rules = "uid-of-must/1\n"
	p.plan(&s, began().Add(time.Second))
	s.Decisions = []agentapi.Decision{decided("shop/web", agentapi.ModeReset, agentapi.CodeRequired, began().Add(time.Second+policyDelay/2))}
	p.plan(&s, began().Add(3*time.Second))
	p.plan(&s, began().Add(time.Minute))
	if diff := cmp.Diff([]string{eventEnabled, eventRefused}, news(p)); diff != "" {
		t.Errorf("events (-want +got)\n%s", diff)
	}
	pp := p.pods[types.NamespacedName{Namespace: "shop", Name: "web"}]
	if got := pp.traffic.reason(began().Add(time.Minute)); got != agentapi.CodeOK {
		t.Errorf("the pod's reason is %q", got)
	}
}

func TestPlanner_podsThatNobodyHelps(t *testing.T) {
	p, s := newTestPlanner(), healthy()
	limited, bad := verdict("limited"), verdict("bad")
	limited.Limited = "the budget of the node is smaller"
	bad.BadAnnotation, bad.OptedIn, bad.Because = true, false, "smcr.io/enabled is maybe"
	agent := attachment("shop/agent", agentapi.StateReady)
	agent.NotKernel = "no child of an RNIC"
	s.Verdicts, s.Attachments = []config.Verdict{limited, bad, verdict("agent")}, []agentapi.Attachment{agent}
	p.plan(&s, began())
	p.plan(&s, began().Add(time.Second))
	if diff := cmp.Diff([]string{eventBudgetLimited, eventBadAnnotation, eventAgentDatapath, eventEnabled}, news(p)); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// An annotation is written again that somebody put back right after we had written: no snapshot showed ours. A
// snapshot of before our write shows nothing.
func TestPlanner_observePutBack(t *testing.T) {
	name := types.NamespacedName{Namespace: "shop", Name: "web"}
	p, s := newTestPlanner(), healthy()
	s.Verdicts = []config.Verdict{verdict("web")}
	s.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
	see := func(annotation, version string) *entry {
		s.Annotations = map[string]string{"uid-web": annotation}
		s.Versions = map[string]string{"uid-web": version}
		p.plan(&s, began())
		return p.queue.entries[podKey(name)]
	}
	e := see(v1alpha1.PodStatusNoAgent, "10")
	p.queue.wrote(e.key, e.want, "11", began())
	if see(v1alpha1.PodStatusNoAgent, "10"); e.differs != inNothing {
		t.Errorf("after a snapshot of before our write it differs: %d", e.differs)
	}
	if see(v1alpha1.PodStatusNoAgent, "12"); e.differs != inState || e.want.state != v1alpha1.PodStatusEnabled {
		t.Errorf("what was put back differs: %d; wanted is %v", e.differs, e.want.state)
	}
	p.queue.wrote(e.key, e.want, "13", began())
	for _, version := range []string{"13", "14"} { // ours, and what others change of the pod
		if see(v1alpha1.PodStatusEnabled, version); e.differs != inNothing {
			t.Errorf("our own annotation in version %s differs: %d", version, e.differs)
		}
	}
}

// The annotation of a pod is written again if somebody changed it. A pod that is gone is forgotten.
func TestPlanner_observe(t *testing.T) {
	name := types.NamespacedName{Namespace: "shop", Name: "web"}
	p, s := newTestPlanner(), healthy()
	s.Verdicts = []config.Verdict{verdict("web")}
	s.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
	p.plan(&s, began())
	e := p.queue.entries[podKey(name)]
	p.queue.wrote(e.key, e.want, "1", began())
	s.Annotations = map[string]string{"uid-web": v1alpha1.PodStatusEnabled}
	p.plan(&s, began().Add(time.Second))
	if e.differs != inNothing {
		t.Errorf("our own annotation differs: %d", e.differs)
	}
	s.Annotations = map[string]string{"uid-web": "Disabled by me"}
	p.plan(&s, began().Add(2*time.Second))
	if e.differs != inState {
		t.Errorf("an annotation that somebody changed differs: %d", e.differs)
	}
	s.Verdicts = nil
	p.plan(&s, began().Add(3*time.Second))
	if p.queue.entries[podKey(name)] != nil || len(p.pods) != 0 {
		t.Error("a pod that is gone is remembered")
	}
}
