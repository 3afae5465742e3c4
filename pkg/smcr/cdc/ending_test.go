// SPDX-License-Identifier: Apache-2.0

package cdc

import "testing"

// The flag D is sent before C, C is sent once, and neither is sent after a reset.
func TestEnding_closeDue(t *testing.T) {
	e := ending{state: Active}
	if e.closeDue() != 0 || !e.mayWrite() {
		t.Fatalf("due before the end: %v", e.closeDue())
	}
	e.wantDone = true
	e.sent(e.closeDue())
	if !e.sentFlags.SendingDone() || e.sentFlags.Closed() || e.state != PeerCloseWait1 {
		t.Errorf("shut down: flags %v, state %v", e.sentFlags, e.state)
	}
	e.wantClose = true
	e.sent(e.closeDue())
	if !e.hasSentClose() || e.closeDue() != 0 || e.mayWrite() {
		t.Errorf("closed: flags %v, due %v", e.sentFlags, e.closeDue())
	}
	r := ending{state: Active, wantDone: true, wantClose: true}
	if r.abort() != Aborted || r.closeDue() != 0 || !r.abortDue() || r.mayWrite() {
		t.Errorf("reset: flags due %v, abort %t", r.closeDue(), r.abortDue())
	}
	if r.abort() != 0 {
		t.Error("a second reset is told")
	}
}

// When our flag A is sent, the connection waits for the peer's last message, unless that has come already.
func TestEnding_sentAbort(t *testing.T) {
	for name, tt := range map[string]struct {
		before func(e *ending)
		want   State
	}{
		"ours":                      {func(e *ending) { e.abort() }, PeerAbortWait},
		"the answer to the peer's":  {func(e *ending) { e.handleAbort() }, Closed},
		"after the peer has closed": {func(e *ending) { e.handleClosed(); e.abort() }, Closed},
		"after the peer is done":    {func(e *ending) { e.handleDone(); e.abort() }, PeerAbortWait},
	} {
		t.Run(name, func(t *testing.T) {
			e := ending{state: Active}
			tt.before(&e)
			if ev := e.sentAbort(); e.state != tt.want || ev&Ended != 0 != (tt.want == Closed) {
				t.Errorf("state %v, events %v", e.state, ev)
			}
			if e.abortDue() || !e.wasAborted() {
				t.Errorf("A is due again: %t, reset: %t", e.abortDue(), e.wasAborted())
			}
		})
	}
}

func TestEnding_failsOnce(t *testing.T) {
	e := ending{state: Active}
	if ev := e.fail(); ev != Aborted|Ended || e.state != Closed || !e.failed {
		t.Errorf("failed: events %v, state %v", ev, e.state)
	}
	if ev := e.fail(); ev != 0 {
		t.Errorf("failed again: events %v", ev)
	}
	e.handleLate(Flags(0).WithClosed().WithSendingDone())
	if !e.peerReleased() || e.peerFlags.SendingDone() {
		t.Errorf("late C: flags %v", e.peerFlags)
	}
}

// A second D of the peer changes nothing.
func TestEnding_handleDone(t *testing.T) {
	e := ending{state: Active}
	if ev := e.handleDone(); ev != PeerDone || e.state != AppCloseWait1 || !e.peerIsDone() || e.peerReleased() {
		t.Errorf("D: events %v, state %v", ev, e.state)
	}
	if ev := e.handleDone(); ev != 0 {
		t.Errorf("D again: events %v", ev)
	}
}
