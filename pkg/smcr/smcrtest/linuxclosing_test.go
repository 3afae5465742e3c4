// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

func TestLinuxClosing(t *testing.T) {
	c := linuxClosing{closed: true}
	c.sent(true, true, false)
	if f := c.flags(); f != cdc.Flags(0).WithSendingDone().WithClosed() || c.isOver() {
		t.Errorf("closed: flags %v, over: %t", f, c.isOver())
	}
	c.take(cdc.Flags(0).WithClosed())
	if !c.isOver() || c.aborted() {
		t.Errorf("closed by both: %v", &c)
	}
	c.resend = true
	if c.isOver() {
		t.Error("over before the flags were said again")
	}
	r := linuxClosing{closed: true}
	r.take(cdc.Flags(0).WithAbort())
	if !r.aborted() || !r.abortDue() {
		t.Errorf("reset by the peer: %v", &r)
	}
	if r.sent(true, false, true); r.flags() != cdc.Flags(0).WithAbort() || !r.isOver() {
		t.Errorf("answered with %v, want A alone", r.flags())
	}
	s := linuxClosing{}
	s.take(cdc.Flags(0).WithSendingDone())
	s.sent(true, false, false)
	s.take(cdc.Flags(0).WithSendingDone().WithAbort())
	if s.closed = true; !s.hasSentLast() || !s.isOver() || s.hasSentAny() && s.flags() != cdc.Flags(0).WithSendingDone() {
		t.Errorf("reset when both had half closed, the peer first: %v, want no answer", &s)
	}
	f := linuxClosing{}
	f.sent(true, false, false)
	f.take(cdc.Flags(0).WithSendingDone())
	f.take(cdc.Flags(0).WithSendingDone().WithAbort())
	if f.closed = true; f.hasSentLast() || !f.abortDue() {
		t.Errorf("reset when both had half closed, we first: %v, want an answer", &f)
	}
}

// A connection that either side has begun to close is in one of the closing states.
func TestLinuxClosing_isEnding(t *testing.T) {
	for _, c := range []struct {
		closing linuxClosing
		want    bool
	}{
		{linuxClosing{}, false},
		{linuxClosing{shut: true}, false},
		{linuxClosing{sentD: true}, true},
		{linuxClosing{gotD: true}, true},
		{linuxClosing{gotC: true}, true},
		{linuxClosing{closed: true}, true},
		{linuxClosing{reset: true}, true},
	} {
		if got := c.closing.isEnding(); got != c.want {
			t.Errorf("%v: %t", &c.closing, got)
		}
	}
}
