// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// The pause before a failed pod is tried again grows up to a bound. It is the shortest again after a set-up
// that worked, and after the pod was not wanted.
func TestPod_retries(t *testing.T) {
	now, broken := time.Unix(1000, 0), errors.New("broken")
	var p pod
	want := retryFirst
	for range 10 {
		p.becomeFailed(broken, now)
		if p.state != podFailed || !errors.Is(p.err, broken) || p.retryAt.Sub(now) != want {
			t.Fatalf("again after %v, want %v; %v, %v", p.retryAt.Sub(now), want, p.state, p.err)
		}
		want = min(2*want, retryMost)
	}
	if p.pause != retryMost {
		t.Errorf("pause %v after 10 tries, want %v", p.pause, retryMost)
	}
	for name, becomes := range map[string]func(*pod){
		agentapi.StateReady: func(p *pod) { p.becomeReady(&proxy{}) },
		agentapi.StateIdle:  (*pod).becomeIdle,
	} {
		q := p
		becomes(&q)
		if q.state.String() != name || q.err != nil || q.swept != (name == agentapi.StateReady) || (q.proxy != nil) != (name == agentapi.StateReady) {
			t.Errorf("%s: %+v", name, q)
		}
		if q.becomeFailed(broken, now); q.retryAt.Sub(now) != retryFirst || q.proxy != nil {
			t.Errorf("again after %v when it had been %s, want %v", q.retryAt.Sub(now), name, retryFirst)
		}
	}
}

// A pod that starts anew keeps the pause of its earlier failures, and remembers what is left in its
// namespace.
func TestPod_becomeNew(t *testing.T) {
	for _, swept := range []bool{true, false} {
		p := pod{state: podReady, proxy: &proxy{}, pause: 8 * time.Second, swept: !swept, quiet: true}
		if p.becomeNew(swept); p.quiet || p.state != podNew || p.proxy != nil || p.swept != swept || p.pause != 8*time.Second {
			t.Errorf("swept %t: %+v", swept, p)
		}
	}
}
