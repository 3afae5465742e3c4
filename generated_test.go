// SPDX-License-Identifier: Apache-2.0

package tidy_test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// Machines that have no clang see, too, when eBPF objects are older than their sources: make generate writes the hashes of both.
func TestObjectsAreOfTheirSources(t *testing.T) {
	programs, err := filepath.Glob("*/*/bpf")
	more, err2 := filepath.Glob("*/*/*/bpf")
	if programs = append(programs, more...); err != nil || err2 != nil || len(programs) != 2 {
		t.Fatalf("directories of eBPF programs: %q, %v, %v", programs, err, err2)
	}
	for _, bpf := range programs {
		dir := path.Dir(bpf)
		var want strings.Builder
		for _, pattern := range []string{"bpf/*.[ch]", "gen.go", "*_bpfe[bl].*"} {
			files, err := filepath.Glob(filepath.Join(dir, pattern))
			if err != nil || len(files) == 0 {
				t.Fatalf("%s: %s: %q, %v", dir, pattern, files, err)
			}
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				name, err := filepath.Rel(dir, f)
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&want, "%x  %s\n", sha256.Sum256(b), name)
			}
		}
		if got, err := os.ReadFile(filepath.Join(bpf, "objects.sha256")); err != nil || string(got) != want.String() {
			t.Errorf("%s: the objects are not of these sources: run make generate (%v)\n%s\nwant\n%s", dir, err, got, &want)
		}
	}
}

// What verify.sh cannot look at is an error, and so is a generated file that is not the committed one. What it lacks the
// programs for is left out.
func TestVerifyRuns(t *testing.T) {
	bin := t.TempDir()
	write := func(name, script string) {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"bash", "git", "tar", "mktemp", "rm"} {
		program, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if name == "git" {
			write(name, `[ "$NO_FILES" != yes ] || exit 128; [ "$1" != ls-files ] || { echo tools/verify.sh; exit; }; exec `+program+` "$@"`)
		} else if err := os.Symlink(program, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	// go must be asked for what needs no llvm-strip.
	write("go", `[ "$1" != generate ] || { [ "$2" = ./api/... ] && { [ -z "$STALE" ] || echo >>"$STALE"; }; }`)
	write("clang", "")
	write("gofmt", "")
	for _, tc := range []struct{ env, says string }{
		{"STALE=", "verify: ok"},
		{"STALE=tools/verify.sh", "commit: tools/verify.sh"},
		{"STALE=new.go", "commit: new.go"},
		{"NO_FILES=yes", ""},
	} {
		cmd := exec.Command("tools/verify.sh")
		cmd.Env = []string{"PATH=" + bin, "TMPDIR=" + t.TempDir(), tc.env}
		text, err := cmd.CombinedOutput()
		if failed := err != nil; failed != (tc.env != "STALE=") || !strings.Contains(string(text), tc.says) {
			t.Errorf("tools/verify.sh, %s: %v, want %q\n%s", tc.env, err, tc.says, text)
		}
	}
}
