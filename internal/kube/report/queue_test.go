// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestNotable(t *testing.T) {
	tests := []struct {
		was, is int64
		want    bool
	}{
		{0, 0, false},
		{0, 1, true},
		{1, 0, true},
		{1, 1, false},
		{2, 3, false},
		{2, 4, true},
		{4, 2, true},
		{100, 199, false},
	}
	for _, tt := range tests {
		if got := notable([]int64{5, tt.was}, []int64{5, tt.is}); got != tt.want {
			t.Errorf("from %d to %d: %v", tt.was, tt.is, got)
		}
	}
}

// TestQueue_order: what has to wait is written by its class, then by its age.
func TestQueue_order(t *testing.T) {
	q := newQueue(rand.New(rand.NewPCG(1, 2)))
	q.blocked = false
	now := began()
	set := func(k key, state string, n int64) {
		q.want(k, target{present: true, state: state, counters: []int64{n}}, now)
		now = now.Add(time.Millisecond)
	}
	counters, podB, podA := key{kindLink, "", "counters"}, key{kindPod, "ns", "b"}, key{kindPod, "ns", "a"}
	link, smcrNode := key{kindLink, "", "link"}, key{kindNode, "", "n"}
	q.known(counters, target{present: true, state: "x", counters: []int64{1}}, now)
	set(counters, "x", 10)
	for _, k := range []key{podB, podA, link, smcrNode} {
		set(k, "x", 0)
	}
	var got []key
	for {
		e, _ := q.next(now)
		if e == nil {
			break
		}
		got = append(got, e.key)
		q.wrote(e.key, e.want, "", now)
	}
	if diff := cmp.Diff([]key{smcrNode, link, podB, podA, counters}, got, cmp.AllowUnexported(key{})); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

// TestQueue_spacing: the first change is written at once, the next ones of the
// same object later, and of those only the last.
func TestQueue_spacing(t *testing.T) {
	q := newQueue(rand.New(rand.NewPCG(1, 2)))
	q.blocked = false
	k := key{kindLink, "", "link"}
	now := began()
	var writes []string
	for i := range 100 { // 10 s
		now = now.Add(100 * time.Millisecond)
		q.want(k, target{present: true, state: fmt.Sprint(i)}, now)
		if e, _ := q.next(now); e != nil {
			writes = append(writes, e.want.state.(string))
			q.wrote(k, e.want, "", now)
		}
	}
	if diff := cmp.Diff([]string{"0", "10", "20", "30", "40", "50", "60", "70", "80", "90"}, writes); diff != "" {
		t.Errorf("writes (-want +got):\n%s", diff)
	}
	e, again := q.next(now)
	if e != nil || again.Sub(now) > objectPause || again.Before(now) {
		t.Errorf("the last change is due at %v", again)
	}
}

// TestReporter_oneBroken: one object whose write the API server answers with an error of its own, as for a webhook that
// does not answer in its namespace, holds up no other for long.
func TestReporter_oneBroken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		broken := apierrors.NewInternalError(errors.New("failed calling webhook"))
		srv.refuse[key{kind: kindPod, namespace: "shop", name: "bad"}] = broken
		for _, name := range []string{"bad", "web", "worse"} {
			src.snap.Verdicts = append(src.snap.Verdicts, verdict(name))
			src.snap.Attachments = append(src.snap.Attachments, attachment("shop/"+name, agentapi.StateReady))
		}
		srv.refuse[key{kind: kindPod, namespace: "shop", name: "worse"}] = broken
		start(t, srv, src)
		pass(2 * time.Minute)
		if srv.pod("web") != "Enabled" || srv.pod("bad") != "" {
			t.Errorf("pods have %q and %q", srv.pod("web"), srv.pod("bad"))
		}
		srv.mu.Lock()
		clear(srv.refuse)
		srv.mu.Unlock()
		pass(awayMost + callTimeout + collectEvery)
		if srv.pod("bad") != "Enabled" || srv.pod("worse") != "Enabled" {
			t.Errorf("pods have %q and %q", srv.pod("bad"), srv.pod("worse"))
		}
	})
}

// TestReporter_brokenObjects: objects, or events, whose writes the API server goes on to answer with an error of its own
// hold up no other that changes later, and the API server counts as reached.
func TestReporter_brokenObjects(t *testing.T) {
	broken := apierrors.NewInternalError(errors.New("failed calling webhook"))
	tests := []struct {
		name  string
		begin func(*fakeServer, *source)
		calls func(*fakeServer) int
	}{
		{"pods", func(srv *fakeServer, src *source) {
			for _, name := range []string{"bad", "worse"} {
				srv.refuse[key{kind: kindPod, namespace: "shop", name: name}] = broken
			}
			src.change(func(s *Snapshot) {
				s.Verdicts = []config.Verdict{verdict("bad"), verdict("worse")}
				s.Attachments = []agentapi.Attachment{attachment("shop/bad", agentapi.StateReady), attachment("shop/worse", agentapi.StateReady)}
			})
		}, func(srv *fakeServer) int { return srv.counts["refuse"] }},
		{"event", func(srv *fakeServer, src *source) {
			srv.noEvent = broken
			src.change(func(s *Snapshot) { s.Status.Devices[0].Port = "DOWN" })
		}, func(srv *fakeServer) int { return srv.counts["noEvent"] }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, src := newFakeServer(), &source{snap: healthy()}
				r, _ := start(t, srv, src)
				oneSecond()
				srv.mu.Lock()
				tt.begin(srv, src)
				srv.mu.Unlock()
				pass(3 * time.Minute)
				for i := range 5 {
					srv.taken()
					g := group("shop/web", uint32(i), 1)
					src.change(func(s *Snapshot) { s.Links = append(s.Links, g) })
					pass(2 * collectEvery)
					if w := srv.taken(); len(w) == 0 || w[0] != "apply SMCRLink "+linkName(node, &g) {
						t.Errorf("writes after a change: %v", w)
					}
					if c := r.Contact(); c.Away != nil {
						t.Errorf("the API server counts as away: %v", c.Away)
					}
					pass(30 * time.Second)
				}
				srv.mu.Lock()
				defer srv.mu.Unlock()
				if n := tt.calls(srv); n < 5 || n > 40 { // two pods in less than six minutes, with at least half of awayMost between, but at first
					t.Errorf("%d calls for what is broken", n)
				}
			})
		})
	}
}

// TestReporter_brokenAtFirst: many objects that get such an error for the first time hold up another one for seconds only.
func TestReporter_brokenAtFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		start(t, srv, src)
		oneSecond()
		for i := range 30 {
			name := fmt.Sprint("bad-", i)
			srv.mu.Lock()
			srv.refuse[key{kind: kindPod, namespace: "shop", name: name}] = apierrors.NewInternalError(errors.New("failed calling webhook"))
			srv.mu.Unlock()
			src.change(func(s *Snapshot) {
				s.Verdicts = append(s.Verdicts, verdict(name))
				s.Attachments = append(s.Attachments, attachment("shop/"+name, agentapi.StateReady))
			})
		}
		pass(time.Minute) // there are objects left that were not tried
		srv.taken()
		g := group("shop/web", 1, 1)
		src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{g} })
		pass(objectFirst + 2*collectEvery)
		if w := srv.taken(); len(w) != 1 || w[0] != "apply SMCRLink "+linkName(node, &g) {
			t.Errorf("writes after a change: %v", w)
		}
	})
}

// TestReporter_awayIsForgotten: an outage in which nothing but an event had to be sent leaves no pause behind: one error
// after it silences nobody for long.
func TestReporter_awayIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		start(t, srv, src)
		oneSecond()
		srv.mu.Lock()
		srv.noEvent = errAway
		srv.mu.Unlock()
		src.change(func(s *Snapshot) { s.Status.Devices[0].Port = "DOWN" })
		pass(3 * time.Minute)
		srv.mu.Lock()
		srv.noEvent = nil
		srv.mu.Unlock()
		pass(awayMost + collectEvery)
		if got := srv.reasons(); len(got) == 0 || got[0] != eventDeviceDown {
			t.Fatalf("events %v", got)
		}
		g, other := group("shop/web", 1, 1), group("shop/web", 2, 1)
		busy := key{kind: kindLink, name: linkName(node, &g)}
		srv.mu.Lock()
		srv.refuse[busy] = apierrors.NewTooManyRequests("slow down", 1)
		srv.mu.Unlock()
		src.change(func(s *Snapshot) { s.Links = []agentapi.LinkGroup{g} })
		oneSecond()
		srv.mu.Lock()
		if srv.counts["refuse"] != 1 {
			t.Errorf("%d errors, want one", srv.counts["refuse"])
		}
		clear(srv.refuse)
		srv.mu.Unlock()
		src.change(func(s *Snapshot) { s.Links = append(s.Links, other) })
		pass(awayFirst + collectEvery)
		if w := srv.taken(); !slices.Contains(w, "apply SMCRLink "+linkName(node, &other)) {
			t.Errorf("writes after one error: %v", w)
		}
	})
}

// TestQueue_turnsInDoubt: objects whose writes the API server answers with errors of its own are tried by turns, whatever
// they are.
func TestQueue_turnsInDoubt(t *testing.T) {
	seed := testenv.Seed(t)
	q := newQueue(rand.New(rand.NewPCG(seed, seed)))
	q.blocked = false
	now := began()
	tries := map[key]int{{kindPod, "shop", "web"}: 0, {kindLink, "", "a"}: 0, {kindLink, "", "b"}: 0, {kindLink, "", "c"}: 0}
	for k := range tries {
		q.want(k, target{present: true, state: "x"}, now)
	}
	const turns = 20
	for range turns * len(tries) {
		e, again := q.next(now)
		for e == nil {
			now = again
			e, again = q.next(now)
		}
		tries[e.key]++
		q.broke(e.key, now)
	}
	for k, n := range tries {
		if n < turns/2 {
			t.Errorf("%v was tried %d times of %d", k, n, turns*len(tries))
		}
	}
}
