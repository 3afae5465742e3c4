// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

func TestLookPause(t *testing.T) {
	for _, c := range []struct{ cost, want time.Duration }{
		{0, othersEvery},
		{100 * time.Microsecond, othersEvery},
		{50 * time.Millisecond, 10 * time.Second},
		{time.Hour, othersMost},
	} {
		if got := lookPause(c.cost); got != c.want {
			t.Errorf("after a look of %v: %v, want %v", c.cost, got, c.want)
		}
	}
}

// TestProxy_looksRarely: where a look at the rules of others costs much, the next one
// is late, and the diversion is renewed as ever.
func TestProxy_looksRarely(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	p.foreign = linux.Others{Cost: time.Minute}
	b.start()
	beats := int(othersEvery/(b.cfg.Node.RedirectTTL/renewalsPerTTL)) + 3 // until after a look that costs little
	eventually(t, func() string {
		renews := 0
		p.redir.look(func() { renews = p.redir.renews })
		if renews < beats {
			return fmt.Sprintf("%d renewals", renews)
		}
		return ""
	})
	looks := 0
	b.kernel.change(func() { looks = p.looks })
	if looks != 1 {
		t.Errorf("%d looks, want the first one only", looks)
	}
}

// TestAttachment_rulesUnknown: a pod whose rules cannot all be read is served, and the
// attachment says so.
func TestAttachment_rulesUnknown(t *testing.T) {
	b := newBench(t, "", preferAll)
	p := b.attach("a", 1)
	p.foreign = linux.Others{Rules: "rules that cannot be read", Unknown: "iptables: permission denied"}
	b.start()
	a := b.attachment("a")
	if a.State != agentapi.StateReady || a.Reason != "" || !strings.Contains(a.Detail, p.foreign.Unknown) {
		t.Errorf("attachment %+v, want one that is served and says what is not known", a)
	}
	if !strings.Contains(b.log.String(), p.foreign.Unknown) {
		t.Error("not in the log")
	}
}
