// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

const root = "../.."

// fakeGo stands for the compiler: it writes down how it was called where the
// program should be.
const fakeGo = `#!/bin/sh
[ "$CC" = aarch64-linux-gnu-gcc ] || exit 1
line="CGO_ENABLED=$CGO_ENABLED GOOS=$GOOS GOARCH=$GOARCH $*"
while [ "$1" != -o ]; do shift; done
mkdir -p "$(dirname "$2")"
echo "$line" > "$2"
`

// The Dockerfile and the image that is packed without docker for the local
// cluster have the same files. Its script is run with another compiler.
func TestDockerfileHasTheFilesOfTheLocalImage(t *testing.T) {
	dir := t.TempDir()
	script := buildScript(t)
	for name, text := range map[string]string{
		"go": fakeGo, "git": "#!/bin/sh\n", "dpkg-architecture": "#!/bin/sh\n[ \"$*\" = '-a arm64 -q DEB_HOST_GNU_TYPE' ] && echo aarch64-linux-gnu\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	out := filepath.Join(dir, "out")
	cmd := exec.Command("sh", "-c", strings.ReplaceAll(script, "/out", out))
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "TARGETOS=linux", "TARGETARCH=arm64")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s\n%s", err, text, script)
	}

	got := map[string]string{}
	err := filepath.WalkDir(out, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(name)
		got[strings.TrimPrefix(name, out+"/")] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	commands, err := image.Commands(root)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for _, c := range commands {
		program := "usr/bin/" + c.Program
		cgo := "0"
		if c.Program == "node-agent" {
			cgo = "1"
		}
		want[program] = "CGO_ENABLED=" + cgo + " GOOS=linux GOARCH=arm64 build -trimpath -ldflags=-s -w -o " + filepath.Join(out, program) + " " + c.Package + "/\n"
	}
	for _, f := range image.Users() {
		if !f.Dir {
			want[f.Name] = string(f.Content)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-local image +Dockerfile):\n%s", diff)
	}
	if info, err := os.Stat(filepath.Join(out, "tmp")); err != nil || info.Mode().Perm() != 0o777 || info.Mode()&fs.ModeSticky == 0 {
		t.Errorf("tmp of the image: %v, %v", info, err)
	}

	// What the chart starts is there.
	for _, doc := range documents(template(t)) {
		if o := parse(t, doc); !slices.Contains(foreign, o.GetKind()) {
			if tmpl := podTemplate(typed(t, doc)); tmpl != nil {
				for _, program := range programsOf(&tmpl.Spec) {
					if _, ok := got[strings.TrimPrefix(program, "/")]; !ok {
						t.Errorf("%s %s runs %s, which is not in the image", o.GetKind(), o.GetName(), program)
					}
				}
			}
		}
	}
}

// The libraries are of the same packages in both.
func TestDockerfileHasTheLibrariesOfTheLocalImage(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`apt-get download (.*) &&`).FindSubmatch(text)
	if line == nil {
		t.Fatal("the Dockerfile downloads no packages")
	}
	var got []string
	for _, p := range strings.Fields(string(line[1])) {
		got = append(got, strings.TrimSuffix(p, ":$TARGETARCH"))
	}
	if diff := cmp.Diff(image.RuntimePackages(), got); diff != "" {
		t.Errorf("packages (-local image +Dockerfile):\n%s", diff)
	}
}

// buildScript is the script of the Dockerfile that makes the programs.
func buildScript(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?s)\\\n    (set -eu; .*?[^\\])\n\n`).FindSubmatch(text)
	if m == nil {
		t.Fatal("no script that begins with set -eu in the Dockerfile")
	}
	return strings.ReplaceAll(string(m[1]), "\\\n", "\n")
}
