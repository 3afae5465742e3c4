// SPDX-License-Identifier: Apache-2.0

package agent

import (
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
