// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"os"
	"strings"
	"testing"
)

// TestGuide: each piece of Go in the guide stands in the example, which is compiled and run.
func TestGuide(t *testing.T) {
	guide, err := os.ReadFile("../../docs/sdp-guide.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	blocks := strings.Split(string(guide), "```go\n")[1:]
	if len(blocks) < 5 {
		t.Errorf("%d pieces of Go in the guide", len(blocks))
	}
	for _, b := range blocks {
		code, _, _ := strings.Cut(b, "```")
		if !strings.Contains(leftAligned(string(example)), leftAligned(code)) {
			t.Errorf("not in the example:\n%s", code)
		}
	}
}

// leftAligned is text without the white space that lines begin with.
func leftAligned(text string) string {
	var b strings.Builder
	for l := range strings.Lines(text) {
		b.WriteString(strings.TrimLeft(l, "\t "))
	}
	return b.String()
}
