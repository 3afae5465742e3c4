// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestGuide: each piece of Go in the guide stands in an example, which is compiled and run.
func TestGuide(t *testing.T) {
	guide, err := os.ReadFile("../../../docs/softiwarp.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("example*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	var examples strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		examples.WriteString(leftAligned(string(b)))
	}
	blocks := strings.Split(string(guide), "```go\n")[1:]
	if len(blocks) < 4 {
		t.Errorf("%d pieces of Go in the guide", len(blocks))
	}
	for _, b := range blocks {
		code, _, _ := strings.Cut(b, "```")
		if !strings.Contains(examples.String(), leftAligned(code)) {
			t.Errorf("in no example:\n%s", code)
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
