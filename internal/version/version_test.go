// SPDX-License-Identifier: Apache-2.0

package version

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestChoose(t *testing.T) {
	for _, tt := range []struct{ name, linked, built, want string }{
		{"by Go", "", "v1.2.3", "v1.2.3"},
		{"by the linker", "v2.0.0", "(devel)", "v2.0.0"},
		{"by nobody", "", "", "unknown"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := choose(tt.linked, tt.built); got != tt.want {
				t.Errorf("version %q, want %q", got, tt.want)
			}
		})
	}
}

// TestString_linked: the variable has the name that the package's page says.
func TestString_linked(t *testing.T) {
	dir := t.TempDir()
	main := filepath.Join(dir, "main.go")
	const text = "package main\n\nimport \"github.com/smcr-io/kube-smcr/internal/version\"\n\nfunc main() { print(version.String()) }\n"
	if err := os.WriteFile(main, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	// A file outside the module may not import its internal packages.
	over := filepath.Join(dir, "overlay.json")
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(over, []byte(`{"Replace": {"`+wd+`/probe/main.go": "`+main+`"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "probe")
	build := exec.Command("go", "build", "-overlay", over, "-ldflags=-X github.com/smcr-io/kube-smcr/internal/version.linked=v9.8.7", "-o", program, "./probe")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if out, err := exec.Command(program).CombinedOutput(); err != nil || string(out) != "v9.8.7" {
		t.Errorf("it prints %q, %v", out, err)
	}
}
