// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

func TestTable(t *testing.T) {
	got := table([]Row{
		{
			Application: "nginx + curl, 512 MiB", Conns: 1, OnSMCR: 1, ByRDMA: 512<<20 + 400, ByTCP: 1020,
			Rate: Rate{400 << 20, unitBytes}, Plain: Rate{800 << 20, unitBytes}, Ratio: 0.5,
		},
		{
			Application: "redis-benchmark, 20 clients", Conns: 41, OnSMCR: 41, ByRDMA: 204 << 20, ByTCP: 42000,
			Rate: Rate{11215.3, unitRequests}, Plain: Rate{21079, unitRequests}, Ratio: 0.532,
		},
	})
	want := strings.TrimPrefix(`
APPLICATION                  CONNECTIONS  ON SMC-R  BY RDMA  BY TCP    THROUGHPUT        WITHOUT SMC-R     RATIO
nginx + curl, 512 MiB        1            1         512 MiB  1020 B    400 MiB/s         800 MiB/s         0.50
redis-benchmark, 20 clients  41           41        204 MiB  41.0 KiB  11215 requests/s  21079 requests/s  0.53
`, "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestByteCount(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1188: "1.16 KiB", 41984: "41 KiB", 42000: "41.0 KiB",
		1 << 20: "1 MiB", 1023 << 10: "1.00 MiB", 512 << 20: "512 MiB", 2 << 30: "2 GiB", 1<<64 - 1: "16 EiB",
	} {
		if got := byteCount(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestUsed(t *testing.T) {
	before := counters{opens: 10, podBytes: 1000, underlay: 100}
	after := counters{opens: 10 + 2*5 + 1, podBytes: 6000, underlay: 9100, agents: [2]agentapi.ConnSums{
		{TotalSMCR: 4, TotalTCP: 1, BytesSMCR: 8000}, {TotalSMCR: 4},
	}}
	// Six connections of the application: four on SMC-R, one that fell back,
	// one that was not diverted.
	want := usage{conns: 6, onSMCR: 4, atServer: 4, byRDMA: 8000, byTCP: 5000, underlay: 9000}
	if got := used(before, after); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// checks is an audience that remembers the statements.
type checks []Check

func (c *checks) Progress(string)  {}
func (c *checks) Show(string)      {}
func (c *checks) Check(said Check) { *c = append(*c, said) }

func (c *checks) failed() []Check {
	return slices.DeleteFunc(slices.Clone(*c), func(said Check) bool { return said.OK })
}

func TestJudge(t *testing.T) {
	good := usage{conns: 2, onSMCR: 2, atServer: 2, byRDMA: 1000, byTCP: 2000, underlay: 1500}
	for _, tc := range []struct {
		name   string
		change func(*outcome, *usage)
		failed int
	}{
		{"good", func(*outcome, *usage) {}, 0},
		{"one not on SMC-R", func(_ *outcome, u *usage) { u.onSMCR = 1 }, 1},
		{"none at all", func(_ *outcome, u *usage) { u.conns, u.onSMCR, u.atServer = 0, 0, 0 }, 1},
		{"the server's agent saw fewer", func(_ *outcome, u *usage) { u.atServer = 1 }, 1},
		{"less by RDMA than the application moved", func(o *outcome, _ *usage) { o.bytes = 1001 }, 1},
		{"less on the underlay than the agent says", func(_ *outcome, u *usage) { u.underlay = 999 }, 1},
		{"much by TCP", func(_ *outcome, u *usage) { u.byTCP = 1 << 20 }, 1},
		{"wrong content", func(o *outcome, _ *usage) { o.wrong = "checksum" }, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o, u := outcome{bytes: 1000}, good
			tc.change(&o, &u)
			var told checks
			NewApplications(Config{}, &told).judge("app", o, u)
			if failed := told.failed(); len(failed) != tc.failed {
				t.Errorf("%+v, want %d", failed, tc.failed)
			}
		})
	}
}
