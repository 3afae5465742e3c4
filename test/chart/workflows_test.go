// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// The workflows call targets and scripts that exist, and name actions by commit:
// a tag can be moved. actionlint, in `make lint`, checks their form.
func TestWorkflows(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root, ".github/workflows/*.yml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("list the workflows: %d of them, %v", len(files), err)
	}
	targets, script := regexp.MustCompile(`\bmake ([a-z0-9-]+)`), regexp.MustCompile(`(?m)^(tools/\S+|\.ci/\S+)`)
	notAbsolute := regexp.MustCompile(`\bKUBE_SMCR_CACHE: +[^/\s].*`)
	compiles := regexp.MustCompile(`(?m)^make (lint|vuln)`)
	substitutes := regexp.MustCompile(`\bmake .*\$\(.*`)
	pinned := regexp.MustCompile(`^[\w-]+/[\w/-]+@[0-9a-f]{40}$`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if m := notAbsolute.Find(text); m != nil {
			t.Errorf("%s: %s: not an absolute path, so perhaps in the checkout, of which tests read every file", file, m)
		}
		var workflow struct {
			Permissions map[string]string
			Jobs        map[string]struct {
				TimeoutMinutes int `json:"timeout-minutes"`
				Steps          []struct{ Uses, Run string }
			}
		}
		if err := yaml.Unmarshal(text, &workflow); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if len(workflow.Permissions) != 1 || workflow.Permissions["contents"] != "read" {
			t.Errorf("%s: permissions %v; a job that needs more says so itself", file, workflow.Permissions)
		}
		for name, job := range workflow.Jobs {
			if job.TimeoutMinutes == 0 {
				t.Errorf("%s: job %s has no timeout-minutes", file, name)
			}
			var runs []string
			for _, step := range job.Steps {
				runs = append(runs, step.Run)
				if step.Uses != "" && !pinned.MatchString(step.Uses) {
					t.Errorf("%s: %s is not named by its commit", file, step.Uses)
				}
				if m := substitutes.FindString(step.Run); m != "" {
					t.Errorf("%s: %s: the error of $() in an argument does not end the step; give it to a variable first", file, m)
				}
				for _, m := range targets.FindAllStringSubmatch(step.Run, -1) {
					if !strings.Contains(string(makefile), "\n"+m[1]+":") {
						t.Errorf("%s: no target %s in the Makefile", file, m[1])
					}
				}
				for _, m := range script.FindAllString(step.Run, -1) {
					if info, err := os.Stat(filepath.Join(root, m)); err != nil || info.Mode()&0o100 == 0 {
						t.Errorf("%s: cannot run %s: %v", file, m, err)
					}
				}
			}
			// As the runner's user make installs nothing.
			if all := strings.Join(runs, "\n"); compiles.MatchString(all) && !strings.Contains(all, "libibverbs-dev") {
				t.Errorf("%s: job %s compiles all packages without libibverbs-dev", file, name)
			}
		}
	}
}
