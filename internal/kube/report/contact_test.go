// SPDX-License-Identifier: Apache-2.0

package report

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// What a reporter says of the API server follows what becomes of its calls, also of an agent that has nothing
// to write: the Lease is renewed all the time.
func TestReporter_contact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		srv.fail(errAway)
		began := time.Now()
		r, stop := start(t, srv, src)
		defer stop()
		oneSecond()
		if c := r.Contact(); c.Told || !errors.Is(c.Away, errAway) || c.Since.Before(began) || c.Since.After(began.Add(time.Second)) {
			t.Errorf("while the API server is away from the start: %+v", c)
		}
		forbidden := apierrors.NewForbidden(schema.GroupResource{Group: "smcr.io", Resource: "smcrnodes"}, node, errors.New("no right"))
		srv.mu.Lock()
		srv.refuse[key{kind: kindNode, name: node}] = forbidden
		srv.mu.Unlock()
		srv.fail(nil)
		pass(time.Minute)
		if c := r.Contact(); c.Told || c.Away != nil || !errors.Is(c.Refused, forbidden) {
			t.Errorf("while the API server refuses the SMCRNode: %+v", c)
		}
		srv.mu.Lock()
		clear(srv.refuse)
		srv.mu.Unlock()
		pass(10 * time.Minute) // of a refused object, the pause grows
		if c := r.Contact(); c != (Contact{Told: true}) {
			t.Errorf("when the SMCRNode is written: %+v", c)
		}

		srv.fail(errAway)
		gone := time.Now()
		pass(2 * renewEvery)
		c := r.Contact()
		if !c.Told || !errors.Is(c.Away, errAway) || c.Since.Before(gone) || c.Since.After(gone.Add(renewEvery)) {
			t.Errorf("%v after the API server went away from an idle agent: %+v", time.Since(gone), c)
		}
		pass(2 * renewEvery)
		if again := r.Contact(); again.Since != c.Since {
			t.Errorf("away since %v, and later since %v", c.Since, again.Since)
		}
		srv.fail(nil)
		pass(2 * renewEvery)
		if got := srv.reasons(); len(got) != 0 {
			t.Errorf("events %v after some seconds without the API server, want none", got)
		}
		if c := r.Contact(); c != (Contact{Told: true}) {
			t.Errorf("when the API server is back: %+v", c)
		}
	})
}

// TestReporter_outageIsTold: while the API server is away nobody can be told there; afterwards an event says how
// long it was, also of an agent that had nothing to write meanwhile.
func TestReporter_outageIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		start(t, srv, src)
		oneSecond()
		srv.fail(errAway)
		pass(2 * outageNoted)
		srv.fail(nil)
		pass(2 * renewEvery)
		srv.mu.Lock()
		defer srv.mu.Unlock()
		if len(srv.events) != 1 {
			t.Fatalf("%d events, want one", len(srv.events))
		}
		e := srv.events[0]
		if e.Reason != eventWithoutAPIServer || e.Type != corev1.EventTypeWarning || e.InvolvedObject.Kind != "SMCRNode" || e.InvolvedObject.UID != "uid-node-a" ||
			!strings.Contains(e.Message, "did not reach the API server for 2m") || !strings.Contains(e.Message, errAway.Error()) {
			t.Errorf("event %+v", e)
		}
	})
}

// An agent that is restarted finds the SMCRNode as it wants it, and writes nothing.
func TestReporter_contactNothingToWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		_, stop := start(t, srv, src)
		oneSecond()
		stop()
		srv.mu.Lock()
		srv.found.node = srv.objects[key{kind: kindNode, name: node}].(*v1alpha1.SMCRNode)
		srv.mu.Unlock()
		srv.taken()
		r, _ := start(t, srv, src)
		oneSecond()
		if w := srv.taken(); len(w) != 0 {
			t.Errorf("writes %v, want none", w)
		}
		if c := r.Contact(); c != (Contact{Told: true}) {
			t.Errorf("with the SMCRNode of before: %+v", c)
		}
	})
}

// TestReporter_contactNothingLeft: an outage is over, too, when what could not be written has gone meanwhile, so that nothing
// is left to write.
func TestReporter_contactNothingLeft(t *testing.T) {
	for _, known := range []bool{true, false} { // by the agent, that the pod has gone
		t.Run(fmt.Sprintf("known %t", known), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, src := newFakeServer(), &source{snap: healthy()}
				r, _ := start(t, srv, src)
				oneSecond()
				srv.fail(errAway)
				src.change(func(s *Snapshot) {
					s.Verdicts, s.Attachments = []config.Verdict{verdict("web")}, []agentapi.Attachment{attachment("shop/web", agentapi.StateReady)}
				})
				pass(time.Minute)
				if c := r.Contact(); !errors.Is(c.Away, errAway) {
					t.Fatalf("while the API server is away: %+v", c)
				}
				if known {
					src.change(func(s *Snapshot) { s.Verdicts, s.Attachments = nil, nil })
					oneSecond()
				}
				srv.mu.Lock()
				srv.refuse[key{kind: kindPod, namespace: "shop", name: "web"}] = apierrors.NewNotFound(schema.GroupResource{}, "web")
				srv.mu.Unlock()
				srv.fail(nil)
				pass(awayMost + 2*renewEvery)
				if c := r.Contact(); c != (Contact{Told: true}) {
					t.Errorf("when the API server is back: %+v", c)
				}
			})
		})
	}
}

// TestReporter_contactWithErrorsOnly: errors of the API server's own between calls without an answer end no outage, but
// such errors alone do after a while.
func TestReporter_contactWithErrorsOnly(t *testing.T) {
	broken := apierrors.NewInternalError(errors.New("etcdserver: request timed out"))
	synctest.Test(t, func(t *testing.T) {
		srv, src := newFakeServer(), &source{snap: healthy()}
		g := group("shop/web", 1, 1)
		src.snap.Links = []agentapi.LinkGroup{g}
		r, _ := start(t, srv, src)
		pass(time.Minute) // all is written, and no event waits

		next := func(err error) { // the next call has it
			srv.mu.Lock()
			srv.refuse[key{kind: kindLink, name: linkName(node, &g)}] = err
			n := srv.counts["refuse"]
			srv.mu.Unlock()
			for range 3 * awayMost / collectEvery {
				pass(collectEvery)
				if srv.count("refuse") > n {
					return
				}
			}
			t.Fatal("no call")
		}
		src.change(func(s *Snapshot) { s.Links[0].Conns = 100 })
		next(errAway)
		since := r.Contact().Since
		for range 5 {
			for _, err := range []error{broken, errAway} {
				next(err)
				if c := r.Contact(); !errors.Is(c.Away, errAway) || c.Since != since {
					t.Fatalf("after %v, away since %v: %+v", err, since, c)
				}
			}
		}
		next(broken)
		pass(repliedOnly + 2*awayMost)
		if c := r.Contact(); c != (Contact{Told: true}) {
			t.Errorf("when all calls have answers: %+v", c)
		}
	})
}
