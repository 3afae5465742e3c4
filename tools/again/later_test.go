// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestLater: tests of two runs that failed run again only when they are asked for, all of them, and that decides.
func TestLater(t *testing.T) {
	const once = `
func TestOnce(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o600)
		t.Error("too slow")
	}
}
`
	writeModule(t, once+"func TestA(t *testing.T) { t.Error(\"wrong\") }\n")
	file := filepath.Join(t.TempDir(), "later")
	t.Setenv(laterEnv, file)
	var out bytes.Buffer
	for _, name := range []string{"TestA", "TestOnce"} {
		if err := run(t.Context(), &out, []string{"-vet=off", "-run=" + name, "./..."}); err != nil {
			t.Fatalf("%s: %v; output:\n%s", name, err, &out)
		}
		if want := "again: " + name + " of example.com/m, later\n"; !strings.HasSuffix(out.String(), want) {
			t.Errorf("output does not end by %q:\n%s", want, &out)
		}
	}
	out.Reset()
	err := run(t.Context(), &out, []string{"-later=" + file})
	if err == nil || !strings.Contains(err.Error(), "example.com/m failed twice") {
		t.Errorf("error %v, want that of TestA", err)
	}
	if want := regexp.MustCompile(`(?s)TestA of example.com/m, alone.*--- FAIL: TestA.*TestOnce of example.com/m, alone.*ok.*FLAKY\texample.com/m\tTestOnce`); !want.Match(out.Bytes()) {
		t.Errorf("output does not match %q:\n%s", want, &out)
	}
	if err := run(t.Context(), &out, []string{"-later=" + file + "x"}); err == nil {
		t.Error("no error for a file that is not there")
	}
}
