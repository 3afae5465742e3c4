// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
)

// carrier is what carries the connections of a path.
type carrier int

const (
	byTCPOnly carrier = iota
	byKernel          // the kernel's SMC-R
	byAgents
)

// podWay is the [engine.Peers] of a path between pods of the same kind.
type podWay struct {
	*podPair
	pod    podKind
	to     netip.Addr
	offset uint16 // of the services' ports: a relay's
	by     carrier
	opens  bool                  // the program opens AF_SMC
	speeds map[load.Load]float64 // requests per second of the last runs of redis-benchmark; the loads without their duration
}

// counts are connections, by what carried them.
type counts struct{ smcr, tcp uint64 }

func (c counts) minus(v counts) counts { return counts{c.smcr - v.smcr, c.tcp - v.tcp} }

// counterOf is who counts connections.
type counterOf struct {
	guest int
	agent bool    // else the kernel, in pod
	pod   podKind // 0 of the agent, which counts those of all its pods
}

// String says who that is.
func (c counterOf) String() string {
	if c.agent {
		return fmt.Sprintf("the agent of g%d", c.guest)
	}
	return fmt.Sprintf("the kernel in pod %s of g%d", c.pod, c.guest)
}

// Start makes connections until they go the way that the path's name says: a first contact may come too late on a busy machine.
func (w *podWay) Start(ctx context.Context, l load.Load) (err error) {
	for range startTries {
		var r load.Result
		if r, err = w.Run(ctx, l); err != nil {
			return err
		}
		if err = w.Check(ctx, l, r); err == nil {
			return nil
		}
		if perr := pause(ctx, startPause); perr != nil {
			return perr
		}
	}
	return err
}

// Run makes the load between the pods.
func (w *podWay) Run(ctx context.Context, l load.Load) (load.Result, error) {
	if l.Kind == redisGets {
		return w.redis(ctx, l)
	}
	st, port := stackTCP, uint16(portLoad)
	if w.opens {
		st, port = stackKernel, portAFSMC
	}
	r, err := w.workers[1][w.pod].call(request{Op: opLoad, Stack: st, Addr: netip.AddrPortFrom(w.to, port+w.offset).String(), Load: l})
	return r.Result, err
}

// redis runs redis-benchmark, with as many requests as the load before fits into the duration.
func (w *podWay) redis(ctx context.Context, l load.Load) (load.Result, error) {
	key := l
	key.Duration = 0
	n := iterations(l, w.speeds[key], leastRequests) * l.Conns
	ctx, cancel := context.WithTimeout(ctx, toolLimit)
	defer cancel()
	out, err := w.lab.Guest(1).Run(ctx, w.podOf(1, w.pod).In(
		"redis-benchmark", "-h", w.to.String(), "-p", strconv.Itoa(portRedis+int(w.offset)),
		"-n", strconv.Itoa(n), "-c", strconv.Itoa(l.Conns), "-t", "get", "--csv",
	)...)
	if err != nil {
		return load.Result{}, err
	}
	r, err := parseRedis(out, n)
	if err == nil {
		if w.speeds == nil {
			w.speeds = map[load.Load]float64{}
		}
		w.speeds[key] = engine.OpsPerSecond(r)
	}
	return r, err
}

// parseRedis reads the result of redis-benchmark after n requests.
func parseRedis(out string, n int) (load.Result, error) {
	rows, err := csv.NewReader(strings.NewReader(out)).ReadAll()
	if err == nil && len(rows) != 2 {
		err = errors.New("want a header and a line")
	}
	if err != nil {
		return load.Result{}, fmt.Errorf("redis-benchmark told %q: %w", out, err)
	}
	value := func(name string) float64 {
		i := slices.Index(rows[0], name)
		if i < 0 {
			return 0
		}
		v, err := strconv.ParseFloat(rows[1][i], 64)
		if err != nil {
			return 0
		}
		return v
	}
	rps := value("rps")
	if rps <= 0 {
		return load.Result{}, fmt.Errorf("redis-benchmark told no speed: %q", out)
	}
	millis := func(name string) time.Duration { return duration(1000 * value(name)) }
	return load.Result{
		Ops: n, Elapsed: time.Duration(float64(n) / rps * float64(time.Second)), P50: millis("p50_latency_ms"), P99: millis("p99_latency_ms"),
	}, nil
}

// Check asks the kernels of both pods, and their agents if they have some, whether all connections went the way that the path's name says.
func (w *podWay) Check(_ context.Context, l load.Load, r load.Result) error {
	least := uint64(max(l.Conns, 1))
	if l.Kind == load.Setup {
		least = uint64(r.Ops)
	}
	var errs []error
	for i, node := range []*worker{w.server, w.client} {
		kernel, err := w.workers[i][w.pod].call(request{Op: opState})
		if err != nil {
			return err
		}
		byThis := uint64(0) // how many connections the pod's kernel must have carried
		if w.by == byKernel {
			byThis = least
		}
		errs = append(errs, w.counted(counterOf{guest: i, pod: w.pod}, counts{kernel.State.KernelSMCR, kernel.State.KernelTCP}, byThis))
		if w.by != byAgents {
			continue
		}
		resp, err := node.call(request{Op: opAgent, Addr: agentSocket})
		if err != nil {
			return err
		}
		agent := resp.State.Agent
		if err := w.counted(counterOf{guest: i, agent: true}, counts{agent.SMCR, agent.TCP}, least); err != nil {
			errs = append(errs, fmt.Errorf("%w: %s", err, strings.Join(agent.Details, "; ")))
		}
	}
	return errors.Join(errs...)
}

// counted notes the value of a counter. Since the last time it must have counted at least so many connections on SMC-R, or, if least is 0,
// none at all, and no connection of TCP.
func (p *podPair) counted(c counterOf, now counts, least uint64) error {
	d := now.minus(p.seen[c])
	p.seen[c] = now
	switch {
	case d.tcp > 0:
		return fmt.Errorf("%d connections were TCP, says %s", d.tcp, c)
	case d.smcr < least:
		return fmt.Errorf("%d connections of %d or more were on SMC-R, says %s", d.smcr, least, c)
	case least == 0 && d.smcr > 0:
		return fmt.Errorf("%d connections were on SMC-R, says %s, of none", d.smcr, c)
	}
	return nil
}
