// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/smcr-io/kube-smcr/internal/scrape"
)

// metricNames are the names of the programs' metrics, read from the files that register them.
func metricNames(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, f := range []struct{ file, prefix string }{
		{"../../internal/agent/metrics.go", "kube_smcr_"},
		{"../../internal/kube/contact.go", ""},
		{"../../internal/controller/metrics.go", "kube_smcr_controller_"},
	} {
		text, err := os.ReadFile(f.file)
		if err != nil {
			t.Fatal(err)
		}
		made := regexp.MustCompile(`(?:counter|vec|desc)\("([a-z_]+)"|Name: "([a-z_]+)"|NewDesc\("([a-z_]+)"`).FindAllStringSubmatch(string(text), -1)
		if len(made) == 0 {
			t.Fatalf("%s makes no metric that this test finds", f.file)
		}
		for _, m := range made {
			names = append(names, f.prefix+m[1]+m[2]+m[3])
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

// TestMonitoring_budgets: who relies on alerts learns of each budget that is nearly used up, also of several at a
// time, and of what comes of that.
func TestMonitoring_budgets(t *testing.T) {
	rules := template(t, "--set", "monitoring.prometheusRule.enabled=true", "--show-only", "templates/monitoring/prometheusrule.yaml")
	budgets := 0
	for _, m := range metricNames(t) {
		if !strings.Contains(m, "_budget_") && m != "kube_smcr_paused_pods" {
			continue
		}
		if budgets++; !strings.Contains(rules, m+" >") {
			t.Errorf("no alert goes by %s", m)
		}
	}
	if budgets != 6 {
		t.Errorf("this test finds %d metrics of budgets, want 6", budgets)
	}
	// "or" leaves out what has the same labels as something left of it.
	var named []string
	for _, m := range regexp.MustCompile(`label_replace\(.*kube_smcr_budget_[a-z_]+ > [0-9.]+, "budget", "([a-z]+)", "", ""\)`).FindAllStringSubmatch(rules, -1) {
		named = append(named, m[1])
	}
	if diff := cmp.Diff([]string{"memory", "connections", "relays", "pending", "sockets"}, named); diff != "" || !strings.Contains(rules, "budget of {{ $labels.budget }}") {
		t.Errorf("the alert names the budget otherwise (-want +got):\n%s", diff)
	}
}

// TestMonitoring_metricsAway: where Prometheus gets no metrics its operator is not told of an outage that there may not be, and
// is told how to find out: a certificate of no use, for example, keeps no agent from running.
func TestMonitoring_metricsAway(t *testing.T) {
	rules := template(t, "--set", "monitoring.prometheusRule.enabled=true", "--show-only", "templates/monitoring/prometheusrule.yaml")
	groups, _, err := unstructured.NestedSlice(objects(t, rules)[0].Object, "spec", "groups")
	if err != nil {
		t.Fatal(err)
	}
	down := 0
	for _, g := range groups {
		for _, r := range g.(map[string]any)["rules"].([]any) {
			r := r.(map[string]any)
			if !regexp.MustCompile(`\bup\{`).MatchString(r["expr"].(string)) {
				continue
			}
			summary, _, _ := unstructured.NestedString(r, "annotations", "summary")
			description, _, _ := unstructured.NestedString(r, "annotations", "description")
			if !strings.HasPrefix(summary, "Prometheus ") {
				t.Errorf("%s is about what Prometheus gets, and says %q", r["alert"], summary)
			}
			if !strings.Contains(r["expr"].(string), "== 0") {
				continue
			}
			down++
			for _, want := range []string{"metrics are away", "metrics.tlsSecret", "onnections go on", "kubectl "} {
				if !strings.Contains(description, want) {
					t.Errorf("%s does not say %q: %s", r["alert"], want, description)
				}
			}
		}
	}
	if down != 2 {
		t.Errorf("%d alerts of targets that are down, want 2", down)
	}
}

// TestMonitoring_reconcileErrors: an alert tells of one object that fails for good, which the controller tries again
// ever more rarely.
func TestMonitoring_reconcileErrors(t *testing.T) {
	rules := template(t, "--set", "monitoring.prometheusRule.enabled=true", "--show-only", "templates/monitoring/prometheusrule.yaml")
	limits, err := os.ReadFile("../../internal/controller/limits.go")
	if err != nil {
		t.Fatal(err)
	}
	bound := regexp.MustCompile(`controller_runtime_reconcile_errors_total.* > ([0-9.]+)`).FindStringSubmatch(rules)
	pause := regexp.MustCompile(`maxRestart += ([0-9]+) \* time\.Second`).FindSubmatch(limits)
	if bound == nil || pause == nil {
		t.Fatalf("the alert's bound is %q and the controller's pause %q; has their form changed?", bound, pause)
	}
	most, err := strconv.ParseFloat(bound[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	seconds, err := strconv.ParseFloat(string(pause[1]), 64)
	if err != nil {
		t.Fatal(err)
	}
	if most > 0.5/seconds {
		t.Errorf("the alert wants %v errors a second, and an object that fails for good makes %v", most, 1/seconds)
	}
}

// TestMonitoring_labels: alerts and dashboard select series that every target has, such as up, by labels that the
// chart's ServiceMonitors give. A container declares the port, or discovery does not name it: the agent declares none.
func TestMonitoring_labels(t *testing.T) {
	rendered := template(t, "--set", "monitoring.serviceMonitor.enabled=true,monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true")
	given := map[string]bool{"namespace": true, "pod": true}
	var containers []string
	for _, o := range objects(t, rendered) {
		if o.GetKind() != "ServiceMonitor" {
			continue
		}
		endpoints, _, err := unstructured.NestedSlice(o.Object, "spec", "endpoints")
		if err != nil || len(endpoints) != 1 {
			t.Fatalf("%s: endpoints %v, %v", o.GetName(), endpoints, err)
		}
		relabelings, _, err := unstructured.NestedSlice(endpoints[0].(map[string]any), "relabelings")
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range relabelings {
			r := r.(map[string]any)
			given[r["targetLabel"].(string)] = true
			if r["targetLabel"] == "container" && r["sourceLabels"] == nil {
				containers = append(containers, r["replacement"].(string))
			}
		}
	}
	for _, c := range find[*appsv1.Deployment](t, rendered, "-controller").Spec.Template.Spec.Containers {
		if len(c.Ports) > 0 {
			containers = append(containers, c.Name)
		}
	}
	selectors := regexp.MustCompile(`\b(?:up|process_[a-z_]+)\{([^}]*)\}`).FindAllStringSubmatch(strings.ReplaceAll(rendered, `\"`, `"`), -1)
	if len(selectors) < 4 {
		t.Fatalf("alerts and dashboard have %d selectors that this test finds", len(selectors))
	}
	for _, s := range selectors {
		for _, m := range regexp.MustCompile(`([a-z_]+)=~?"([^"]*)"`).FindAllStringSubmatch(s[1], -1) {
			if !given[m[1]] || m[1] == "container" && !slices.Contains(containers, m[2]) {
				t.Errorf("%s selects by the label %s, which no target has so: they have %v, and the containers %v", s[0], m[1], given, containers)
			}
		}
	}
}

// TestAttack_scrapersToken: whoever answers a scrape in an agent's place gets a token with which it can
// read metrics and do nothing else. Where the agents have a certificate, it gets no token.
func TestAttack_scrapersToken(t *testing.T) {
	for _, tt := range []struct {
		name     string
		set      string
		verifies bool
	}{
		{"certificates of their own", "", false},
		{"a certificate from outside", ",metrics.tlsSecret=smcr-metrics", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rendered := template(t, "--set", "monitoring.serviceMonitor.enabled=true"+tt.set)
			secret := find[*corev1.Secret](t, rendered, "-metrics-reader")
			account := find[*corev1.ServiceAccount](t, rendered, "-metrics-reader")
			if secret.Type != corev1.SecretTypeServiceAccountToken || secret.Annotations[corev1.ServiceAccountNameKey] != account.Name || secret.Namespace != account.Namespace {
				t.Errorf("the Secret is of the type %s, of account %s/%s", secret.Type, secret.Namespace, secret.Annotations[corev1.ServiceAccountNameKey])
			}
			monitors := 0
			for _, o := range objects(t, rendered) {
				switch {
				case o.GetKind() == "ServiceMonitor":
					monitors++
					checkEndpoints(t, o, secret.Name, tt.verifies)
				case strings.HasSuffix(o.GetKind(), "RoleBinding"):
					ref, _, err := unstructured.NestedString(o.Object, "roleRef", "name")
					subjects, _, _ := unstructured.NestedSlice(o.Object, "subjects")
					for _, s := range subjects {
						if err != nil || s.(map[string]any)["name"] == account.Name && ref != account.Name {
							t.Errorf("%s %s gives %s to %s, %v", o.GetKind(), o.GetName(), ref, account.Name, err)
						}
					}
				}
			}
			if monitors != 2 {
				t.Errorf("%d ServiceMonitors, want 2", monitors)
			}
			want := []rbacv1.PolicyRule{{NonResourceURLs: []string{scrape.OwnPath}, Verbs: []string{"get"}}}
			if diff := cmp.Diff(want, find[*rbacv1.ClusterRole](t, rendered, "-metrics-reader").Rules); diff != "" {
				t.Errorf("rights of the account (-want +got):\n%s", diff)
			}
		})
	}
	if rendered := template(t); strings.Contains(rendered, "service-account-token") {
		t.Error("there is a token that nobody asked for")
	}
}

func checkEndpoints(t *testing.T, monitor *unstructured.Unstructured, secret string, verifies bool) {
	t.Helper()
	endpoints, _, err := unstructured.NestedSlice(monitor.Object, "spec", "endpoints")
	if err != nil || len(endpoints) != 1 {
		t.Fatalf("%s: endpoints %v, %v", monitor.GetName(), endpoints, err)
	}
	e := endpoints[0].(map[string]any)
	want := map[string]any{"type": "Bearer", "credentials": map[string]any{"name": secret, "key": "token"}}
	if diff := cmp.Diff(want, e["authorization"]); diff != "" || e["bearerTokenFile"] != nil {
		t.Errorf("%s: bearerTokenFile %v, authorization (-want +got):\n%s", monitor.GetName(), e["bearerTokenFile"], diff)
	}
	tls := e["tlsConfig"].(map[string]any)
	if skips := tls["insecureSkipVerify"] == true; skips == verifies || (tls["ca"] != nil && tls["serverName"] != nil) != verifies {
		t.Errorf("%s: it checks who answers by %v", monitor.GetName(), tls)
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
	// The documents promise these panels to operators.
	for _, want := range []string{"Link groups by state", "Fallback by reason", "Bytes by RDMA and by TCP", "What stalls connections", "Registered memory"} {
		if !strings.Contains(string(text), `"`+want+`"`) {
			t.Errorf("no panel %q", want)
		}
	}
}
