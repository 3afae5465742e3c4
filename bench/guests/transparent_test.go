// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// Each figure of group transparent is held to what was set.
func TestTransparentTargets(t *testing.T) {
	var got []string
	s := &settings{}
	for _, j := range s.transparentJobs() {
		for _, f := range j.Figures {
			for _, target := range f.Case.Targets {
				got = append(got, fmt.Sprintf("%s: %s %.2f of %s", f.Case.Name, target.Path, target.Limit, target.Against))
			}
		}
	}
	want := []string{
		"64 B round trip, p50: kernel datapath 0.50 of 2 agents",
		"64 B round trip, p50: kernel datapath 1.11 of AF_SMC",
		"redis, 1 client: kernel datapath 2.50 of 2 agents",
		"redis, 10 clients: kernel datapath 2.50 of 2 agents",
		"stream of 64 KiB writes, 1 connection: kernel datapath 1.00 of 2 agents",
		"stream of 64 KiB writes, 1 connection: kernel datapath 0.90 of AF_SMC",
		"stream of 64 KiB writes, 8 connections: kernel datapath 1.00 of 2 agents",
		"stream of 64 KiB writes, 8 connections: kernel datapath 0.90 of AF_SMC",
		"opening connections: kernel datapath 0.90 of AF_SMC",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// No two pods of the guests have the same address, and none that of a guest.
func TestPodAddresses(t *testing.T) {
	seen := map[string]string{"10.0.0.1": "guest 0", "10.0.0.2": "guest 1"}
	for guest := range 2 {
		for _, k := range podKinds {
			addr := k.addr(guest).String()
			if other := seen[addr]; other != "" {
				t.Errorf("pod %s of guest %d has the address of %s, %s", k, guest, other, addr)
			}
			seen[addr] = fmt.Sprintf("pod %s of guest %d", k, guest)
		}
	}
}

// Every path can be asked for by its name, and all but that of AF_SMC have redis, which does not open it.
func TestPodPaths(t *testing.T) {
	var got []string
	for _, path := range (&podPair{pair: &pair{}}).podPaths() {
		name := path.Name
		if path.Can != nil && !path.Can(load.Load{Kind: redisGets}) {
			name += " without redis"
		}
		if only := (&pair{only: path.Name}).wanted([]engine.Path{path}); len(only) != 1 {
			t.Errorf("-paths does not find %q", path.Name)
		}
		got = append(got, name)
	}
	want := []string{"TCP", "kernel datapath", "2 agents", "AF_SMC without redis", "1 relay", "2 relays"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// Agents take their configuration, and it gives each of their pods its datapath.
func TestConfigOf(t *testing.T) {
	guest := config.Machine{Interfaces: map[string][]netip.Addr{"eth0": {netip.MustParseAddr("10.0.0.1")}}}
	n, err := config.ParseOn(guest, "config.yaml", []byte(configOf("g0")))
	if err != nil {
		t.Fatal(err)
	}
	for k, want := range map[podKind]config.Datapath{kernelPod: config.DatapathKernel, agentPod: config.DatapathAgent} {
		pod := config.Pod{Namespace: "bench", Name: k.String(), Interface: "eth0"}
		if got, overruled := n.DatapathFor(pod); got != want || overruled != "" {
			t.Errorf("datapath of pod %s: %v, %q, want %v", k, got, overruled, want)
		}
	}
}

// What an agent says of its pods and connections is told as the bed waits for it.
func TestAskAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	if _, err := askAgent(t.Context(), socket); !errors.Is(err, agentapi.ErrNotRunning) {
		t.Errorf("without an agent: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	status := agentapi.Status{Accelerating: true, Conns: agentapi.ConnSums{TotalSMCR: 7, TotalTCP: 2}, Reasons: map[agentapi.Code]uint64{agentapi.CodeRendezvous: 2}}
	attachments := agentapi.Attachments{Attachments: []agentapi.Attachment{
		{Pod: "bench/kernel", State: agentapi.StateReady, Datapath: "Kernel"},
		{Pod: "bench/agents", State: agentapi.StateReady},
		{Pod: "bench/other", State: agentapi.StateFailed, Detail: "no device"},
	}}
	answer := func(v any) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if err := json.NewEncoder(w).Encode(v); err != nil {
				t.Error(err)
			}
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc(agentapi.PathStatus, func(w http.ResponseWriter, r *http.Request) { answer(status)(w, r) })
	mux.HandleFunc(agentapi.PathAttachments, answer(attachments))
	s := httptest.Server{Listener: l, Config: &http.Server{Handler: mux}}
	s.Start()
	defer s.Close()
	want := agentState{
		SMCR: 7, TCP: 2, Ready: []string{"bench/agents", "bench/kernel Kernel"},
		Details: []string{"bench/other is failed: no device", "2 connections not on SMC-R: RENDEZVOUS"},
	}
	got, err := askAgent(t.Context(), socket)
	if d := cmp.Diff(want, got.Agent); err != nil || d != "" {
		t.Errorf("%v %s", err, d)
	}
	status.Accelerating = false // its own pods are not ready, whatever their state
	got, err = askAgent(t.Context(), socket)
	if d := cmp.Diff([]string{"bench/kernel Kernel"}, got.Agent.Ready); err != nil || d != "" {
		t.Errorf("%v %s", err, d)
	}
}

func TestParseRedis(t *testing.T) {
	const header = `"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"` + "\n"
	for _, tt := range []struct {
		name, out string
		want      load.Result
		err       string
	}{
		{"as of Debian 12", header + `"GET","400.00","2.400","1.000","2.250","3.000","4.500","6.000"` + "\n", load.Result{
			Ops: 200, Elapsed: 500 * time.Millisecond, P50: 2250 * time.Microsecond, P99: 4500 * time.Microsecond,
		}, ""},
		{"nothing", "", load.Result{}, `told ""`},
		{"no speed", header + `"GET","nan?","2.400","1.000","2.250","3.000","4.500","6.000"` + "\n", load.Result{}, "no speed"},
		{"other words", "Could not connect to Redis\n", load.Result{}, "Could not connect"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseRedis(tt.out, 200)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Fatalf("error %v, want %q", err, tt.err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// What a counter says is judged by what it said before.
func TestCounted(t *testing.T) {
	c := counterOf{guest: 1, pod: kernelPod}
	for _, tt := range []struct {
		name  string
		now   counts
		least uint64
		err   string
	}{
		{"as many", counts{smcr: 13, tcp: 2}, 3, ""},
		{"more, as redis-benchmark has", counts{smcr: 14, tcp: 2}, 3, ""},
		{"too few", counts{smcr: 12, tcp: 2}, 3, "2 connections of 3 or more were on SMC-R, says the kernel in pod kernel of g1"},
		{"one on TCP", counts{smcr: 13, tcp: 3}, 3, "1 connections were TCP"},
		{"none of another path", counts{smcr: 10, tcp: 2}, 0, ""},
		{"one of another path", counts{smcr: 11, tcp: 2}, 0, "1 connections were on SMC-R, says the kernel in pod kernel of g1, of none"},
		{"one of another path on TCP", counts{smcr: 10, tcp: 3}, 0, "1 connections were TCP"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &podPair{seen: map[counterOf]counts{c: {smcr: 10, tcp: 2}}}
			err := p.counted(c, tt.now, tt.least)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if err := p.counted(c, tt.now, 0); err != nil {
				t.Errorf("the next load is judged by the load before: %v", err)
			}
		})
	}
	if got := (counterOf{guest: 0, agent: true}).String(); got != "the agent of g0" {
		t.Errorf("the agent is %q", got)
	}
}
