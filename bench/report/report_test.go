// SPDX-License-Identifier: Apache-2.0

package report

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSpreadOf(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []float64
		want   Spread
	}{
		{"nothing", nil, Spread{}},
		{"one", []float64{3}, Spread{3, 3, 3}},
		{"odd, not sorted", []float64{5, 1, 3}, Spread{3, 1, 5}},
		{"even", []float64{4, 1, 2, 10}, Spread{3, 1, 10}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			before := append([]float64(nil), tt.values...)
			if d := cmp.Diff(tt.want, SpreadOf(tt.values)); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff(before, tt.values); d != "" {
				t.Error("the rounds lost their order:", d)
			}
		})
	}
}

func TestRatios(t *testing.T) {
	got := ratios([]float64{2, 9, 0, 4, 5}, []float64{1, 3, 2, 0})
	if d := cmp.Diff([]float64{2, 3}, got); d != "" {
		t.Error(d)
	}
}

func TestQuantile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100 - i)
	}
	for _, tt := range []struct {
		name string
		d    []time.Duration
		q    float64
		want time.Duration
	}{
		{"nothing", nil, 0.5, 0},
		{"one", []time.Duration{7}, 0.99, 7},
		{"smallest", hundred, 0, 1},
		{"median", hundred, 0.5, 50},
		{"p99", hundred, 0.99, 99},
		{"largest", hundred, 1, 100},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := Quantile(tt.d, tt.q); got != tt.want {
				t.Errorf("quantile(%v) = %d, want %d", tt.q, got, tt.want)
			}
		})
	}
}

func TestCase_Judge(t *testing.T) {
	for _, tt := range []struct {
		name    string
		lower   bool
		limit   float64
		values  []float64
		reached bool
	}{
		{"throughput above", false, 0.5, []float64{6, 4, 9}, true},
		{"throughput at the limit", false, 0.5, []float64{5, 5, 5}, true},
		{"throughput below", false, 0.5, []float64{6, 4, 4}, false},
		{"latency below", true, 1, []float64{9, 12, 10}, true},
		{"latency above", true, 1, []float64{11, 9, 12}, false},
		{"never measured", true, 1, nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &Case{Lower: tt.lower, Base: "base", Targets: []Target{{Path: "ours", Against: "base", Limit: tt.limit}}}
			for range 3 {
				c.Add("base", 10, 0.4, Cost{})
			}
			for _, v := range tt.values {
				c.Add("ours", v, 0.4, Cost{})
			}
			c.Judge()
			if got := c.Targets[0].Reached; got != tt.reached {
				t.Errorf("reached %v, want %v: %+v", got, tt.reached, c.Targets[0])
			}
		})
	}
}

// A target without another path is for the value itself, and one of a cost for the cost, of which less is
// always better.
func TestCase_Judge_absolute(t *testing.T) {
	value := Target{Path: "ours", Limit: 8}
	sends := Target{Path: "ours", Cost: UDPSends, Limit: 25}
	counted := func(n float64) Cost { return Cost{Per: "MiB", Counted: true, UDPSends: n} }
	for _, tt := range []struct {
		name   string
		lower  bool
		unit   string
		target Target
		values []float64
		costs  []Cost
		want   string
	}{
		{"few", true, "KiB", value, []float64{9, 7, 6}, []Cost{{}, {}, {}}, "reached: at most 8.00 KiB, is 7.00 (6.00 to 9.00)"},
		{"too many", true, "KiB", value, []float64{29}, []Cost{{}}, "not reached: at most 8.00 KiB, is 29.0 (29.0 to 29.0)"},
		{"fast", false, "Gbit/s", value, []float64{8}, []Cost{{}}, "reached: at least 8.00 Gbit/s, is 8.00 (8.00 to 8.00)"},
		{"slow", false, "Gbit/s", value, []float64{7}, []Cost{{}}, "not reached: at least 8.00 Gbit/s, is 7.00 (7.00 to 7.00)"},
		{"none", true, "", Target{Path: "ours"}, []float64{0}, []Cost{{}}, "reached: at most 0, is 0 (0 to 0)"},
		{"never measured", true, "KiB", value, nil, nil, "not reached: at most 8.00 KiB, is 0 (0 to 0)"},
		{
			"few sends", false, "Gbit/s", sends,
			[]float64{10, 12, 11},
			[]Cost{counted(30), counted(20), counted(24)},
			"reached: at most 25.0 UDP sends, is 24.0 (20.0 to 30.0)",
		},
		{"many sends", false, "Gbit/s", sends, []float64{10}, []Cost{counted(31)}, "not reached: at most 25.0 UDP sends, is 31.0 (31.0 to 31.0)"},
		{"sends that nobody counted", false, "Gbit/s", sends, []float64{10}, []Cost{{Per: "MiB"}}, "not reached: at most 25.0 UDP sends, is 0 (0 to 0)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &Case{Unit: tt.unit, Lower: tt.lower, Base: "ours", Targets: []Target{tt.target}}
			for i, v := range tt.values {
				c.Add("ours", v, 0.4, tt.costs[i])
			}
			c.Judge()
			if got := c.text(&c.Targets[0]); got != tt.want {
				t.Errorf("it is\n%s, want\n%s", got, tt.want)
			}
		})
	}
}

func TestCPUModel(t *testing.T) {
	if got := cpuModel("processor\t: 0\nmodel name\t: Some CPU 3000\nmodel name\t: Some CPU 3000\n"); got != "Some CPU 3000" {
		t.Errorf("got %q", got)
	}
}

func TestReport_WriteTable(t *testing.T) {
	c := &Case{
		Group: "group", Name: "stream", Unit: "Gbit/s", Base: "TCP",
		Targets: []Target{{Path: "smcr.Conn", Against: "TCP", Limit: 0.5}},
	}
	for _, v := range []float64{10, 20, 16} {
		c.Add("TCP", v, 0.4, Cost{Per: "MiB", Counted: true, CPUMicros: 100, Switches: 2.5, TCPSends: 16})
		c.Add("smcr.Conn", v/4+1, 0.4, Cost{Per: "MiB", Counted: true, CPUMicros: v * 30, UDPSends: 20, TCPSends: 1})
	}
	c.Judge()
	r := &Report{
		CPU: "some CPU", Cores: 2, MaxProcs: 2, Kernel: "6.1", Go: "go1.26", Congestion: "cubic", Rounds: 3, Seconds: 0.4,
		Cases: []*Case{c},
		Micro: []Micro{
			{Package: "cdc", Name: "Parse", Nanos: 3.25, Judged: true, NoAllocs: true},
			{Package: "soft", Name: "Open", Nanos: 32512, Allocs: 3, Bytes: 99, Judged: true},
		},
	}
	var out strings.Builder
	if err := r.WriteTable(&out); err != nil {
		t.Fatal(err)
	}
	var got []string // fields, since the widths of columns are not the point
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	want := []string{
		"some CPU, 2 cores, GOMAXPROCS 2, Linux 6.1, go1.26, TCP with cubic; 3 rounds of 0.4 s",
		"",
		"group",
		"measurement path median unit ratio to TCP cost of the path target",
		"stream TCP 16.0 Gbit/s CPU 100 us, 2.50 switches, 0 UDP sends per MiB",
		"smcr.Conn 5.00 0.31 (0.30 to 0.35) CPU 480 us, 0 switches, 20.0 UDP sends per MiB not reached: at least 0.50 of TCP, is 0.31 (0.30 to 0.35)",
		"",
		"codecs and data path: go test -bench",
		"package benchmark ns/op MB/s B/op allocs/op target",
		"cdc Parse 3.25 0 0 reached: no allocation",
		"soft Open 32512 99.0 3.00 not reached: no allocation",
		"",
		"targets: 1 of 3 reached",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
