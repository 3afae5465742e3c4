// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/smcr-io/kube-smcr/bench/report"
)

const module = "github.com/smcr-io/kube-smcr/"

// microPackages are the codecs and the data path, from the wire upwards.
var microPackages = []string{
	"pkg/rdma/rocev2", "pkg/rdma/soft", "pkg/rdma/iwarp", "pkg/rdma/softiwarp", "pkg/rdma/vitcp", "pkg/rdma/softvi",
	"pkg/smcr/clc", "pkg/smcr/llc", "pkg/smcr/cdc", "pkg/smcr/linkgroup", "pkg/smcr",
}

// micro runs the packages' own benchmarks.
func (b *bench) micro(ctx context.Context) error {
	args := []string{"test", "-run=^$", "-bench=.", "-benchmem", "-benchtime=" + (b.Duration / 4).String()}
	for _, p := range microPackages {
		args = append(args, module+p)
	}
	b.Logf("the benchmarks of the packages")
	cmd := exec.CommandContext(ctx, "go", args...)
	// go test ends the test when it is interrupted, not when it is killed.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = killGrace
	out, err := cmd.CombinedOutput()
	b.Report.Micro = parseBenchmarks(string(out))
	switch {
	case err != nil:
		return fmt.Errorf("go test -bench: %w: %s", err, complaints(string(out)))
	case len(b.Report.Micro) == 0:
		return fmt.Errorf("go test -bench gave no figures: %s", out)
	}
	return nil
}

// complaints are the lines that are neither figures nor good news.
func complaints(out string) string {
	var s strings.Builder
	for line := range strings.Lines(out) {
		head, _, _ := strings.Cut(line, " ")
		if _, good := parseBenchmark(line); good || slices.Contains([]string{"goos:", "goarch:", "pkg:", "cpu:", "PASS\n"}, head) || strings.HasPrefix(line, "ok ") {
			continue
		}
		s.WriteString(line)
	}
	return s.String()
}

// parseBenchmarks reads the output of go test -bench -benchmem.
func parseBenchmarks(out string) []report.Micro {
	var all []report.Micro
	pkg := ""
	for line := range strings.Lines(out) {
		if p, ok := strings.CutPrefix(line, "pkg: "); ok {
			pkg = strings.TrimPrefix(strings.TrimSpace(p), module)
			continue
		}
		if m, ok := parseBenchmark(line); ok {
			m.Package = pkg
			// Plain TCP is there to compare with, and the device of
			// Conn_pingPong is a test double that copies what is posted.
			m.Judged = !strings.Contains(m.Name, "/tcp") && m.Name != "Conn_pingPong"
			m.NoAllocs = m.Allocs == 0
			all = append(all, m)
		}
	}
	return all
}

// parseBenchmark reads one line: name, iterations, then pairs of value and
// unit.
func parseBenchmark(line string) (report.Micro, bool) {
	f := strings.Fields(line)
	if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
		return report.Micro{}, false
	}
	n, err := strconv.Atoi(f[1])
	if err != nil {
		return report.Micro{}, false
	}
	m := report.Micro{Name: strings.TrimPrefix(f[0], "Benchmark"), Iteration: n}
	if i := strings.LastIndexByte(m.Name, '-'); i > 0 { // GOMAXPROCS
		if _, err := strconv.Atoi(m.Name[i+1:]); err == nil {
			m.Name = m.Name[:i]
		}
	}
	for i := 2; i+1 < len(f); i += 2 {
		v, err := strconv.ParseFloat(f[i], 64)
		if err != nil {
			return report.Micro{}, false
		}
		switch f[i+1] {
		case "ns/op":
			m.Nanos = v
		case "MB/s":
			m.MBPerSec = v
		case "B/op":
			m.Bytes = v
		case "allocs/op":
			m.Allocs = v
		}
	}
	return m, true
}
