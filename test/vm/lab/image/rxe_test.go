// SPDX-License-Identifier: Apache-2.0

package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each change is made once, and sources that do not have its place are an error and not a module without it.
func TestChangeRXE(t *testing.T) {
	write := func(dir string, change func(string) string) {
		texts := map[string]string{}
		for _, c := range rxeChanges {
			texts[c.file] += c.was + " more;\n"
		}
		for name, text := range texts {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(change(text)), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	dir := t.TempDir()
	write(dir, func(text string) string { return text })
	if err := changeRXE(dir); err != nil {
		t.Fatal(err)
	}
	for _, c := range rxeChanges {
		if text, err := os.ReadFile(filepath.Join(dir, c.file)); err != nil || strings.Count(string(text), c.is+" more;\n") != 1 {
			t.Errorf("%s: %q, %v", c.file, text, err)
		}
	}
	for name, change := range map[string]func(string) string{
		"without":    func(string) string { return "" },
		"more often": func(text string) string { return text + text },
	} {
		dir := t.TempDir()
		write(dir, change)
		if err := changeRXE(dir); err == nil {
			t.Errorf("sources that have the places %s are taken", name)
		}
	}
}
