// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
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
			if d := cmp.Diff(tt.want, spreadOf(tt.values)); d != "" {
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
			if got := quantile(tt.d, tt.q); got != tt.want {
				t.Errorf("quantile(%v) = %d, want %d", tt.q, got, tt.want)
			}
		})
	}
}

func TestCase_judge(t *testing.T) {
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
				c.add("base", 10, 0.4, Cost{})
			}
			for _, v := range tt.values {
				c.add("ours", v, 0.4, Cost{})
			}
			c.judge()
			if got := c.Targets[0].Reached; got != tt.reached {
				t.Errorf("reached %v, want %v: %+v", got, tt.reached, c.Targets[0])
			}
		})
	}
}

func TestReport_writeTable(t *testing.T) {
	c := &Case{
		Group: "group", Name: "stream", Unit: "Gbit/s", Base: "TCP",
		Targets: []Target{{Path: "smcr.Conn", Against: "TCP", Limit: 0.5}},
	}
	for _, v := range []float64{10, 20, 16} {
		c.add("TCP", v, 0.4, Cost{Per: "MiB", CPUMicros: 100, Switches: 2.5, TCPSends: 16})
		c.add("smcr.Conn", v/4+1, 0.4, Cost{Per: "MiB", CPUMicros: v * 30, UDPSends: 20, TCPSends: 1})
	}
	c.judge()
	r := &Report{
		CPU: "some CPU", Cores: 2, MaxProcs: 2, Kernel: "6.1", Go: "go1.26", Rounds: 3, Seconds: 0.4,
		Cases: []*Case{c},
		Micro: []Micro{
			{Package: "cdc", Name: "Parse", Nanos: 3.25, Judged: true, NoAllocs: true},
			{Package: "soft", Name: "Open", Nanos: 32512, Allocs: 3, Bytes: 99, Judged: true},
		},
	}
	var out strings.Builder
	if err := r.writeTable(&out); err != nil {
		t.Fatal(err)
	}
	var got []string // fields, since the widths of columns are not the point
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	want := []string{
		"some CPU, 2 cores, GOMAXPROCS 2, Linux 6.1, go1.26; 3 rounds of 0.4 s",
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

func TestParseFlags(t *testing.T) {
	for _, tt := range []struct {
		name, args, err string
	}{
		{"defaults", "", ""},
		{"one group", "-groups micro -rounds 1 -time 100ms -o json", ""},
		{"unknown group", "-groups conn,sctp", `unknown group "sctp"`},
		{"unknown output", "-o xml", `unknown output "xml"`},
		{"no round", "-rounds 0", "-rounds from 1"},
		{"too long", "-time 1h", "-time from 1ms"},
		{"argument", "conn", "no arguments"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parseFlags(strings.Fields(tt.args))
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
		})
	}
}

func TestCPUModel(t *testing.T) {
	if got := cpuModel("processor\t: 0\nmodel name\t: Some CPU 3000\nmodel name\t: Some CPU 3000\n"); got != "Some CPU 3000" {
		t.Errorf("got %q", got)
	}
}

func TestSwitches(t *testing.T) {
	const status = "Name:\tx\nvoluntary_ctxt_switches:\t40\nnonvoluntary_ctxt_switches:\t2\n"
	if got := switches(status); got != 42 {
		t.Errorf("got %d, want 42", got)
	}
}

func TestSNMPCounter(t *testing.T) {
	const snmp = "Udp: InDatagrams NoPorts InErrors OutDatagrams\nUdp: 1 2 3 4\nUdpLite: InDatagrams OutDatagrams\nUdpLite: 8 9\n"
	for _, tt := range []struct {
		name, protocol, counter string
		want                    int64
	}{
		{"there", "Udp", "OutDatagrams", 4},
		{"of the protocol whose name begins alike", "UdpLite", "OutDatagrams", 9},
		{"no such counter", "Udp", "OutSegs", 0},
		{"no such protocol", "Tcp", "OutSegs", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := snmpCounter(snmp, tt.protocol, tt.counter); got != tt.want {
				t.Errorf("got %d, want %d", got, tt.want)
			}
		})
	}
}

func TestParseBenchmarks(t *testing.T) {
	const out = `goos: linux
pkg: github.com/smcr-io/kube-smcr/pkg/smcr/cdc
cpu: Some CPU
BenchmarkParse-2             	  316	        37.25 ns/op	       0 B/op	       0 allocs/op
BenchmarkNoise
    cdc_test.go:1: something
ok  	github.com/smcr-io/kube-smcr/pkg/smcr/cdc	0.1s
pkg: github.com/smcr-io/kube-smcr/pkg/smcr
BenchmarkSoft_stream/tcp-2   	 1000	     50000 ns/op	1310.72 MB/s	       3 B/op	       1 allocs/op
BenchmarkSoft_stream/smcr-mtu1024 	 1000	     60000 ns/op	1092.27 MB/s	     600 B/op	       2 allocs/op
`
	want := []Micro{
		{Package: "pkg/smcr/cdc", Name: "Parse", Nanos: 37.25, Judged: true, NoAllocs: true, Iteration: 316},
		{Package: "pkg/smcr", Name: "Soft_stream/tcp", Nanos: 50000, MBPerSec: 1310.72, Bytes: 3, Allocs: 1, Iteration: 1000},
		{Package: "pkg/smcr", Name: "Soft_stream/smcr-mtu1024", Nanos: 60000, MBPerSec: 1092.27, Bytes: 600, Allocs: 2, Judged: true, Iteration: 1000},
	}
	if d := cmp.Diff(want, parseBenchmarks(out)); d != "" {
		t.Error(d)
	}
	if got, want := complaints(out), "BenchmarkNoise\n    cdc_test.go:1: something\n"; got != want {
		t.Errorf("complaints are %q, want %q", got, want)
	}
}

func TestStatusBytes(t *testing.T) {
	const status = "Name:\tx\nVmHWM:\t  12 kB\nVmRSS:\t    2048 kB\n"
	for _, tt := range []struct {
		name, status string
		want         int64
	}{
		{"resident", status, 2 << 20},
		{"ended", "", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := statusBytes(tt.status, "VmRSS"); got != tt.want {
				t.Errorf("statusBytes = %d, want %d", got, tt.want)
			}
		})
	}
}

// What a table of scale says of each level has to be there in whatever order
// the levels report it.
func TestBench_figure(t *testing.T) {
	b := &bench{report: &Report{}}
	b.figure("g", "size", "KiB", "few", "few", 2)
	b.figure("g", "time", "us", "few", "few", 5)
	b.figure("g", "size", "KiB", "few", "many", 6)
	var got []string
	for _, c := range b.report.Cases {
		c.judge()
		for _, s := range c.Series {
			got = append(got, fmt.Sprintf("%s/%s %g %g", c.Name, s.Path, s.Spread.Median, s.Ratio.Median))
		}
	}
	if d := cmp.Diff([]string{"size/few 2 1", "size/many 6 3", "time/few 5 1"}, got); d != "" {
		t.Error(d)
	}
}
