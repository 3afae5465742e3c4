// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/preflight"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// oneSecond lets a second of the test's clock pass, in which the reporter looks at
// the agent and writes.
func oneSecond() {
	time.Sleep(collectEvery + 100*time.Millisecond) //nolint:forbidigo // virtual time: the test runs in a synctest bubble
	synctest.Wait()
}

func pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // virtual time: the test runs in a synctest bubble
	synctest.Wait()
}

func TestReporter_lifeOfAPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		start(t, srv, src)
		oneSecond()
		if diff := cmp.Diff([]string{"apply SMCRNode node-a"}, srv.taken()); diff != "" {
			t.Fatalf("without pods (-want +got):\n%s", diff)
		}
		src.change(func(s *Snapshot) { s.Verdicts = []config.Verdict{verdict("web")} })
		oneSecond()
		if w := srv.taken(); len(w) != 0 {
			t.Errorf("a pod whose network is being made: %v", w)
		}
		src.change(func(s *Snapshot) {
			s.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		})
		oneSecond()
		if got := srv.pod("web"); got != "Enabled" {
			t.Errorf("attached: %q", got)
		}
		g := group("shop/web", 7, 1)
		src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{g} })
		oneSecond()
		name := linkName(node, &g)
		if diff := cmp.Diff([]string{"apply status of pod shop/web", "apply SMCRLink " + name}, srv.taken()); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		src.change(func(s *Snapshot) { s.Links, s.Verdicts[0].OptedIn = nil, false })
		oneSecond()
		if diff := cmp.Diff([]string{"delete SMCRLink " + name, "apply status of pod shop/web"}, srv.taken()); diff != "" {
			t.Errorf("opted out (-want +got):\n%s", diff)
		}
		if got := srv.pod("web"); got != "" {
			t.Errorf("opted out: %q", got)
		}
		src.change(func(s *Snapshot) { s.Verdicts = nil })
		pass(time.Hour)
		if w := srv.taken(); len(w) != 0 {
			t.Errorf("an hour of nothing: %v", w)
		}
		if diff := cmp.Diff([]string{eventEnabled}, srv.reasons()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// A capability that is checked again is written when it has changed, and only then. An agent that reports links
// only does not look.
func TestReporter_recheck(t *testing.T) {
	for _, linksOnly := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			srv, src := newFakeServer(), &source{snap: healthy()}
			checks := make(chan preflight.Check, 8)
			var last preflight.Check
			checks <- preflight.Check{Name: "kernelPath", Result: preflight.None, Reason: "NoPins"}
			checks <- preflight.Check{Name: "kernelPath", Result: preflight.OK}
			r := newReporter(Config{
				Node: node, AgentPod: "kube-smcr/agent-x", AgentVersion: "v0.4.0", LinksOnly: linksOnly, Source: src.get, Log: slog.New(slog.DiscardHandler),
				Preflight: func(context.Context) preflight.Report {
					return preflight.Report{Checks: []preflight.Check{{Name: "kernel", Result: preflight.OK}, {Name: "kernelPath", Result: preflight.None, Reason: "NoPins"}}}
				},
				Recheck: func() preflight.Check {
					select {
					case last = <-checks:
					default:
					}
					return last
				},
			}, srv)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { r.Run(ctx) })
			t.Cleanup(func() { cancel(); wg.Wait() })
			capabilities := func() (out []string) {
				srv.mu.Lock()
				defer srv.mu.Unlock()
				body, _ := json.Marshal(srv.objects[key{kind: kindNode, name: node}])
				var n v1alpha1.SMCRNode
				if err := json.Unmarshal(body, &n); err != nil {
					t.Fatal(err)
				}
				for _, c := range n.Status.Capabilities {
					out = append(out, c.Name+" "+c.State+" "+c.Reason)
				}
				return out
			}
			if linksOnly {
				pass(time.Hour)
				if len(checks) != 2 {
					t.Error("an agent that reports links only checked the node")
				}
				return
			}
			for i, want := range [][]string{
				{"kernel Available ", "kernelPath Unavailable NoPins"},
				{"kernel Available ", "kernelPath Unavailable NoPins"},
				{"kernel Available ", "kernelPath Available "},
				{"kernel Available ", "kernelPath Available "},
			} {
				if i == 0 {
					oneSecond()
				} else {
					pass(recheckEvery)
				}
				if diff := cmp.Diff(want, capabilities()); diff != "" {
					t.Errorf("after %d minutes (-want +got):\n%s", i, diff)
				}
			}
			if n := len(srv.taken()); n != 2 {
				t.Errorf("%d writes, want one for each of the two states", n)
			}
		})
	}
}

func TestReporter_podNeverAttached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		start(t, srv, src)
		pass(attachGrace + 2*collectEvery)
		if got := srv.pod("web"); got != "Pending: NOT_ATTACHED" {
			t.Errorf("status %q", got)
		}
		if n := srv.reasons(); len(n) != 0 {
			t.Errorf("events while it may still wait for a volume: %v", n)
		}
		pass(attachWarn)
		if diff := cmp.Diff([]string{eventFallback}, srv.reasons()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// TestReporter_notUpYet: an agent that has not opened its devices is no node
// without devices.
func TestReporter_notUpYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{}
		start(t, srv, src)
		pass(time.Minute)
		if w := srv.taken(); len(w) != 0 {
			t.Errorf("writes: %v", w)
		}
		src.change(func(s *Snapshot) { *s = healthy() })
		oneSecond()
		if diff := cmp.Diff([]string{"apply SMCRNode node-a"}, srv.taken()); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
	})
}

// TestReporter_draining: what an agent that stops does to its pods is not what they are, unless
// connections keep it from its end: until then the pods' new ones are plain TCP.
func TestReporter_draining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		src.snap.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		start(t, srv, src)
		oneSecond()
		srv.taken()
		src.change(func(s *Snapshot) {
			s.Status.Draining, s.Attachments = true, []agentapi.Attachment{attachment("shop/web", agentapi.StateIdle)}
		})
		pass(drainGrace - time.Second)
		if diff := cmp.Diff([]string{"apply SMCRNode node-a"}, srv.taken()); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		src.change(func(s *Snapshot) { s.Attachments = nil })
		pass(time.Minute)
		if got := srv.pod("web"); got != "Fallback: DRAINING" || len(srv.taken()) != 1 {
			t.Errorf("while it drains: %q", got)
		}
		src.change(func(s *Snapshot) {
			s.Status.Draining, s.Attachments = false, []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		})
		oneSecond()
		if got := srv.pod("web"); got != "Enabled" {
			t.Errorf("when it serves again: %q", got)
		}
	})
}

// TestReporter_drainingKernel: an agent that stops parks the pods whose kernel carries their connections. These go on.
func TestReporter_drainingKernel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		kernel := attachment("shop/web", agentapi.StateReady)
		kernel.Datapath = config.DatapathKernel.String()
		src.snap.Attachments = []agentapi.Attachment{kernel}
		start(t, srv, src)
		oneSecond()
		src.change(func(s *Snapshot) {
			s.Status.Draining, s.Attachments = true, []agentapi.Attachment{attachment("shop/web", agentapi.StateIdle)}
		})
		pass(time.Minute)
		if got := srv.pod("web"); got != v1alpha1.PodStatusKernel {
			t.Errorf("while it drains: %q", got)
		}
		src.change(func(s *Snapshot) { s.Verdicts[0].OptedIn = false })
		oneSecond()
		if got := srv.pod("web"); got != "" {
			t.Errorf("opted out meanwhile: %q", got)
		}
	})
}

// TestReporter_podMadeAnew: another pod is in the place of one that the snapshot still has. That is no refusal, which
// would be logged and tried again: the next snapshots have the other one.
func TestReporter_podMadeAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		src.snap.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		web := key{kind: kindPod, namespace: "shop", name: "web"}
		srv.refuse[web] = apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "web", field.ErrorList{field.Invalid(field.NewPath("metadata", "uid"), "uid-web", "field is immutable")})
		start(t, srv, src)
		pass(time.Minute)
		srv.mu.Lock()
		if srv.counts["refuse"] != 1 {
			t.Errorf("tried %d times", srv.counts["refuse"])
		}
		delete(srv.refuse, web)
		srv.mu.Unlock()
		src.change(func(s *Snapshot) { s.Verdicts[0].UID = "uid-of-the-other" })
		oneSecond()
		if got := srv.pod("web"); got != "Enabled" {
			t.Errorf("the other one: %q", got)
		}
	})
}

// TestReporter_runAgain: an agent that gets its node back begins anew.
func TestReporter_runAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		r, stop := start(t, srv, src)
		oneSecond()
		stop()
		srv.taken()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.Run(ctx)
		}()
		oneSecond()
		cancel()
		<-done
		if diff := cmp.Diff([]string{"apply SMCRNode node-a"}, srv.taken()); diff != "" || srv.count("load") != 2 {
			t.Errorf("%d loads; writes (-want +got):\n%s", srv.count("load"), diff)
		}
	})
}

// TestReporter_restart: what an earlier agent wrote is kept if it is right, and
// taken away if not, but not before the new one knows its pods.
func TestReporter_restart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := v1alpha1.SMCRLink{ObjectMeta: metav1.ObjectMeta{Name: "node-a-01234567", UID: "x"}, Status: v1alpha1.SMCRLinkStatus{Node: node}}
		srv, src := newFakeServer(), &source{snap: healthy()}
		srv.found.links = []v1alpha1.SMCRLink{old}
		src.snap.Reconciled = false
		src.snap.Annotations = map[string]string{"uid-web": "Enabled", "uid-db": "Enabled", "uid-old": "Fallback: NO_OPTION"}
		src.snap.Verdicts = []config.Verdict{verdict("web"), verdict("db"), {Namespace: "shop", Name: "old", UID: "uid-old"}}
		src.snap.Attachments = []agentapi.Attachment{
			attachment("shop/web", agentapi.StateReady), attachment("shop/db", agentapi.StateFailed), attachment("shop/old", agentapi.StateIdle),
		}
		start(t, srv, src)
		oneSecond()
		if diff := cmp.Diff([]string{"apply SMCRNode node-a"}, srv.taken()); diff != "" {
			t.Errorf("before it is reconciled (-want +got):\n%s", diff)
		}
		src.change(func(s *Snapshot) { s.Reconciled = true })
		oneSecond()
		want := []string{"apply SMCRNode node-a", "delete SMCRLink node-a-01234567", "apply status of pod shop/db", "apply status of pod shop/old"}
		if diff := cmp.Diff(want, srv.taken()); diff != "" {
			t.Errorf("reconciled (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]string{eventFallback}, srv.reasons()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// linkOf is an SMCRLink as the pod of an agent wrote it.
func linkOf(agent, name string) v1alpha1.SMCRLink {
	return v1alpha1.SMCRLink{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: "x", Labels: map[string]string{v1alpha1.LabelAgent: agent}},
		Status:     v1alpha1.SMCRLinkStatus{Node: node},
	}
}

// TestReporter_agentThatDrains: the SMCRLinks of an agent that handed over stay
// while it has a pod, those of one that has none do not.
func TestReporter_agentThatDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		srv.found.links = []v1alpha1.SMCRLink{
			linkOf("agent-old", "of-old"), linkOf("agent-dead", "of-dead"), linkOf("agent-x", "of-before"), linkOf("namesake", "of-namesake"),
		}
		src.snap.Verdicts = []config.Verdict{
			{Namespace: "kube-smcr", Name: "agent-old", UID: "o"},
			{Namespace: "kube-smcr", Name: "agent-x", UID: "x"},
			{Namespace: "shop", Name: "namesake", UID: "n"},
		}
		start(t, srv, src)
		oneSecond()
		got := srv.taken()
		slices.Sort(got)
		want := []string{"apply SMCRNode node-a", "delete SMCRLink of-before", "delete SMCRLink of-dead", "delete SMCRLink of-namesake"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("while the old agent drains (-want +got):\n%s", diff)
		}
		late := linkOf("agent-old", "of-old-too")
		gone := linkOf("agent-old", "of-old-and-gone")
		srv.observations <- observationOfLink(&late)
		srv.observations <- observationOfLink(&gone)
		s := observationOfLink(&gone)
		s.target = target{}
		srv.observations <- s
		oneSecond()
		if w := srv.taken(); len(w) != 0 {
			t.Errorf("the old agent made and ended link groups: %v", w)
		}
		src.change(func(s *Snapshot) { s.Verdicts = s.Verdicts[1:] })
		oneSecond()
		got = srv.taken()
		slices.Sort(got)
		if diff := cmp.Diff([]string{"delete SMCRLink of-old", "delete SMCRLink of-old-too"}, got); diff != "" {
			t.Errorf("the old agent's pod is gone (-want +got):\n%s", diff)
		}
	})
}

// TestReporter_linksOnly: an agent that handed over keeps its own SMCRLinks
// right, and touches nothing else.
func TestReporter_linksOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		one, two := group("shop/web", 1, 1), group("shop/web", 2, 1)
		srv.found.links = []v1alpha1.SMCRLink{linkOf("agent-x", linkName(node, &one)), linkOf("agent-new", "of-new"), linkOf("agent-dead", "of-dead")}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		src.snap.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		src.snap.Links = []agentapi.LinkGroup{one, two}
		startWith(t, srv, src, true)
		oneSecond()
		got := srv.taken()
		slices.Sort(got)
		want := []string{"apply SMCRLink " + linkName(node, &one), "apply SMCRLink " + linkName(node, &two)}
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		if got := srv.objects[key{kind: kindLink, name: linkName(node, &two)}].(*v1alpha1.SMCRLink).Labels[v1alpha1.LabelAgent]; got != "agent-x" {
			t.Errorf("label %q", got)
		}
		src.change(func(s *Snapshot) { s.Links, s.Status.Draining = s.Links[:1], true })
		pass(time.Minute)
		if diff := cmp.Diff([]string{"delete SMCRLink " + linkName(node, &two)}, srv.taken()); diff != "" {
			t.Errorf("a group ended (-want +got):\n%s", diff)
		}
	})
}

// TestReporter_transitions: a condition keeps the time of its last change over
// restarts of the agent.
func TestReporter_transitions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		since := metav1.Time{Time: began()}
		srv.found.node = &v1alpha1.SMCRNode{Status: v1alpha1.SMCRNodeStatus{Conditions: []metav1.Condition{
			{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, LastTransitionTime: since},
			{Type: v1alpha1.ConditionDevicesHealthy, Status: metav1.ConditionFalse, LastTransitionTime: since},
			{Type: v1alpha1.ConditionAgentAlive, Status: metav1.ConditionTrue, LastTransitionTime: since},
		}}}
		start(t, srv, src)
		now := time.Now()
		oneSecond()
		srv.mu.Lock()
		defer srv.mu.Unlock()
		for _, c := range srv.objects[key{kind: kindNode, name: node}].(*v1alpha1.SMCRNode).Status.Conditions {
			want := now.Truncate(time.Second)
			if c.Type == v1alpha1.ConditionReady {
				want = began()
			}
			if c.Type == v1alpha1.ConditionAgentAlive || !c.LastTransitionTime.Time.Equal(want) {
				t.Errorf("%s since %v, want %v", c.Type, c.LastTransitionTime, want)
			}
		}
	})
}

func TestReporter_uninstall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		src.snap.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		src.snap.Links = []agentapi.LinkGroup{group("shop/web", 1, 1)}
		start(t, srv, src)
		oneSecond()
		srv.taken()
		srv.mu.Lock()
		srv.refuse[key{kind: kindPod, namespace: "shop", name: "web"}] = apierrors.NewForbidden(schema.GroupResource{}, "web", nil)
		srv.mu.Unlock()
		src.change(func(s *Snapshot) { s.Uninstalled, s.Links, s.Attachments = true, nil, nil })
		oneSecond()
		if uninstalled(srv) {
			t.Error("Uninstalled although a pod still has its annotation")
		}
		srv.mu.Lock()
		clear(srv.refuse)
		srv.mu.Unlock()
		pass(objectFirst + 3*collectEvery)
		if !uninstalled(srv) || srv.pod("web") != "" {
			t.Errorf("Uninstalled is missing, or the pod has %q", srv.pod("web"))
		}
		srv.taken()
		srv.observations <- observation{key: key{kind: kindNode, name: node}, version: "2000"}
		src.change(func(s *Snapshot) { s.Status.Draining = true })
		pass(time.Hour)
		if w := srv.taken(); len(w) != 0 {
			t.Errorf("after the SMCRNode was deleted: %v", w)
		}
	})
}

// TestReporter_left: that the agent left the node is said at once, whatever becomes of the
// rest, and the last report is the last of all. The node has no devices any more, of which
// other nodes would take packets, and the Lease is not renewed.
func TestReporter_left(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		src.snap.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		src.snap.Links = []agentapi.LinkGroup{group("shop/web", 1, 1)}
		r, _ := start(t, srv, src)
		oneSecond()
		web := key{kind: kindPod, namespace: "shop", name: "web"}
		srv.mu.Lock()
		srv.refuse[web] = apierrors.NewForbidden(schema.GroupResource{}, "web", nil)
		srv.mu.Unlock()
		src.change(func(s *Snapshot) {
			s.Uninstalled, s.Left, s.Attachments = true, "the node has a label", nil
			s.Status.Draining = true
		})
		oneSecond()
		oneSecond()
		srv.mu.Lock()
		n, renewals := srv.objects[key{kind: kindNode, name: node}].(*v1alpha1.SMCRNode), len(srv.renewals)
		srv.mu.Unlock()
		if !uninstalled(srv) || len(n.Status.Devices) > 0 || n.Status.DeviceSummary != "" || n.Status.AgentPod == "" {
			t.Errorf("the SMCRNode is %+v", n.Status)
		}
		select {
		case <-r.Left():
			t.Error("the last report is written although a pod is Enabled still")
		default:
		}
		srv.mu.Lock()
		clear(srv.refuse)
		srv.mu.Unlock()
		pass(objectFirst + 3*collectEvery)
		select {
		case <-r.Left():
		default:
			t.Error("the last report is not written")
		}
		if got := srv.pod("web"); got != v1alpha1.PodStatusNoAgent {
			t.Errorf("the pod is %q", got)
		}
		srv.mu.Lock()
		defer srv.mu.Unlock()
		for k := range srv.objects {
			if k.kind == kindLink {
				t.Errorf("%v is there", k)
			}
		}
		if len(srv.renewals) != renewals {
			t.Error("the Lease is renewed")
		}
	})
}

func uninstalled(srv *fakeServer) bool {
	srv.mu.Lock()
	defer srv.mu.Unlock()
	n := srv.objects[key{kind: kindNode, name: node}].(*v1alpha1.SMCRNode)
	return slices.ContainsFunc(n.Status.Conditions, func(c metav1.Condition) bool { return c.Type == v1alpha1.ConditionUninstalled })
}

// TestReporter_away: nothing is lost but what is no longer true, and little is
// asked while the API server is away.
func TestReporter_away(t *testing.T) {
	tests := []struct {
		name string
		err  error
		hang time.Duration
	}{
		{"refused", errAway, 0},
		{"500", apierrors.NewInternalError(errAway), 0},
		{"429", apierrors.NewTooManyRequests("slow down", 1), 0},
		{"slow", nil, time.Hour},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, src := newFakeServer(), &source{snap: healthy()}
				start(t, srv, src)
				oneSecond()
				srv.taken()
				srv.mu.Lock()
				srv.err, srv.hang = tt.err, tt.hang
				srv.mu.Unlock()
				calls := srv.count("call")
				for i := range 20 {
					src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{group("shop/web", uint32(i), 1)} })
					pass(30 * time.Second)
				}
				// Ten minutes with at least half of awayMost between calls, but at first.
				if n := srv.count("call") - calls; n < 10 || n > 30 {
					t.Errorf("%d calls while it was away", n)
				}
				srv.mu.Lock()
				srv.err, srv.hang = nil, 0
				srv.mu.Unlock()
				pass(awayMost + callTimeout + collectEvery)
				last := group("shop/web", 19, 1)
				if diff := cmp.Diff([]string{"apply SMCRLink " + linkName(node, &last)}, deleteNothing(srv.taken())); diff != "" {
					t.Errorf("after ten minutes without (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// deleteNothing leaves out deletions of links that may never have been written.
func deleteNothing(writes []string) []string {
	return slices.DeleteFunc(writes, func(w string) bool { return strings.HasPrefix(w, "delete") })
}

// TestReporter_neverLoaded: an API server that is away from the start.
func TestReporter_neverLoaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		srv.err = errAway
		start(t, srv, src)
		pass(10 * time.Minute)
		srv.fail(nil)
		pass(awayMost + collectEvery)
		if diff := cmp.Diff([]string{"apply SMCRNode node-a"}, srv.taken()); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
	})
}

// TestReporter_refusal: an object that is refused holds up no other.
func TestReporter_refusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		srv.refuse[key{kind: kindNode, name: node}] = apierrors.NewForbidden(schema.GroupResource{}, node, nil)
		src.snap.Links = []agentapi.LinkGroup{group("shop/web", 1, 1)}
		start(t, srv, src)
		pass(time.Hour)
		if n := srv.count("write"); n != 1 {
			t.Errorf("%d writes, want that of the link", n)
		}
		if n := srv.count("refuse"); n < 5 || n > 20 {
			t.Errorf("asked %d times in an hour", n)
		}
	})
}

// TestReporter_poke: a change is written without waiting for the next look.
func TestReporter_poke(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		r, _ := start(t, srv, src)
		pass(10*time.Second + collectPause)
		srv.taken()
		src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{group("shop/web", 1, 1)} })
		r.Poke()
		r.Poke()
		synctest.Wait()
		if w := srv.taken(); len(w) != 1 {
			t.Errorf("writes right after the poke: %v", w)
		}
	})
}

// TestReporter_traffic: a pod whose connections all fall back says so.
func TestReporter_traffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		src.snap.Verdicts = []config.Verdict{verdict("web")}
		src.snap.Attachments = []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
		start(t, srv, src)
		oneSecond()
		peerNoSMC := agentapi.CodeOf(clc.ReasonPeerNoSMC)
		src.change(func(s *Snapshot) {
			s.Decisions = []agentapi.Decision{decided("shop/web", "TCP", peerNoSMC, time.Now())}
		})
		oneSecond()
		if got := srv.pod("web"); got != "Enabled" {
			t.Errorf("right after the first fallback: %q", got)
		}
		pass(fallbackAfter)
		if got := srv.pod("web"); got != "Fallback: PEERNOSMC" {
			t.Errorf("after a while: %q", got)
		}
		src.change(func(s *Snapshot) {
			s.Decisions = append(s.Decisions, decided("shop/web", smcrMode, "", time.Now()))
		})
		oneSecond()
		if got := srv.pod("web"); got != "Enabled" {
			t.Errorf("after SMC-R: %q", got)
		}
		if diff := cmp.Diff([]string{eventEnabled, eventFallback}, srv.reasons()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// TestReporter_writesPerSecond counts what doc.go says of 500 nodes.
func TestReporter_writesPerSecond(t *testing.T) {
	const nodes = 500
	groups := func(n int) (out []agentapi.LinkGroup) {
		for i := range n {
			out = append(out, group(fmt.Sprintf("shop/web-%d", i), uint32(i), 2))
		}
		return out
	}
	tests := []struct {
		name           string
		each           func(s *Snapshot, now time.Time)
		writes, events float64 // per second, at 500 nodes, at most
	}{
		{"nothing changes", func(*Snapshot, time.Time) {}, 0, 0},
		{"counters never rest", func(s *Snapshot, now time.Time) {
			for i := range s.Links {
				s.Links[i].Conns = now.Second() * 7 % 60
			}
			s.Status.NodeBudget.ConnsUsed = now.Second()
		}, 18.4, 0},
		{"a link group every 10 s", func(s *Snapshot, now time.Time) {
			s.Links = append(groups(10), group("shop/new", uint32(now.Unix()/10), 2))
		}, 100, 0},
		{"a pod every 10 s", func(s *Snapshot, now time.Time) {
			name := fmt.Sprintf("new-%d", now.Unix()/10)
			s.Verdicts = []config.Verdict{verdict(name)}
			s.Attachments = []agentapi.Attachment{attachment("shop/"+name, agentapi.StateReady)}
		}, 50, 50},
		{"everything", func(s *Snapshot, now time.Time) {
			s.Links, s.Verdicts, s.Attachments = nil, nil, nil
			for i := range 20 { // a second: 40 changes, several times what is allowed
				s.Links = append(s.Links, group("shop/web", uint32(now.Unix())*1000+uint32(i), 1))
				name := fmt.Sprintf("new-%d-%d", now.Unix(), i)
				s.Verdicts = append(s.Verdicts, verdict(name))
				s.Attachments = append(s.Attachments, attachment("shop/"+name, agentapi.StateReady))
			}
		}, nodes * writesPerSecond, nodes * eventsPerSecond},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, src := newFakeServer(), &source{snap: healthy()}
				src.snap.Links = groups(10)
				src.each = tt.each
				start(t, srv, src)
				pass(15 * time.Minute) // pauses have grown, buckets are empty
				w, e := srv.count("write"), srv.count("event")
				const span = 30 * time.Minute
				pass(span)
				perSecond := func(n int) float64 { return float64(n) * nodes / span.Seconds() }
				writes, events := perSecond(srv.count("write")-w), perSecond(srv.count("event")-e)
				t.Logf("%.1f writes/s and %.1f events/s at %d nodes", writes, events, nodes)
				if writes > tt.writes*1.01 || events > tt.events*1.01 || writes < tt.writes*0.9 {
					t.Errorf("%.1f writes/s and %.1f events/s at %d nodes, want %.1f and %.1f", writes, events, nodes, tt.writes, tt.events)
				}
			})
		})
	}
}

// TestReporter_repair: what somebody else changes or deletes is written again,
// with growing pauses; what the watch tells late changes nothing.
func TestReporter_repair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		g := group("shop/web", 1, 1)
		src.snap.Links = []agentapi.LinkGroup{g}
		start(t, srv, src)
		oneSecond()
		srv.taken()
		link := key{kind: kindLink, name: linkName(node, &g)}
		changed := *srv.objects[link].(*v1alpha1.SMCRLink)
		changed.Status.State = v1alpha1.LinkDown
		srv.observations <- observation{key: link, target: linkTarget(&changed), version: "1"}
		pass(time.Minute)
		if w := srv.taken(); len(w) != 0 {
			t.Errorf("an old version is seen: %v", w)
		}
		for i := range 100 {
			srv.observations <- observation{key: link, target: linkTarget(&changed), version: fmt.Sprint(1000 + i)}
			pass(10 * time.Second)
		}
		if n := len(srv.taken()); n < 3 || n > 15 {
			t.Errorf("repaired %d times in 1000 s", n)
		}
		pass(10 * time.Minute)
		srv.taken()
		srv.observations <- observation{key: link, version: "2000"}
		pass(2 * repairFirst)
		if diff := cmp.Diff([]string{"apply " + link.String()}, srv.taken()); diff != "" {
			t.Errorf("deleted by somebody (-want +got):\n%s", diff)
		}
	})
}

// TestReporter_nodeMadeAnew: the objects get the owner that there is now.
func TestReporter_nodeMadeAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		start(t, srv, src)
		oneSecond()
		srv.mu.Lock()
		srv.found.owner = "uid-of-new-node"
		srv.mu.Unlock()
		srv.observations <- observation{key: key{kind: kindNode, name: node}, version: "2000"}
		pass(2 * repairFirst)
		srv.mu.Lock()
		defer srv.mu.Unlock()
		n := srv.objects[key{kind: kindNode, name: node}].(*v1alpha1.SMCRNode)
		if got := n.OwnerReferences[0].UID; got != "uid-of-new-node" || srv.counts["write"] != 2 {
			t.Errorf("owner %s after %d writes", got, srv.counts["write"])
		}
	})
}
