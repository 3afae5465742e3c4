// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"bytes"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPrintNodes_errors: what comes from an agent's pod is one line of its node, and does nothing to the terminal.
func TestPrintNodes_errors(t *testing.T) {
	var b bytes.Buffer
	answers := []NodeAnswer[string]{{Node: "n1", Error: "smcrctl ends with code 1: \x1b[2J\nnode n2\n\u009b1A"}, {Node: "n3", Error: "no agent"}}
	if err := PrintNodes(&b, answers, func(io.Writer, string) error { return nil }); err != nil {
		t.Fatal(err)
	}
	want := "node n1\nsmcrctl ends with code 1: ?[2J; node n2; ?1A\n\nnode n3\nno agent\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
