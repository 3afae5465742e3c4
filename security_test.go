// SPDX-License-Identifier: Apache-2.0

package tidy_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNamesInSecurityDocument: the tests that docs/security.md names exist, and it
// names every attack.
func TestNamesInSecurityDocument(t *testing.T) {
	text, err := os.ReadFile("docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`((?:Test|Fuzz)[A-Z]\\w*)`").FindAllStringSubmatch(string(text), -1) {
		named[m[1]] = true
	}
	if len(named) == 0 {
		t.Fatal("docs/security.md names no test")
	}
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	for _, f := range sources(t) {
		if !strings.HasSuffix(f.name, "_test.go") {
			continue
		}
		for _, m := range declared.FindAllSubmatch(f.text, -1) {
			there[string(m[1])] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		if !there[name] {
			t.Errorf("docs/security.md names %s, which is nowhere: name the test that holds it", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(there)) {
		if strings.HasPrefix(name, "TestAttack_") && !named[name] {
			t.Errorf("%s is not in docs/security.md: say there what it attacks, and how that is closed", name)
		}
	}
}
