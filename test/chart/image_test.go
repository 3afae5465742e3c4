// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// released is the chart as the release workflow packs it with an image of this digest.
func released(t *testing.T, digest string) (dir string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, ".github/workflows/release.yml"))
	if err != nil {
		t.Fatal(err)
	}
	var workflow struct {
		Jobs map[string]struct{ Steps []struct{ Name, Run string } }
	}
	if err := yaml.Unmarshal(text, &workflow); err != nil {
		t.Fatal(err)
	}
	checkout := t.TempDir()
	dir = filepath.Join(checkout, "charts/kube-smcr")
	if err := os.CopyFS(dir, os.DirFS(chartDir)); err != nil {
		t.Fatal(err)
	}
	for _, step := range workflow.Jobs["chart"].Steps {
		script, _, found := strings.Cut(step.Run, "helm package ")
		if !found {
			continue
		}
		cmd := exec.CommandContext(t.Context(), "bash", "-e", "-c", script)
		cmd.Dir, cmd.Env = checkout, append(os.Environ(), "DIGEST="+digest, "VERSION=1.2.3")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", step.Name, err, out)
		}
		return dir
	}
	t.Fatal("no step of the release's job chart packs it")
	return ""
}

// TestReleasedImage: a released chart installs the image of its release by its digest, also with the values of an
// earlier release, as helm upgrade --reuse-values has them, and any other image that values name.
func TestReleasedImage(t *testing.T) {
	const repository = "ghcr.io/smcr-io/kube-smcr"
	before, now, other := "sha256:"+strings.Repeat("0", 64), "sha256:"+strings.Repeat("0123456789abcdef", 4), "sha256:"+strings.Repeat("f", 64)
	old, chart := released(t, before), released(t, now)
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"that of the release", nil, repository + "@" + now},
		{"with the values of the release before", []string{"--values", filepath.Join(old, "values.yaml")}, repository + "@" + now},
		{"that of the release, from a mirror", []string{"--set", "image.repository=registry.example/smcr"}, "registry.example/smcr@" + now},
		{"by a tag", []string{"--set", "image.tag=v1.2.4"}, repository + ":v1.2.4"},
		{"by a digest", []string{"--set", "image.digest=" + other}, repository + "@" + other},
		{"by both", []string{"--set", "image.tag=v1.2.4,image.digest=" + other}, repository + "@" + other},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rendered, complaint := helm(t, append([]string{"template", release, chart, "--namespace", namespace}, tt.args...)...)
			if complaint != "" {
				t.Fatal(complaint)
			}
			pods := 0
			for _, doc := range documents(rendered) {
				if parse(t, doc).GetKind() == "CustomResourceDefinition" {
					continue
				}
				if tmpl := podTemplate(typed(t, doc)); tmpl != nil {
					pods++
					if got := tmpl.Spec.Containers[0].Image; got != tt.want {
						t.Errorf("%s: image %s, want %s", parse(t, doc).GetName(), got, tt.want)
					}
				}
			}
			if pods < 3 {
				t.Errorf("%d objects make pods, want agent, controller and a hook at least", pods)
			}
		})
	}
}
