// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

func TestParseFlags(t *testing.T) {
	for _, tt := range []struct {
		name, args, err string
	}{
		{"defaults", "", ""},
		{"one group", "-groups micro -rounds 1 -time 100ms -o json", ""},
		{"unknown group", "-groups conn,sctp", `unknown group "sctp"`},
		{"too many RNICs", "-rnics 9", "want -rounds from 1 to 1000, -time from 1ms to 10s, -rnics from 1 to 8, and no arguments"},
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

// TestParseFlags_congestion: what is measured has CUBIC, and not what the machine has, unless somebody says so.
func TestParseFlags_congestion(t *testing.T) {
	for args, want := range map[string]string{"": "cubic", "-congestion bbr": "bbr"} {
		s, err := parseFlags(strings.Fields(args))
		if err != nil || s.congestion != want {
			t.Errorf("%q: %q, %v, want %q", args, s.congestion, err, want)
		}
	}
}

// A namespace has the congestion control that is said, whatever the machine has.
func TestNewSpace(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin)
	for _, tt := range []struct{ congestion, err string }{{"reno", ""}, {"carrier-pigeon", "carrier-pigeon"}} {
		done := make(chan struct{})
		var got []byte
		var err error
		go func() {
			defer close(done)
			runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
			var s *space
			if s, err = newSpace("test", tt.congestion); err != nil {
				return
			}
			err = errors.Join(s.do(func() (err error) {
				got, err = os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
				return err
			}), s.close())
		}()
		<-done
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: error %v", tt.congestion, err)
			}
			continue
		}
		if err != nil || strings.TrimSpace(string(got)) != tt.congestion {
			t.Errorf("%s: %q, %v", tt.congestion, got, err)
		}
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
	want := []report.Micro{
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
