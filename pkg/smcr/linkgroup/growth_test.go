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

// After our operator has taken a link out of service, no request of the peer brings another one. After
// the peer's operator has, the peer's next request for a link does.
func TestGrowth_forbid(t *testing.T) {
	var h growth
	h.later(time.Unix(1, 0))
	if h.forbid(llc.DeleteLostPath, ourOperator); h.isForbidden() || h.at.IsZero() {
		t.Error("a lost path keeps links from being added")
	}
	if h.forbid(llc.DeleteOperator, peersOperator); !h.isForbidden() || !h.at.IsZero() {
		t.Error("an operator does not keep links from being added")
	}
	if h.peerAllows(); h.isForbidden() {
		t.Error("the peer cannot take back what its operator began")
	}
	h.forbid(llc.DeleteOperator, ourOperator)
	h.forbid(llc.DeleteOperator, peersOperator)
	if h.peerAllows(); !h.isForbidden() {
		t.Error("the peer takes back what our operator began")
	}
	if h.allow(); h.isForbidden() {
		t.Error("forbidden after the operator allowed it")
	}
}
