// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// A connection that ends is for a moment counted twice, and then once: the
// counter that Prometheus sees must not go back.
func TestSums_carriedDoesNotGoBack(t *testing.T) {
	var s sums
	for _, step := range []struct {
		name              string
		ended, live, want uint64
	}{
		{"one lives", 0, 100, 100},
		{"it ended and is still listed", 100, 100, 200},
		{"it is gone", 100, 0, 200},
		{"others carried more", 100, 150, 250},
	} {
		if got := s.carried(step.ended, step.live); got != step.want {
			t.Errorf("%s: %d, want %d", step.name, got, step.want)
		}
	}
}

func TestRedundancyLabel(t *testing.T) {
	for in, want := range map[string]string{
		"SINGLE": "Single", "SYMMETRIC": "Symmetric", "ASYMMETRIC LOCAL": "Asymmetric", "ASYMMETRIC PEER": "Asymmetric",
	} {
		if got := redundancyLabel(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// What the status shows is the sum of what was counted, and a copy.
func TestMetrics_sum(t *testing.T) {
	m := newMetrics(func() gauges { return gauges{} })
	m.opened(agentapi.Outbound, smcr.ModeSMCR)
	m.opened(agentapi.Inbound, smcr.ModeTCP)
	m.opened(agentapi.Inbound, smcr.ModeTCP)
	m.relayed(smcr.ModeSMCR, 100)
	m.relayed(smcr.ModeTCP, 10)
	m.relayed(smcr.ModeTCP, 1)
	m.fallback(agentapi.CodeBudgetConns)
	m.reset(agentapi.CodeBudgetRelays)
	want := totals{
		connsSMCR: 1, connsTCP: 2, resets: 1, bytesSMCR: 100, bytesTCP: 11,
		reasons: map[agentapi.Code]uint64{agentapi.CodeBudgetConns: 1},
	}
	got := m.sum()
	if d := cmp.Diff(want, got, cmp.AllowUnexported(totals{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	got.reasons[agentapi.CodeBudgetConns] = 9
	if n := m.sum().reasons[agentapi.CodeBudgetConns]; n != 1 {
		t.Errorf("whoever got the sums changed them to %d", n)
	}
}

// A node has as many link groups as there are of all redundancies.
func TestGauges_linkGroups(t *testing.T) {
	g := gauges{groups: map[string]int{"Single": 2, "Symmetric": 3}}
	if n := g.linkGroups(); n != 5 {
		t.Errorf("%d link groups", n)
	}
}
