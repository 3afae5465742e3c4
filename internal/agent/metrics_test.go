// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestSums_endsDuringScrape: a session that ends while live ones are looked at is not counted twice.
func TestSums_endsDuringScrape(t *testing.T) {
	ended := uint64(0)
	s := &sums{
		sum: func() totals { return totals{bytesSMCR: ended} },
		look: func() gauges {
			live := 1000 - ended
			ended = 1000
			return gauges{bytesSMCR: live}
		},
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(s)
	families, err := reg.Gather()
	must(t, err)
	for _, f := range families {
		if f.GetName() != "kube_smcr_relayed_bytes_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			if n := m.GetCounter().GetValue(); n > 1000 {
				t.Errorf("%v bytes, and 1000 were carried", n)
			}
		}
	}
}

// A connection that ends is for a moment counted twice, and then once: the
// counter that Prometheus sees must not go back.
func TestSums_carriedDoesNotGoBack(t *testing.T) {
	var s sums
	for _, step := range []struct {
		name              string
		ended, live, want uint64
	}{
		{"one lives", 0, 100, 100},
		{"it ended and is still listed", 100, 100, 200},
		{"it is gone", 100, 0, 200},
		{"others carried more", 100, 150, 250},
	} {
		if got := s.carried(step.ended, step.live); got != step.want {
			t.Errorf("%s: %d, want %d", step.name, got, step.want)
		}
	}
}

func TestRedundancyLabel(t *testing.T) {
	for in, want := range map[string]string{
		"SINGLE": "Single", "SYMMETRIC": "Symmetric", "ASYMMETRIC LOCAL": "Asymmetric", "ASYMMETRIC PEER": "Asymmetric",
	} {
		if got := redundancyLabel(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

type refusingDevice struct{ fakeDevice }

func (refusingDevice) Stats() soft.Stats { return soft.Stats{TxPackets: 9, TxErrors: 7} }

// What the kernel refused to send for a software device is counted, and nothing for devices that are not one or not there.
func TestGauges_unsent(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.openDevice = func(string, config.Device, bool) (rdma.Device, func() error, error) {
		return refusingDevice{}, func() error { return nil }, nil
	}
	a := newBare(t, b).a
	if g := a.gauges(); len(g.unsent) != 0 {
		t.Errorf("%v without a device", g.unsent)
	}
	must(t, a.rnics.Open(t.Context(), a.cfg.Node.Devices))
	families, err := a.metrics.registry.Gather()
	must(t, err)
	var refused []float64
	for _, f := range families {
		if f.GetName() != "kube_smcr_device_send_errors_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			refused = append(refused, m.GetCounter().GetValue())
		}
	}
	if !slices.Equal(refused, []float64{7}) {
		t.Errorf("refused: %v, want 7 of one device", refused)
	}
	must(t, a.rnics.Close())
}

// What the status shows is the sum of what was counted, and a copy.
func TestMetrics_sum(t *testing.T) {
	m := newMetrics(func() gauges { return gauges{} })
	m.opened(agentapi.Outbound, smcr.ModeSMCR)
	m.opened(agentapi.Inbound, smcr.ModeTCP)
	m.opened(agentapi.Inbound, smcr.ModeTCP)
	m.relayed(smcr.ModeSMCR, 100)
	m.relayed(smcr.ModeTCP, 10)
	m.relayed(smcr.ModeTCP, 1)
	m.fallback(agentapi.CodeBudgetConns)
	m.reset(agentapi.CodeBudgetRelays)
	want := totals{
		connsSMCR: 1, connsTCP: 2, resets: 1, bytesSMCR: 100, bytesTCP: 11,
		reasons: map[agentapi.Code]uint64{agentapi.CodeBudgetConns: 1},
	}
	got := m.sum()
	if d := cmp.Diff(want, got, cmp.AllowUnexported(totals{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	got.reasons[agentapi.CodeBudgetConns] = 9
	if n := m.sum().reasons[agentapi.CodeBudgetConns]; n != 1 {
		t.Errorf("whoever got the sums changed them to %d", n)
	}
}

// A node has as many link groups as there are of all redundancies.
func TestGauges_linkGroups(t *testing.T) {
	g := gauges{groups: map[string]int{"Single": 2, "Symmetric": 3}}
	if n := g.linkGroups(); n != 5 {
		t.Errorf("%d link groups", n)
	}
}

// TestMetrics_plainTCP: the alert and the panel about the share of plain TCP see a connection whose SYN was held, and
// which was let go because its destination has no SMC-R. No agent carried it. They do not see one that failed.
func TestMetrics_plainTCP(t *testing.T) {
	l := newHoldLab(t, preferAll)
	l.a.start(t)
	serve(t, l.b.pod.listen(t, podB+":80"), says("server"))
	if r := l.a.pod.try(t, attempt{dst: podB + ":80"}); r.errno != 0 {
		t.Fatal(r)
	}
	if r := l.a.pod.try(t, attempt{dst: podB + ":81"}); r.errno != unix.ECONNREFUSED {
		t.Fatal(r)
	}
	for name, expr := range map[string]string{"alert": alertExpr(t, "SMCRFallbackHigh"), "panel": panelExpr(t, "Share on SMC-R")} {
		plain := map[string]bool{}
		for _, m := range regexp.MustCompile(`rate\(kube_smcr_([a-z_]+(?:\{[^}]*\})?)`).FindAllStringSubmatch(expr, -1) {
			if !strings.Contains(m[1], `mode="SMC-R"`) {
				plain[m[1]] = true
			}
		}
		n := 0
		for selector := range plain {
			n += l.a.selected(t, selector)
		}
		if n != 1 {
			t.Errorf("the %s sees %d connections that were plain TCP, want 1: %s", name, n, expr)
		}
	}
}

// selected is the sum of the series of the node's agent that a selector of PromQL selects. The agent does not give the
// label node, Prometheus does.
func (n *testNode) selected(t testing.TB, selector string) int {
	t.Helper()
	name, matchers, _ := strings.Cut(strings.TrimSuffix(selector, "}"), "{")
	sum := 0
	for labels, v := range n.series(t, name) {
		ok := true
		for _, m := range regexp.MustCompile(`([a-z_]+)(=~|!~|!=|=)"([^"]*)"`).FindAllStringSubmatch(matchers, -1) {
			has := regexp.MustCompile(`\b` + m[1] + `="([^"]*)"`).FindStringSubmatch(labels)
			switch {
			case m[1] == "node":
			case has == nil:
				t.Fatalf("%s{%s} has no label %s", name, labels, m[1])
			case strings.HasSuffix(m[2], "~"):
				ok = ok && regexp.MustCompile(`^(?:`+m[3]+`)$`).MatchString(has[1]) == (m[2] == "=~")
			default:
				ok = ok && (m[3] == has[1]) == (m[2] == "=")
			}
		}
		if ok {
			sum += v
		}
	}
	return sum
}

// alertExpr is the expression of an alert of the chart.
func alertExpr(t testing.TB, name string) string {
	t.Helper()
	for _, doc := range strings.Split(string(value(os.ReadFile("../../test/chart/testdata/everything.golden.yaml"))(t)), "\n---\n") {
		var rules struct {
			Kind string
			Spec struct {
				Groups []struct {
					Rules []struct{ Alert, Expr string }
				}
			}
		}
		if !strings.Contains(doc, "kind: PrometheusRule\n") {
			continue
		}
		must(t, yaml.Unmarshal([]byte(doc), &rules))
		for _, g := range rules.Spec.Groups {
			for _, r := range g.Rules {
				if r.Alert == name {
					return r.Expr
				}
			}
		}
	}
	t.Fatalf("no alert %s", name)
	return ""
}

// panelExpr is the expression of a panel of the chart's dashboard.
func panelExpr(t testing.TB, title string) string {
	t.Helper()
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	must(t, json.Unmarshal(value(os.ReadFile("../../charts/kube-smcr/files/dashboard.json"))(t), &dashboard))
	for _, p := range dashboard.Panels {
		if p.Title == title {
			return p.Targets[0].Expr
		}
	}
	t.Fatalf("no panel %q", title)
	return ""
}
