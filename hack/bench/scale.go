// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/hack/bench/load"
	"github.com/smcr-io/kube-smcr/hack/bench/report"
)

// idleWindow is how long idle connections are watched: a TEST LINK of every
// link falls into it.
const idleWindow = 11 * time.Second

// scale measures what open connections cost and whether they slow others down.
func (b *bench) scale(ctx context.Context) error {
	return errors.Join(b.scaleConns(ctx), b.scalePods(ctx))
}

// level is a number of idle connections, and the pair that has them.
type level struct {
	*pair
	conns int
	name  string
	open  load.Result // the opening
	empty [2]sample
	full  [2]sample
}

// sample is what a process has.
type sample struct {
	state
	rss, fds int64
	at       Usage
}

func sampleOf(w *worker) (sample, error) {
	resp, err := w.call(request{Op: opState})
	s := sampleProcess(w.pid())
	s.state = resp.State
	return s, err
}

// sampleProcess is for processes that cannot be asked.
func sampleProcess(pid int) sample {
	dir := fmt.Sprintf("/proc/%d", pid)
	fds, _ := filepath.Glob(dir + "/fd/*") // none: it has ended
	return sample{rss: statusBytes(readAll(dir+"/status"), "VmRSS"), fds: int64(len(fds)), at: usageOf([]int{pid})}
}

// statusBytes finds a size in a status file.
func statusBytes(status, name string) int64 {
	for line := range strings.Lines(status) {
		if n, value, ok := strings.Cut(line, ":"); ok && n == name {
			return firstNumber(value) << 10
		}
	}
	return 0
}

// scaleLevels are the numbers of idle connections; all have to do with the
// descriptors that a process may have.
func scaleLevels() ([]int, error) {
	levels := []int{10, 1000, 10000}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("limit of open files: %w", err)
	}
	for i := range levels {
		levels[i] = min(levels[i], int(limit.Max)-spareFiles)
	}
	return levels, nil
}

// spareFiles is what a worker needs besides idle connections.
const spareFiles = 200

// openLevels builds a pair for each level and opens its connections.
func (b *bench) openLevels(ctx context.Context) (_ []*level, end func() error, err error) {
	counts, err := scaleLevels()
	if err != nil {
		return nil, nil, err
	}
	var levels []*level
	end = func() error {
		var err error
		for _, l := range levels {
			err = errors.Join(err, l.close())
		}
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, end())
		}
	}()
	for _, n := range counts {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		fmt.Fprintf(b.log, "bench: open %d connections\n", n)
		p, err := newPair(9000, n+n/4+100)
		if err != nil {
			return nil, nil, err
		}
		l := &level{pair: p, conns: n, name: fmt.Sprintf("%d idle", n)}
		levels = append(levels, l)
		if err := l.fill(); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", l.name, err)
		}
	}
	return levels, end, nil
}

// fill opens the level's connections.
func (l *level) fill() (err error) {
	if err := warmUp(l.paths()[1:]); err != nil {
		return err
	}
	if l.empty, err = l.sample(); err != nil {
		return err
	}
	resp, err := l.client.call(request{Op: opHold, Addr: serverPort(portSMCR), SMCR: true, Load: load.Load{Kind: load.Idle, Conns: l.conns}})
	if err != nil {
		return err
	}
	l.open = resp.Result
	if l.full, err = l.sample(); err != nil {
		return err
	}
	if n := l.full[0].Conns; n < int64(l.conns) {
		return fmt.Errorf("%d connections are open, want %d", n, l.conns)
	}
	return nil
}

func (l *level) sample() (s [2]sample, err error) {
	for i, w := range []*worker{l.client, l.server} {
		if s[i], err = sampleOf(w); err != nil {
			return s, err
		}
	}
	return s, nil
}

// figure adds one value of a level.
func (b *bench) figure(group, name, unit, base, path string, value float64) {
	var c *report.Case
	for _, o := range b.report.Cases {
		if o.Group == group && o.Name == name {
			c = o
		}
	}
	if c == nil {
		c = &report.Case{Group: group, Name: name, Unit: unit, Lower: true, Base: base}
		b.report.Cases = append(b.report.Cases, c)
	}
	c.Add(path, value, 0, report.Cost{})
}

// scaleConns measures smcr.Conn.
func (b *bench) scaleConns(ctx context.Context) (err error) {
	levels, end, err := b.openLevels(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()

	const group = "idle smcr.Conns between two stacks, buffers of 16 KiB: client and server together"
	base := levels[0].name
	for _, l := range levels {
		n := float64(l.conns)
		per := func(name, unit string, scale float64, f func(sample) int64) {
			before := f(l.empty[0]) + f(l.empty[1])
			after := f(l.full[0]) + f(l.full[1])
			b.figure(group, name, unit, base, l.name, float64(after-before)/n/scale)
		}
		per("Go heap and stacks per connection", "KiB", 1<<10, func(s sample) int64 { return s.HeapBytes })
		per("resident memory per connection, buffers included as far as they were touched", "KiB", 1<<10, func(s sample) int64 { return s.rss })
		per("registered memory per connection", "KiB", 1<<10, func(s sample) int64 { return s.RegisteredBytes })
		per("goroutines per connection", "", 1, func(s sample) int64 { return s.Goroutines })
		per("file descriptors per connection", "", 1, func(s sample) int64 { return s.fds })
		per("CLC messages per opening", "", 1, func(s sample) int64 { return s.CLC })
		per("LLC messages per opening", "", 1, func(s sample) int64 { return s.LLC })
		per("CDC messages per opening and two messages", "", 1, func(s sample) int64 { return s.CDC })
		b.figure(group, "link groups", "", base, l.name, float64(l.full[0].Groups))
		b.figure(group, "opening, 8 at a time", "us each", base, l.name, micros(l.open.Elapsed)/n)
	}
	var paths []path
	for _, l := range levels {
		p := l.paths()[1]
		p.name = l.name
		paths = append(paths, p)
	}
	const busy = "one more smcr.Conn beside idle ones"
	jobs := append([]job{b.echoJob(busy, "", base)}, b.setupJobs(busy)...)
	for _, j := range jobs {
		for _, c := range j.cases {
			c.Base = base
		}
	}
	if err := b.rounds(ctx, "beside idle connections", jobs, paths); err != nil {
		return err
	}
	fmt.Fprintf(b.log, "bench: watch the idle connections for %v\n", idleWindow)
	if err := b.idleCPU(ctx, group, base, levels); err != nil {
		return err
	}
	if b.profile == "" {
		return nil
	}
	for i, l := range levels {
		if err := b.profiles(fmt.Sprintf("scale-%d", l.conns), l.pair, jobs, paths[i:i+1]); err != nil {
			return err
		}
	}
	return nil
}

// idleCPU watches all levels at once, a while after their link groups were
// made: until then groups with one link try often to get another.
func (b *bench) idleCPU(ctx context.Context, group, base string, levels []*level) error {
	used := func(l *level) Usage { return usageOf([]int{l.client.pid(), l.server.pid()}) }
	before := make([]Usage, len(levels))
	for i, l := range levels {
		before[i] = used(l)
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(idleWindow):
	}
	for i, l := range levels {
		u := used(l).minus(before[i])
		b.figure(group, "processor time of idling", "us per second", base, l.name, micros(u.CPU)/idleWindow.Seconds())
		b.figure(group, "context switches of idling", "per second", base, l.name, float64(u.Switches)/idleWindow.Seconds())
	}
	return nil
}

// podsIdle is how many idle connections each path between pods has.
const podsIdle = 1000

// scalePods measures the whole path: agents and haproxies.
func (b *bench) scalePods(ctx context.Context) error {
	node := fmt.Sprintf("  rmbe: %dKiB\n  sendBuffer: %dKiB\n", smallBuffer>>10, smallBuffer>>10)
	return b.withPods(ctx, node, func(p *pods) error {
		paths, err := p.checkedPaths(ctx)
		if err != nil {
			return err
		}
		const busy = "one more connection between two pods"
		alone := b.echoJob(busy, "alone: ", pathTCP)
		if err := b.rounds(ctx, "pods, alone", []job{alone}, paths); err != nil {
			return err
		}
		group := fmt.Sprintf("%d idle connections between two pods, buffers of 16 KiB: all relays together", podsIdle)
		if err := b.watchPods(ctx, group, "without connections: ", paths[1:]); err != nil {
			return err
		}
		if err := b.idlePods(group, paths[1:]); err != nil {
			return err
		}
		beside := append([]job{b.echoJob(busy, fmt.Sprintf("beside %d idle ones: ", podsIdle), pathTCP)}, b.setupJobs(busy)...)
		if err := b.rounds(ctx, "pods, beside idle connections", beside, paths); err != nil {
			return err
		}
		return b.watchPods(ctx, group, "", paths[1:])
	})
}

// idlePods opens idle connections over the paths.
func (b *bench) idlePods(group string, paths []path) error {
	total := func(p path) (rss, fds int64) {
		for _, pid := range p.relays {
			s := sampleProcess(pid)
			rss, fds = rss+s.rss, fds+s.fds
		}
		return rss, fds
	}
	for _, p := range paths {
		rss, fds := total(p)
		fmt.Fprintf(b.log, "bench: open %d connections over %s\n", podsIdle, p.name)
		r, err := p.run(load.Load{Kind: load.Idle, Conns: podsIdle})
		if err == nil && p.check != nil {
			err = p.check(podsIdle)
		}
		if err != nil {
			return fmt.Errorf("open %d connections over %s: %w", podsIdle, p.name, err)
		}
		rss2, fds2 := total(p)
		b.figure(group, "resident memory per connection, buffers included as far as they were touched", "KiB", pathSidecar, p.name, float64(rss2-rss)/podsIdle/1024)
		b.figure(group, "file descriptors per connection", "", pathSidecar, p.name, float64(fds2-fds)/podsIdle)
		b.figure(group, "opening, 8 at a time", "us each", pathSidecar, p.name, micros(r.Elapsed)/podsIdle)
	}
	return nil
}

// watchPods tells what the relays do when the connections are idle.
func (b *bench) watchPods(ctx context.Context, group, prefix string, paths []path) error {
	before := make([]Usage, len(paths))
	for i, p := range paths {
		before[i] = usageOf(p.relays)
	}
	fmt.Fprintf(b.log, "bench: watch the relays for %v\n", idleWindow)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(idleWindow):
	}
	for i, p := range paths {
		u := usageOf(p.relays).minus(before[i])
		b.figure(group, prefix+"processor time of idling", "us per second", pathSidecar, p.name, micros(u.CPU)/idleWindow.Seconds())
		b.figure(group, prefix+"context switches of idling", "per second", pathSidecar, p.name, float64(u.Switches)/idleWindow.Seconds())
	}
	return nil
}
