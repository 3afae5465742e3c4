// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestPrograms(t *testing.T) {
	p := &programs{from: filepath.Join(t.TempDir(), "none"), to: filepath.Join(t.TempDir(), "copies")}
	refresh := func() {
		t.Helper()
		if err := p.refresh(); err != nil {
			t.Fatal(err)
		}
	}
	refresh() // nothing is there
	if err := os.Mkdir(p.from, 0o755); err != nil {
		t.Fatal(err)
	}
	// As the host does: under another name first. The directory changes with each, on file
	// systems with a slow clock, too.
	changes := 0
	write := func(name, text string, age time.Duration) {
		t.Helper()
		file := filepath.Join(p.from, ".new")
		if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		at := time.Unix(1700000000, 0).Add(-age)
		if err := os.Chtimes(file, at, at); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file, filepath.Join(p.from, name)); err != nil {
			t.Fatal(err)
		}
		changes++
		at = time.Unix(1700000000+int64(changes), 0)
		if err := os.Chtimes(p.from, at, at); err != nil {
			t.Fatal(err)
		}
	}
	is := func(name, want string) {
		t.Helper()
		file := filepath.Join(p.to, name)
		got, err := os.ReadFile(file)
		if err != nil || string(got) != want {
			t.Errorf("%s has %q, %v, want %q", name, got, err, want)
		}
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	write("one", "first", 0)
	write("two.new", "half", 0)
	refresh()
	is("one", "first")
	if _, err := os.Stat(filepath.Join(p.to, "two.new")); err == nil {
		t.Error("a program was copied that is being built")
	}
	write("one", "other", time.Hour) // as long
	write("two", "whole", 0)
	refresh()
	is("one", "other")
	is("two", "whole")
	write("one", "first", time.Hour) // nothing tells that it is another one
	refresh()
	is("one", "other")
	if err := os.Remove(filepath.Join(p.to, "two")); err != nil {
		t.Fatal(err)
	}
	refresh() // and the directory is as it was
	if _, err := os.Stat(filepath.Join(p.to, "two")); err == nil {
		t.Error("programs were asked for though nothing has changed")
	}
	for command, want := range map[string]string{
		filepath.Join(p.from, "one"): filepath.Join(p.to, "one"), "one": "one", "/usr/bin/one": "/usr/bin/one",
	} {
		if got := p.find(command); got != want {
			t.Errorf("%s is %s, want %s", command, got, want)
		}
	}
}
