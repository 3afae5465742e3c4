// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/load"
)

func TestParseFlags(t *testing.T) {
	for _, tt := range []struct {
		name, args, err string
	}{
		{"defaults", "", ""},
		{"some", "-rounds 1 -time 100ms -o json -vm x", ""},
		{"all groups", "-groups iwarp,smcr,sdp-siw,sdp-roce,transparent,receivers", ""},
		{"unknown group", "-groups roce", `unknown group "roce", there are smcr, iwarp, sdp-siw, sdp-roce, transparent, receivers`},
		{"guests of another group", "-groups receivers -vm x", "group receivers starts guests of its own"},
		{"no round", "-rounds 0", "want -rounds from 1 to 1000, -time from 1ms to 10s, and no arguments"},
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

func TestListens(t *testing.T) {
	const table = "  sl  local_address rem_address   st tx_queue\n" +
		"   0: 0100007F:1BBC 00000000:0000 0A 00000000:00000000\n" +
		"   1: 0100007F:1BBD 0100007F:0001 01 00000000:00000000\n"
	for _, tt := range []struct {
		name string
		port uint16
		want bool
	}{
		{"listens", 7100, true},
		{"is connected", 7101, false},
		{"is not there", 7102, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := listens(table, tt.port); got != tt.want {
				t.Errorf("listens = %v", got)
			}
		})
	}
}

func TestIterations(t *testing.T) {
	for _, tt := range []struct {
		name  string
		conns int
		speed float64
		want  int
	}{
		{"nothing known", 1, 0, leastIterations},
		{"of one", 1, 100, 50},
		{"of each of 8", 8, 800, 50},
		{"nonsense", 1, 1e12, mostIterations},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := iterations(load.Load{Conns: tt.conns, Duration: 500 * time.Millisecond}, tt.speed, leastIterations); got != tt.want {
				t.Errorf("iterations = %d, want %d", got, tt.want)
			}
		})
	}
}

// What the tools of Debian 12 print.
const (
	writeLat = ` #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 64      200          100.50        900.00       120.25  	       130.00     	61.71		400.00 		900.00
`
	writeBW = ` #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      128              31.41              16.00  		   0.000355
`
	rstreamOut = "name      bytes   xfers   iters   total       time     Gb/sec    usec/xfer\n" +
		"custom    64      1       1k      144k        1.12s      0.00     487.92\n"
	cmtimeOut = `step              total ms     max ms     min us  us / conn
create id    :        0.50       0.05       4.00      16.10
resolve addr :        9.00       8.75    8449.00     453.40
resolve route:        1.00       0.75     426.00      56.40
create qp    :        5.00       2.10      92.00     252.75
connect      :       43.00      42.12   20982.00    2161.65
disconnect   :       21.23       5.64    1178.00    1061.75
destroy      :        0.55       0.18       9.00      27.50
`
)

func TestParse(t *testing.T) {
	echo := load.Load{Kind: load.Echo, SizeBytes: 64, Conns: 1}
	stream := load.Load{Kind: load.Stream, SizeBytes: 64 << 10, Conns: 2}
	for _, tt := range []struct {
		name string
		got  func(out string) (load.Result, error)
		out  string
		want load.Result
	}{
		{"ib_write_lat", func(out string) (load.Result, error) { return parsePerftest(out, echo, 200) }, writeLat, load.Result{
			Ops: 200, Elapsed: 52 * time.Millisecond, P50: 240500 * time.Nanosecond, P99: 800 * time.Microsecond,
		}},
		{"ib_write_bw", func(out string) (load.Result, error) { return parsePerftest(out, stream, 128) }, writeBW, load.Result{
			Ops: 256, Bytes: 16 << 20, Elapsed: time.Second,
		}},
		{"rstream", func(out string) (load.Result, error) { return parseRstream(out, echo, 1150) }, rstreamOut, load.Result{
			Ops: 1150, Elapsed: 1122216 * time.Microsecond, P50: 975840 * time.Nanosecond,
		}},
		{"cmtime", func(out string) (load.Result, error) { return parseCMTime(out, 20) }, cmtimeOut, load.Result{
			Ops: 20, Elapsed: 58500 * time.Microsecond,
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := tt.got(tt.out)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
			if _, err := tt.got("Couldn't connect to 10.0.0.1:7100\n"); err == nil {
				t.Error("no error from a tool that measured nothing")
			}
		})
	}
}

// Each figure of group smcr is held to what was set.
func TestTargets(t *testing.T) {
	var got []string
	s := &settings{}
	for _, j := range s.jobs() {
		for _, f := range j.Figures {
			for _, target := range f.Case.Targets {
				got = append(got, fmt.Sprintf("%s: %s %g of %s", f.Case.Name, target.Path, target.Limit, target.Against))
			}
		}
	}
	want := []string{"64 B round trip, p50: smcr.Conn 1.1 of kernel SMC-R"}
	for _, size := range []int{4, 64, 1024} {
		for _, conns := range []string{"1 connection", "8 connections"} {
			name := fmt.Sprintf("stream of %d KiB writes, %s: ", size, conns)
			want = append(want, name+"smcr.Conn 0.95 of RDMA WRITE", name+"smcr.Conn 1 of kernel SMC-R")
		}
	}
	want = append(want, "opening connections: smcr.Conn 1 of kernel SMC-R")
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// Each figure of group receivers is held to what was set.
func TestCeilingTargets(t *testing.T) {
	var got []string
	for _, j := range (&settings{}).ceilingJobs() {
		for _, f := range j.Figures {
			for _, target := range f.Case.Targets {
				got = append(got, fmt.Sprintf("%s: %s %g of %s", f.Case.Name, target.Path, target.Limit, target.Against))
			}
		}
	}
	want := []string{
		"stream of 64 KiB writes to each: 2 processors 2 receivers 1.2 of 1 processor",
		"round trips of 64 B on 8 connections to each: 2 processors 2 receivers 1.2 of 1 processor",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestIsWanted(t *testing.T) {
	for _, tt := range []struct {
		only, name string
		want       bool
	}{{"", "TCP", true}, {"TCP", "TCP", true}, {"smcr.Conn,TCP", "TCP", true}, {"smcr.Conn", "TCP", false}, {"TCP 2", "TCP", false}} {
		if got := isWanted(tt.only, tt.name); got != tt.want {
			t.Errorf("%q among %q: %v", tt.name, tt.only, got)
		}
	}
}
