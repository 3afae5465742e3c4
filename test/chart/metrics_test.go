// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// metricNames are the metrics that the programs have: the names in the files
// that make them.
func metricNames(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, f := range []struct{ file, prefix string }{
		{"../../internal/agent/metrics.go", "kube_smcr_"},
		{"../../internal/controller/metrics.go", "kube_smcr_controller_"},
	} {
		text, err := os.ReadFile(f.file)
		if err != nil {
			t.Fatal(err)
		}
		made := regexp.MustCompile(`(?:counter|vec|desc)\("([a-z_]+)"|Name: "([a-z_]+)"`).FindAllStringSubmatch(string(text), -1)
		if len(made) == 0 {
			t.Fatalf("%s makes no metric that this test finds", f.file)
		}
		for _, m := range made {
			names = append(names, f.prefix+m[1]+m[2])
		}
	}
	return names
}

func TestMonitoringUsesMetricsThatExist(t *testing.T) {
	dashboard, err := os.ReadFile(filepath.Join(chartDir, "files/dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	rules := template(t, "--set", "monitoring.prometheusRule.enabled=true", "--show-only", "templates/monitoring/prometheusrule.yaml")
	exist := metricNames(t)
	for name, text := range map[string]string{"alerts": rules, "dashboard": string(dashboard)} {
		used := regexp.MustCompile(`kube_smcr_[a-z_]+`).FindAllString(text, -1)
		if len(used) < 10 {
			t.Errorf("the %s use %d metrics; has their form changed?", name, len(used))
		}
		for _, m := range used {
			base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(m, "_bucket"), "_sum"), "_count")
			if !slices.Contains(exist, m) && !slices.Contains(exist, base) {
				t.Errorf("the %s use %s, which no program has; there are %s", name, m, strings.Join(exist, ", "))
			}
		}
	}
}

func TestDashboard(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(chartDir, "files/dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			ID          int
			Type, Title string
			GridPos     struct{ X, Y, W, H int }
			Targets     []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	seen := map[int]bool{}
	for _, p := range d.Panels {
		if seen[p.ID] || p.Title == "" || p.Type != "row" && len(p.Targets) == 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %d %q: the number twice, no title, nothing to show, or beyond the edge", p.ID, p.Title)
		}
		seen[p.ID] = true
		for _, target := range p.Targets {
			if strings.Count(target.Expr, "(") != strings.Count(target.Expr, ")") {
				t.Errorf("panel %q: parentheses of %s", p.Title, target.Expr)
			}
		}
	}
	// What an operator is promised to find.
	for _, want := range []string{"Link groups by state", "Fallback by reason", "Bytes by RDMA and by TCP", "What stalls connections", "Registered memory"} {
		if !strings.Contains(string(text), `"`+want+`"`) {
			t.Errorf("no panel %q", want)
		}
	}
}
