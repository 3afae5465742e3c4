// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// TestView: before the first round no configuration is applied, and the decisions come with the
// latest first.
func TestView(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.proxy("a")
	v := View{b.a}
	if n := v.Applied(); n != nil {
		t.Errorf("applied %v before the first round", n)
	}
	r := &round{node: b.a.node.Load()}
	r.left.Store(2)
	b.a.manager.partDone(r)
	if v.Applied() != nil || b.a.manager.synced.Load() {
		t.Error("applied after half of a round")
	}
	b.a.manager.partDone(r)
	if v.Applied() != b.a.node.Load() || !b.a.manager.synced.Load() {
		t.Errorf("applied %v after the round", v.Applied())
	}
	for _, dst := range []string{"192.0.2.9:80", "192.0.2.9:81"} {
		p.px.record(p.outboundTo(dst), agentapi.ModeReset, fallback{code: agentapi.CodeConnect})
	}
	if ds := v.Decisions(); len(ds) != 2 || ds[0].Dest.Port() != 81 {
		t.Errorf("decisions %+v", ds)
	}
}

// TestView_countRefused: what the caller refuses for the agent is among the agent's reloads. The series of both
// results are there from the start, and so are those of connections: Prometheus sees no increase in a series
// that begins.
func TestView_countRefused(t *testing.T) {
	b := newBench(t, "", preferAll)
	var view View
	b.cfg.Observe = func(v View) { view = v }
	b.start()
	expect := func(when string, want ...string) {
		t.Helper()
		text := value(b.client.Metrics(t.Context()))(t)
		for _, line := range want {
			if !strings.Contains(text, "\nkube_smcr_"+line+"\n") {
				t.Errorf("%s: no %s", when, line)
			}
		}
	}
	expect("at the start", `reloads_total{result="refused"} 0`, `reloads_total{result="done"} 0`, `resets_total{reason="LINK_GROUP"} 0`,
		`connections_total{direction="inbound",mode="SMC-R"} 0`, `connections_total{direction="inbound",mode="TCP"} 0`,
		`connections_total{direction="outbound",mode="SMC-R"} 0`, `connections_total{direction="outbound",mode="TCP"} 0`)
	view.CountRefused()
	expect("after one", `reloads_total{result="refused"} 1`, `reloads_total{result="done"} 0`)
}
