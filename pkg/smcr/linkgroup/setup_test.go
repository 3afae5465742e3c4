// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"
)

// Every step has a name: people read it in errors.
func TestSteps_haveNames(t *testing.T) {
	seen := map[string]bool{}
	for s := waitPeer; s <= setupDone; s++ {
		seen[s.String()] = true
	}
	for s := addNone; s <= addWaitConfirm; s++ {
		seen["adding: "+s.String()] = true
	}
	for s := rmbNew; s <= rmbForgotten; s++ {
		seen["RMB: "+s.String()] = true
	}
	if want := int(setupDone+1) + int(addWaitConfirm+1) + int(rmbForgotten+1); len(seen) != want {
		t.Errorf("%d names of %d states: %v", len(seen), want, seen)
	}
}

// RFC 7609 C.7.1: what silence means at each step. Linux goes on with one link by itself
// when the second one has failed (C.8).
func TestSetup_expired(t *testing.T) {
	now := time.Unix(1, 0)
	for step, want := range map[setupStep]State{
		waitConfirmLinkReply: Dead, waitConfirmLink: Dead, waitAddLink: Dead, waitDeleteReply: Active, waitPeer: Forming, waitSecondLink: Forming,
	} {
		g := New(Config{Role: Server})
		g.AddFirstLink(Endpoint{})
		g.setup.becomeWaiting(step, now)
		if g.setup.expired(g, now); g.State() != want {
			t.Errorf("waiting for %v: group is %v, want %v", step, g.State(), want)
		}
	}
}

// becomeFailed remembers the second link until the set-up is done.
func TestSetup_becomes(t *testing.T) {
	var s setup
	s.becomeSecond()
	if s.step != waitSecondLink || !s.deadline.IsZero() {
		t.Errorf("%+v", s)
	}
	s.becomeFailed(2, time.Unix(5, 0))
	if s.step != waitDeleteReply || s.failed != 2 || !s.deadline.Equal(time.Unix(5, 0)) {
		t.Errorf("%+v", s)
	}
	if failed := s.becomeDone(); !failed || s != (setup{step: setupDone}) {
		t.Errorf("%+v", s)
	}
}
