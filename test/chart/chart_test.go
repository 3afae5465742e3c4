// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

var (
	update = flag.Bool("update", false, "write testdata anew")
	server apiserver.Shared
)

func TestMain(m *testing.M) { os.Exit(server.Main(m)) }

const (
	chartDir  = "../../charts/kube-smcr"
	release   = "kube-smcr"
	namespace = "kube-smcr"
)

// A rendering is a way to render the chart.
type rendering struct {
	name string
	args []string
}

// renderings are the renderings that are compared as a whole.
func renderings(t *testing.T) []rendering {
	t.Helper()
	all := []rendering{
		{"default", nil},
		{"everything", []string{"--values", "testdata/everything.yaml"}},
		{"hardware", []string{"--set", "hardware.enabled=true", "--set-json", `agent.devices=[{"rdma":"mlx5_0"},{"rdma":{"name":"mlx5_1","address":"eth2"}}]`}},
		{"digest", []string{"--set", "image.digest=sha256:" + strings.Repeat("0123456789abcdef", 4)}},
	}
	profiles, err := filepath.Glob(filepath.Join(chartDir, "profiles/*.yaml"))
	if err != nil || len(profiles) == 0 {
		t.Fatalf("list the profiles: %d of them, %v", len(profiles), err)
	}
	for _, p := range profiles {
		all = append(all, rendering{"profile-" + strings.TrimSuffix(filepath.Base(p), ".yaml"), []string{"--values", p}})
	}
	return all
}

// helm runs helm and returns its output, and its error output if it fails.
func helm(t *testing.T, args ...string) (stdout, complaint string) {
	t.Helper()
	testenv.Need(t, testenv.ClusterTools)
	dir, err := clustertools.Built()
	if err != nil {
		t.Fatal(err)
	}
	testenv.Builds("...") // the chart, which helm reads
	cmd := exec.Command(filepath.Join(dir, "helm"), args...)
	home := t.TempDir()
	// Some hundred helms run, for a fraction of a second each: none of them collects garbage.
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home, "KUBECONFIG=", "GOGC=off")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), strings.TrimSpace(err.Error() + ": " + errs.String())
	}
	return out.String(), ""
}

func template(t *testing.T, args ...string) string {
	t.Helper()
	out, complaint := helm(t, append([]string{"template", release, chartDir, "--namespace", namespace}, args...)...)
	if complaint != "" {
		t.Fatalf("helm template %s: %s", strings.Join(args, " "), complaint)
	}
	return out
}

// documents cuts helm's output into objects, in the order of installation.
func documents(rendered string) []string {
	var docs []string
	for doc := range strings.SplitSeq("\n"+rendered, "\n---\n") {
		if strings.TrimSpace(doc) != "" {
			docs = append(docs, strings.TrimSpace(doc)+"\n")
		}
	}
	return docs
}

func parse(t *testing.T, doc string) *unstructured.Unstructured {
	t.Helper()
	var o unstructured.Unstructured
	if err := yaml.UnmarshalStrict([]byte(doc), &o.Object); err != nil {
		t.Fatalf("not YAML, or a field is there twice: %v\n%s", err, doc)
	}
	return &o
}

func objects(t *testing.T, rendered string) []*unstructured.Unstructured {
	t.Helper()
	var out []*unstructured.Unstructured
	for _, doc := range documents(rendered) {
		out = append(out, parse(t, doc))
	}
	return out
}

func TestRendered(t *testing.T) {
	standard := documents(template(t))
	for _, r := range renderings(t) {
		t.Run(r.name, func(t *testing.T) {
			var got []string
			for _, doc := range documents(template(t, r.args...)) {
				// Of the variants only what differs; and what other tests compare
				// with its source.
				if r.name != "default" && slices.Contains(standard, doc) || parse(t, doc).GetKind() == "CustomResourceDefinition" {
					continue
				}
				head, _, cut := strings.Cut(doc, "  kube-smcr.json: |\n")
				if cut {
					doc = head + "  kube-smcr.json: |\n    (files/dashboard.json)\n"
				}
				got = append(got, doc)
			}
			golden(t, r.name+".golden.yaml", strings.Join(got, "---\n"))
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("not %s (-want +got); if it should be so: go test ./test/chart -update\n%s", file, diff)
	}
}

func TestLint(t *testing.T) {
	for _, r := range renderings(t) {
		t.Run(r.name, func(t *testing.T) {
			if out, complaint := helm(t, append([]string{"lint", "--strict", chartDir}, r.args...)...); complaint != "" {
				t.Errorf("%s\n%s", complaint, out)
			}
		})
	}
}

// Every cluster-wide object has the release's name, or the name that the user chose, in its own: two releases in
// different namespaces do not touch each other's accounts.
func TestNames(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"release with the chart's name in it", nil, "kube-smcr-agent"},
		{"fullnameOverride", []string{"--set", "fullnameOverride=rdma"}, "rdma-agent"},
		{"nameOverride", []string{"--set", "nameOverride=rdma"}, "kube-smcr-rdma-agent"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rendered := template(t, tt.args...)
			if !regexp.MustCompile(`(?m)^kind: DaemonSet\nmetadata:\n  name: ` + tt.want + `$`).MatchString(rendered) {
				t.Errorf("no DaemonSet %s", tt.want)
			}
			prefix := strings.TrimSuffix(tt.want, "agent")
			for _, o := range objects(t, rendered) {
				if !strings.HasPrefix(o.GetName(), prefix) {
					t.Errorf("%s %s: its name does not begin with %s", o.GetKind(), o.GetName(), prefix)
				}
			}
		})
	}
}
