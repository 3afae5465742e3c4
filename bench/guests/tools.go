// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
)

// Ports of the tools' servers; rstream takes 8.
const (
	portPerftest = 7100
	portCM       = 7101
	portRstream  = 7110
)

// tools is the [engine.Peers] of programs that come with what they measure. They are
// told how often to repeat, and not for how long.
type tools struct {
	*pair
	// run makes a load; speed is that of the load before, 0 for the first.
	run    func(ctx context.Context, l load.Load, speed float64) (load.Result, error)
	speeds map[load.Load]float64 // operations per second of the last run; the loads without their duration
}

func (p *pair) tools(run func(context.Context, load.Load, float64) (load.Result, error)) *tools {
	return &tools{p, run, map[load.Load]float64{}}
}

// Start does nothing: each load starts its programs.
func (*tools) Start(context.Context, load.Load) error { return nil }

// Run makes the load, as often as the load before fits into the duration.
func (t *tools) Run(ctx context.Context, l load.Load) (load.Result, error) {
	key := l
	key.Duration = 0
	r, err := t.run(ctx, l, t.speeds[key])
	if err == nil {
		t.speeds[key] = engine.OpsPerSecond(r)
	}
	return r, err
}

// Check does nothing: what a tool uses is its name.
func (*tools) Check(context.Context, load.Load, load.Result) error { return nil }

// iterations is how often a tool shall repeat, to take the load's time.
func iterations(l load.Load, speed float64, least int) int {
	n := int(speed * l.Duration.Seconds() / float64(max(l.Conns, 1)))
	return min(max(n, least), mostIterations)
}

// perftest measures the device itself.
func (p *pair) perftest(ctx context.Context, l load.Load, speed float64) (load.Result, error) {
	n := iterations(l, speed, leastIterations)
	if l.Kind == load.Setup {
		out, err := p.tool(ctx, byCM, portCM, []string{"cmtime", "-p", strconv.Itoa(portCM)}, []string{"-c", strconv.Itoa(n), "-s"})
		if err != nil {
			return load.Result{}, err
		}
		return parseCMTime(out, n)
	}
	name := "ib_write_bw"
	if l.Kind == load.Echo {
		name = "ib_write_lat"
	}
	return p.runPerftest(ctx, name, l, n)
}

// perftestRead measures the device's READs.
func (p *pair) perftestRead(ctx context.Context, l load.Load, speed float64) (load.Result, error) {
	return p.runPerftest(ctx, "ib_read_bw", l, iterations(l, speed, leastIterations))
}

// runPerftest runs a program of perftest.
func (p *pair) runPerftest(ctx context.Context, name string, l load.Load, n int) (load.Result, error) {
	args := []string{
		name, "-F", "-d", device, "-x", strconv.Itoa(p.gidIndex), "-p", strconv.Itoa(portPerftest),
		"-s", strconv.Itoa(l.SizeBytes), "-n", strconv.Itoa(n),
	}
	if l.Kind == load.Stream {
		args = append(args, "-q", strconv.Itoa(l.Conns))
	}
	out, err := p.tool(ctx, byTCP, portPerftest, args, nil)
	if err != nil {
		return load.Result{}, err
	}
	return parsePerftest(out, l, n)
}

// Ways by which a tool's client meets its server.
const (
	byTCP = false
	byCM  = true // rdma_cm
)

// tool runs a tool as the server, and with more arguments and the server's
// address as the client, whose output it returns.
func (p *pair) tool(ctx context.Context, cm bool, port int, server, client []string) (out string, err error) {
	for range toolTries {
		began := time.Now()
		if out, err = p.tryTool(ctx, cm, port, server, client); err == nil || ctx.Err() != nil || time.Since(began) >= toolLimit {
			return out, err
		}
	}
	return out, err
}

func (p *pair) tryTool(ctx context.Context, cm bool, port int, server, client []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, toolLimit)
	defer cancel()
	s, err := p.lab.Guest(0).Start(ctx, server...)
	if err != nil {
		return "", err
	}
	defer func() {
		_ = s.Signal(unix.SIGKILL) // it may have ended
		_ = s.Wait()
	}()
	_ = s.Stdin.Close()
	if cm {
		err = p.awaitCM(ctx, port)
	} else {
		_, err = p.server.call(request{Op: opAwait, Addr: strconv.Itoa(port)})
	}
	if err != nil {
		return "", err
	}
	return p.lab.Guest(1).Run(ctx, append(slices.Concat(server, client), p.lab.Guest(0).Addr(0).String())...)
}

// awaitCM waits until a server of rdma_cm listens.
func (p *pair) awaitCM(ctx context.Context, port int) error {
	tick := time.NewTicker(rdmaPoll)
	defer tick.Stop()
	for {
		out, err := p.lab.Guest(0).Run(ctx, "rdma", "resource", "show", "cm_id")
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			if strings.Contains(line, "state LISTEN") && strings.HasSuffix(strings.TrimSpace(line), ":"+strconv.Itoa(port)) {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("nobody listens with rdma_cm on port %d: %w", port, ctx.Err())
		case <-tick.C: // polls the listeners
		}
	}
}

// rstream measures rsockets: one process for each connection.
func (p *pair) rstream(ctx context.Context, l load.Load, speed float64) (load.Result, error) {
	n := iterations(l, speed, 1)
	repeat := []string{"-I", "1", "-C", strconv.Itoa(n)} // one way, then the other
	if l.Kind == load.Echo {
		repeat = []string{"-I", strconv.Itoa(n), "-C", "1"}
	}
	results := make([]load.Result, max(l.Conns, 1))
	errs := make([]error, len(results))
	var wg sync.WaitGroup
	for i := range results {
		wg.Go(func() {
			server := []string{"rstream", "-T", "b", "-p", strconv.Itoa(portRstream + i)}
			out, err := p.tool(ctx, byCM, portRstream+i, server, slices.Concat(repeat, []string{"-S", strconv.Itoa(l.SizeBytes), "-s"}))
			if err == nil {
				results[i], err = parseRstream(out, l, n)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	var sum load.Result
	for _, r := range results {
		sum.Ops += r.Ops
		sum.Bytes += r.Bytes
		sum.Elapsed = max(sum.Elapsed, r.Elapsed)
		sum.P50 = r.P50
	}
	return sum, errors.Join(errs...)
}

// row returns the numbers of the line that begins with these words.
func row(out string, words ...string) ([]float64, error) {
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) <= len(words) || !slices.Equal(f[:len(words)], words) {
			continue
		}
		var numbers []float64
		for _, s := range f[len(words):] {
			if v, err := strconv.ParseFloat(s, 64); err == nil {
				numbers = append(numbers, v)
			}
		}
		return numbers, nil
	}
	return nil, fmt.Errorf("no line that begins with %q in: %s", strings.Join(words, " "), out)
}

func duration(micros float64) time.Duration {
	return time.Duration(micros * float64(time.Microsecond))
}

// parsePerftest reads the result of ib_write_lat, ib_write_bw or ib_read_bw.
func parsePerftest(out string, l load.Load, n int) (load.Result, error) {
	v, err := row(out, strconv.Itoa(l.SizeBytes))
	if err != nil {
		return load.Result{}, err
	}
	if l.Kind == load.Echo {
		// iterations, min, max, typical, average, deviation, 99 %, 99.9 %; each of
		// half a round trip.
		if len(v) < 7 {
			return load.Result{}, fmt.Errorf("ib_write_lat told only %v", v)
		}
		return load.Result{Ops: n, Elapsed: duration(2 * v[4] * float64(n)), P50: duration(2 * v[3]), P99: duration(2 * v[6])}, nil
	}
	// iterations, peak, average in MiB/s, messages.
	if len(v) < 3 || v[2] <= 0 {
		return load.Result{}, fmt.Errorf("perftest told only %v", v)
	}
	r := load.Result{Ops: n * l.Conns}
	r.Bytes = int64(r.Ops) * int64(l.SizeBytes)
	r.Elapsed = time.Duration(float64(r.Bytes) / (1 << 20) / v[2] * float64(time.Second))
	return r, nil
}

// parseRstream reads rstream's line after n transfers each way. It rounds all
// that it counts, as in 1k; only its last number is used: microseconds per
// transfer of one way.
func parseRstream(out string, l load.Load, n int) (load.Result, error) {
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) < 8 || f[0] != "custom" {
			continue
		}
		per, err := strconv.ParseFloat(f[7], 64)
		if err != nil {
			return load.Result{}, fmt.Errorf("rstream: %w: %s", err, line)
		}
		r := load.Result{Ops: 2 * n, Elapsed: duration(per * float64(2*n))}
		if l.Kind == load.Echo {
			r.Ops = n
			r.P50 = duration(2 * per)
			return r, nil
		}
		r.Bytes = int64(r.Ops) * int64(l.SizeBytes)
		return r, nil
	}
	return load.Result{}, fmt.Errorf("rstream told nothing: %s", out)
}

// parseCMTime adds up the steps of cmtime until the connections are there.
func parseCMTime(out string, n int) (load.Result, error) {
	r := load.Result{Ops: n}
	for _, step := range [][]string{{"create", "id", ":"}, {"resolve", "addr", ":"}, {"resolve", "route:"}, {"create", "qp", ":"}, {"connect", ":"}} {
		v, err := row(out, step...)
		if err != nil {
			return r, err
		}
		if len(v) == 0 {
			return r, fmt.Errorf("cmtime told nothing of %s", strings.Join(step, " "))
		}
		r.Elapsed += duration(v[0] * 1000)
	}
	return r, nil
}
