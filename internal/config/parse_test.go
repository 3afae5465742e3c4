// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// read is the text of a file.
func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestNode_Immutable_documented: of each field of node the manual says that a reload takes it over, or Immutable does
// that it needs a restart, and not both.
func TestNode_Immutable_documented(t *testing.T) {
	_, err := Parse("t", []byte("node: {nonsense: 1}\n"))
	_, known, ok := strings.Cut(err.Error(), "node.nonsense: unknown field; known here: ")
	if !ok {
		t.Fatal(err)
	}
	known, _, _ = strings.Cut(known, "\n")
	_, text, ok := strings.Cut(read(t, "../../docs/node-agent.md"), "SIGHUP reads the file again. Policies take effect, and of `node` the fields")
	if !ok {
		t.Fatal("the manual no longer says what SIGHUP takes over")
	}
	text, _, _ = strings.Cut(text, "If any other field differs")
	restart := read(t, "parse.go")
	for _, field := range strings.Split(known, ", ") {
		if field == "devicesOfNode" {
			continue // becomes Devices
		}
		taken, needs := strings.Contains(text, "`"+field+"`"), strings.Contains(restart, `diff("`+field+`", `)
		if taken == needs {
			t.Errorf("field %s: the manual says that SIGHUP takes it over: %v; Immutable, that it needs a restart: %v", field, taken, needs)
		}
	}
	if n := strings.Count(known, ", "); n < 25 {
		t.Errorf("node has %d fields that this test finds", n)
	}
}

// TestParse_sampleHasAllFields: each field that the parser knows is in the sample, if only in a comment.
func TestParse_sampleHasAllFields(t *testing.T) {
	sample := read(t, "../../config/samples/node-agent.yaml")
	n := 0
	for _, file := range []string{"parse.go", "budgets.go", "hostpods.go"} {
		for _, list := range regexp.MustCompile(`d\.mapping\(([^)]*)\)`).FindAllStringSubmatch(read(t, file), -1) {
			for _, key := range regexp.MustCompile(`"([A-Za-z]+)"`).FindAllStringSubmatch(list[1], -1) {
				n++
				if !regexp.MustCompile(`\b`+key[1]+`: `).MatchString(sample) && !strings.Contains(sample, key[1]+":\n") {
					t.Errorf("%s: the sample has no field %s", file, key[1])
				}
			}
		}
	}
	if n < 70 {
		t.Errorf("the parser has %d fields that this test finds", n)
	}
}
