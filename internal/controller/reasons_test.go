// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// TestCounted: the reasons in metrics are those of agents, all of them.
func TestCounted(t *testing.T) {
	want := []string{"", unknownReason}
	for _, c := range agentapi.Codes() {
		want = append(want, string(c))
	}
	if diff := cmp.Diff(want, countedReasons); diff != "" {
		t.Errorf("(-codes of agents +reasons that are counted):\n%s", diff)
	}
	for _, c := range countedReasons {
		if got := counted(c); got != c {
			t.Errorf("%q is counted as %q", c, got)
		}
	}
	for _, c := range []string{"X0", "0x03050001", "NO_AGENTS"} {
		if got := counted(c); got != unknownReason {
			t.Errorf("%q is counted as %q", c, got)
		}
	}
}
