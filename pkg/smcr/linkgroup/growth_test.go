// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// RFC 7609 C.8: a failed second link is tried again, each time later, up to a limit.
func TestGrowth_later(t *testing.T) {
	now := time.Unix(1, 0)
	var h growth
	for want := AddLinkRetryMin; want < AddLinkRetryMax; want *= 2 {
		if h.later(now); !h.at.Equal(now.Add(want)) {
			t.Errorf("again after %v, want %v", h.at.Sub(now), want)
		}
	}
	for range 3 {
		if h.later(now); !h.at.Equal(now.Add(AddLinkRetryMax)) {
			t.Errorf("again after %v, want %v", h.at.Sub(now), AddLinkRetryMax)
		}
	}
	h.reset()
	if h.later(now); !h.at.Equal(now.Add(AddLinkRetryMin)) {
		t.Errorf("again after %v when there was another link", h.at.Sub(now))
	}
}

// What our operator took out of service stays so whatever the peer asks for; what the
// peer's took, until it asks.
func TestGrowth_hold(t *testing.T) {
	var h growth
	h.later(time.Unix(1, 0))
	if h.hold(llc.DeleteLostPath, heldByUs); h.isHeld() || h.at.IsZero() {
		t.Error("a lost path keeps links from being added")
	}
	if h.hold(llc.DeleteOperator, heldByPeer); !h.isHeld() || !h.at.IsZero() {
		t.Error("an operator does not")
	}
	if h.peerReleases(); h.isHeld() {
		t.Error("the peer cannot take back what it began")
	}
	h.hold(llc.DeleteOperator, heldByUs)
	h.hold(llc.DeleteOperator, heldByPeer)
	if h.peerReleases(); !h.isHeld() {
		t.Error("the peer takes back what our operator began")
	}
	if h.release(); h.isHeld() {
		t.Error("held after the release")
	}
}
