// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// Each figure is held to what was set for its path MTU, its connections and its kind.
func TestTargets(t *testing.T) {
	e, err := engine.New("test", engine.Settings{Rounds: 1, Duration: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{e, 1}
	for _, tt := range []struct {
		name string
		jobs []engine.Job
		want []string
	}{
		{"conn, MTU 1500", b.connJobs(1500), []string{
			"MTU 1500: stream of 64 KiB writes, 1 connection: smcr.Conn 0.95 of TCP", "MTU 1500: stream of 64 KiB writes, 1 connection: smcr.Conn 30 UDP sends",
			"MTU 1500: stream of 64 KiB writes, 8 connections: smcr.Conn 0.85 of TCP", "MTU 1500: stream of 64 KiB writes, 8 connections: smcr.Conn 30 UDP sends",
			"MTU 1500: stream of 1024 KiB writes, 1 connection: smcr.Conn 0.95 of TCP", "MTU 1500: stream of 1024 KiB writes, 1 connection: smcr.Conn 30 UDP sends",
			"MTU 1500: stream of 1024 KiB writes, 8 connections: smcr.Conn 0.85 of TCP", "MTU 1500: stream of 1024 KiB writes, 8 connections: smcr.Conn 30 UDP sends",
		}},
		{"conn, MTU 9000", b.connJobs(9000), []string{
			"MTU 9000: stream of 64 KiB writes, 1 connection: smcr.Conn 1.4 of TCP", "MTU 9000: stream of 64 KiB writes, 1 connection: smcr.Conn 25 UDP sends",
			"MTU 9000: stream of 64 KiB writes, 8 connections: smcr.Conn 1.05 of TCP", "MTU 9000: stream of 64 KiB writes, 8 connections: smcr.Conn 25 UDP sends",
			"MTU 9000: stream of 1024 KiB writes, 1 connection: smcr.Conn 1.4 of TCP", "MTU 9000: stream of 1024 KiB writes, 1 connection: smcr.Conn 25 UDP sends",
			"MTU 9000: stream of 1024 KiB writes, 8 connections: smcr.Conn 1.05 of TCP", "MTU 9000: stream of 1024 KiB writes, 8 connections: smcr.Conn 25 UDP sends",
		}},
		{"path", b.pathJobs(), []string{
			"64 B round trip, p50: SMC-R, 2 agents 1 of haproxy",
			"stream of 64 KiB writes, 1 connection: SMC-R, 2 agents 1.2 of haproxy", "stream of 64 KiB writes, 8 connections: SMC-R, 2 agents 1 of haproxy",
			"stream of 1024 KiB writes, 1 connection: SMC-R, 2 agents 1.2 of haproxy", "stream of 1024 KiB writes, 8 connections: SMC-R, 2 agents 1 of haproxy",
		}},
		{"setup", b.setupJobs("g", pathTCP, nil, connRate()), []string{"8 at a time: smcr.Conn 0.6 of TCP"}},
		{"setup between pods", b.setupJobs("g", pathTCP, nil, podsRate()), []string{"8 at a time: SMC-R, 2 agents 0.35 of TCP"}},
		{"beside idle ones", b.besideJobs("g", "few", []string{"many"}), []string{
			"64 B round trip, p50: many 1.1 of few", "to the first byte back, p50: many 1.1 of few",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, targetsOf(tt.jobs)); d != "" {
				t.Error(d)
			}
		})
	}
}

// targetsOf tells the targets of all figures.
func targetsOf(jobs []engine.Job) (all []string) {
	for _, j := range jobs {
		for _, f := range j.Figures {
			for _, t := range f.Case.Targets {
				all = append(all, fmt.Sprintf("%s: %s %g %s", f.Case.Name, t.Path, t.Limit, of(t)))
			}
		}
	}
	return all
}

func of(t report.Target) string {
	if t.Cost != "" {
		return string(t.Cost)
	}
	return "of " + t.Against
}

func TestIdleMemory(t *testing.T) {
	want := []report.Target{{Path: "many", Limit: 16}} // of both sides together
	if d := cmp.Diff(want, idleMemory("many")); d != "" {
		t.Error(d)
	}
}

func TestMetric(t *testing.T) {
	const text = "# TYPE go_goroutines gauge\ngo_goroutines 42\ngo_goroutines_more 7\nbad x\n"
	for _, tt := range []struct {
		name string
		want float64
		ok   bool
	}{
		{"go_goroutines", 42, true},
		{"go_threads", 0, false},
		{"bad", 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := metric(text, tt.name); got != tt.want || (err == nil) != tt.ok {
				t.Errorf("metric = %v, %v", got, err)
			}
		})
	}
}
