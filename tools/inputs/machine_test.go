// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestPrograms(t *testing.T) {
	all, err := programs("../..")
	for _, want := range []string{"nft", "qemu-system-x86_64", "/usr/lib/cni/host-local", "iptables"} {
		if err != nil || !slices.Contains(all, want) {
			t.Errorf("%s is not among %q, %v", want, all, err)
		}
	}
}

// The machine's variable changes when a program does that tests run, and no other one does.
func TestPrintVariables_machine(t *testing.T) {
	testenv.Builds("*") // go list
	dir, bin := checkout(t), t.TempDir()
	write(t, dir, "tools/deps.sh", "runtime='\nsome-package   prog      tests: all\n'\n")
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	before := variables(t, dir)
	changed := func(want bool) {
		t.Helper()
		after := variables(t, dir)
		for name := range after {
			if got := after[name] != before[name]; got != (want && name == "machine") {
				t.Errorf("%s changes: %t", name, got)
			}
		}
		before = after
	}
	changed(false)
	write(t, bin, "prog", "#!/bin/sh\n")
	if err := os.Chmod(filepath.Join(bin, "prog"), 0o700); err != nil {
		t.Fatal(err)
	}
	changed(true)
	if err := os.Chtimes(filepath.Join(bin, "prog"), time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	changed(true)
	write(t, bin, "other", "#!/bin/sh\n")
	changed(false)
}
