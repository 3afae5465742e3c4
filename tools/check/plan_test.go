// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPlan(t *testing.T) {
	of := func(dir string, imports ...string) pkg {
		p := pkg{dir: dir, imports: []string{"fmt"}}
		for _, i := range imports {
			p.imports = append(p.imports, module+"/"+i)
		}
		return p
	}
	all := []pkg{
		of("."), of("pkg/b", "pkg/a"), of("pkg/a"), of("cmd/c", "pkg/b"), of("pkg/lone"), of("test/chart"), of("test/cluster", "pkg/a"),
		of("test/cluster/lab/image"), of("test/vm/lab", "pkg/a"), of("test/scale", "pkg/a"),
		of("test/cluster/rdma", "pkg/a"),
	}
	for _, c := range []struct {
		name  string
		files []string
		want  todo
	}{
		{"nothing", []string{""}, todo{}},
		{"a package", []string{"pkg/a/a.go"}, todo{changed: []string{"pkg/a"}, importers: []string{"pkg/b"}}},
		{"one that imports another", []string{"pkg/b/b_test.go", "pkg/a/a.go"}, todo{changed: []string{"pkg/a", "pkg/b"}, importers: []string{"cmd/c"}}},
		{"a fixture", []string{"pkg/lone/testdata/x/y.txt"}, todo{changed: []string{"pkg/lone"}}},
		{"the chart", []string{"charts/kube-smcr/values.yaml"}, todo{changed: []string{"test/chart"}}},
		{"a document", []string{"README.md", "docs/STYLE.md"}, todo{}},
		{"a package that is gone", []string{"pkg/gone/x.go"}, todo{}},
		{"what starts clusters and guests", []string{"test/cluster/x_test.go", "test/vm/lab/lab.go", "test/scale/doc.go"}, todo{apart: []string{"test/cluster", "test/scale", "test/vm/lab"}}},
		{"what starts a cluster of guests", []string{"test/cluster/rdma/x_test.go"}, todo{apart: []string{"test/cluster/rdma"}}},
		{"beside these", []string{"test/cluster/lab/image/image.go"}, todo{changed: []string{"test/cluster/lab/image"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, plan(c.files, all), cmp.AllowUnexported(todo{})); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
		})
	}
}

func TestResults(t *testing.T) {
	const text = "ok  \t" + module + "/pkg/a\t0.1s\n--- FAIL: TestX (0.00s)\nFAIL\t" + module + "/pkg/b\t0.2s\n?   \t" + module + "\t[no test files]\nFAIL\n"
	passed, failed := results(strings.NewReader(text))
	if diff := cmp.Diff([]string{"pkg/a", "."}, passed); diff != "" {
		t.Errorf("passed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"pkg/b"}, failed); diff != "" {
		t.Errorf("failed (-want +got):\n%s", diff)
	}
}

// What is committed on the branch, what is not, and new files count; what main got
// meanwhile does not.
func TestChangedFiles(t *testing.T) {
	t.Chdir(t.TempDir())
	git := func(args ...string) {
		t.Helper()
		args = append([]string{"-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"}, args...)
		if out, err := exec.Command("git", args...).CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git("init", "-q", "-b", "main")
	write("a.go", "1")
	write("b.go", "1")
	git("add", ".")
	git("commit", "-qm", "one")
	git("checkout", "-qb", "topic")
	write("committed.go", "1")
	git("add", ".")
	git("commit", "-qm", "two")
	git("checkout", "-q", "main")
	write("b.go", "2")
	git("commit", "-qam", "three")
	git("checkout", "-q", "topic")
	write("a.go", "2")
	write("new/c.go", "1")
	got, err := changedFiles(context.Background(), "main")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a.go", "committed.go", "new/c.go"}, got); diff != "" {
		t.Errorf("changed files (-want +got):\n%s", diff)
	}
	if _, err := changedFiles(context.Background(), "nowhere"); err == nil || !strings.Contains(err.Error(), "-base") {
		t.Errorf("without the branch: %v", err)
	}
}

// Tests have the variables that tools/inputs prints.
func TestEnvironment(t *testing.T) {
	t.Chdir(t.TempDir())
	for name, text := range map[string]string{
		"go.mod":               "module m\n\ngo 1.26\n",
		"tools/inputs/main.go": "package main\n\nimport \"os\"\n\nfunc main() { os.Stdout.WriteString(\"A_INPUT=1\\nB_INPUT=2\\n\") }\n",
	} {
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	env, err := environment(t.Context())
	for _, v := range []string{"A_INPUT=1", "B_INPUT=2"} {
		if err != nil || !slices.Contains(env, v) {
			t.Errorf("%s is not there, %v", v, err)
		}
	}
}
