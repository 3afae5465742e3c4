// SPDX-License-Identifier: Apache-2.0

package tidy_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestWordsInManual: docs/operations.md has the words that objects, events and the controller's metrics show.
func TestWordsInManual(t *testing.T) {
	manual, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ what, files, word, prefix string }{
		{"reason of a condition of SMCRNodes", "internal/kube/report/node.go", `(?m)^\treason\w+ += "(\w+)"`, ""},
		{"reason of the condition AgentAlive", "internal/controller/agents.go", `(?m)^\treason\w+ += "(\w+)"`, ""},
		{"reason of the condition CNIInstalled", "internal/cni/install/status.go", `(?m)^\tState\w+ +State = "(\w+)"`, ""},
		{"reason of the capability kernelPath", "internal/kernelpath/missing.go", `(?m)^\t\w+ +Missing = "(\w+)"`, ""},
		{"reason of an agent's event", "internal/kube/report/events.go", `(?m)^\tevent\w+ += "(\w+)"`, ""},
		{"reason of a controller's event", "internal/controller/*.go", `(?m)(?:Eventf\(.*EventType\w+, |^const reason\w+ += )"(\w+)"`, ""},
		{"metric of the controller", "internal/controller/metrics.go", `\bdesc\("(\w+)"`, "kube_smcr_controller_"},
	} {
		files, err := filepath.Glob(tt.files)
		if err != nil {
			t.Fatal(err)
		}
		word, found := regexp.MustCompile(tt.word), 0
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range word.FindAllSubmatch(text, -1) {
				found++
				if name := tt.prefix + string(m[1]); !strings.Contains(string(manual), "`"+name+"`") {
					t.Errorf("docs/operations.md does not have `%s`, a %s", name, tt.what)
				}
			}
		}
		if found < 2 {
			t.Errorf("%s has %d that this test finds of: %s", tt.files, found, tt.what)
		}
	}
}
