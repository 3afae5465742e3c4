// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"fmt"
	"strings"
	"testing"
)

// recorder is a testing.TB that records how Need ended the test.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper() {}

func (r *recorder) Skipf(format string, args ...any) {
	r.skipped = fmt.Sprintf(format, args...)
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failed = fmt.Sprintf(format, args...)
	panic(r)
}

// need runs Need against a recorder.
func need(t *testing.T, reqs ...Requirement) (r *recorder) {
	r = &recorder{TB: t}
	defer func() {
		if v := recover(); v != nil && v != any(r) {
			panic(v)
		}
	}()
	Need(r, reqs...)
	return r
}

func TestNeed(t *testing.T) {
	missing := Program("no-such-program-of-kube-smcr")
	tests := []struct {
		name, env string
		reqs      []Requirement
		skip      bool
		fail      bool
	}{
		{name: "nothing needed"},
		{name: "met", reqs: []Requirement{Program("go")}, env: "all"},
		{name: "unmet", reqs: []Requirement{missing}, skip: true},
		{name: "unmet and another one is required", reqs: []Requirement{missing}, env: "root,bpf", skip: true},
		{name: "unmet and required", reqs: []Requirement{missing}, env: "root, " + string(missing), fail: true},
		{name: "unmet and all required", reqs: []Requirement{missing}, env: "all", fail: true},
		{name: "unknown", reqs: []Requirement{"no such requirement"}, env: "ALL", fail: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(RequireEnv, tt.env)
			r := need(t, tt.reqs...)
			if got := r.skipped != ""; got != tt.skip {
				t.Errorf("skipped with %q, want a skip: %v", r.skipped, tt.skip)
			}
			if got := r.failed != ""; got != tt.fail {
				t.Errorf("failed with %q, want a failure: %v", r.failed, tt.fail)
			}
			if s := r.skipped + r.failed; s != "" && !strings.Contains(s, string(tt.reqs[0])) {
				t.Errorf("%q does not name the requirement %q", s, tt.reqs[0])
			}
		})
	}
}

func TestEffectiveCaps(t *testing.T) {
	tests := []struct {
		name, status string
		want         uint64
		wantErr      bool
	}{
		{name: "found", status: "Name:\tx\nCapPrm:\t0000000000000001\nCapEff:\t0000008000201000\n", want: 1<<capBPF | 1<<capSysAdmin | 1<<capNetAdmin},
		{name: "absent", status: "Name:\tx\n", wantErr: true},
		{name: "junk", status: "CapEff:\tzz\n", wantErr: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := effectiveCaps(tt.status)
			if (err != nil) != tt.wantErr || got != tt.want {
				t.Errorf("effectiveCaps() = %#x, %v; want %#x, error %v", got, err, tt.want, tt.wantErr)
			}
		})
	}
}

// TestChecks runs every check once: none may panic or hang, whatever the
// machine is.
func TestChecks(t *testing.T) {
	for _, r := range []Requirement{Root, NetAdmin, BPF, Nftables, ClusterTools, VM, InGuest, Tshark, Program("sh")} {
		t.Logf("%s: %v", r, r.check())
	}
}
