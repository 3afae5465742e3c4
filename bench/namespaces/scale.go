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

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/report"
)

// idleWindow is how long idle connections are watched: a TEST LINK of every
// link falls into it.
const idleWindow = 11 * time.Second

// idleSettle is how long connections have been idle before what they cost is looked at: stacks give back, and agents park,
// what has been idle for two seconds.
const idleSettle = 3 * time.Second

// settle waits until connections that were opened are idle ones.
func settle(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(idleSettle):
		return nil
	}
}

// scale measures what open connections cost and whether they slow others down.
func (b *bench) scale(ctx context.Context) error {
	return errors.Join(b.scaleConns(ctx), b.scalePods(ctx))
}

// level is a crowd, and the pair that has its connections.
type level struct {
	*pair
	conns int
	name  string
	path  engine.Path // of one more connection
	open  load.Result // the opening
	empty [2]sample
	full  [2]sample
}

// levels is a bed: one pair for each crowd, whose paths are named after it.
type levels struct {
	b   *bench
	all []*level
}

// sample is what a process has.
type sample struct {
	state
	rss, fds int64
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
	return sample{rss: statusBytes(readAll(dir+"/status"), "VmRSS"), fds: int64(len(fds))}
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

// crowd is how many connections idle, between how many stacks of each side: as many as pods
// of a node have, which share its device.
type crowd struct{ conns, stacks int }

func (c crowd) String() string {
	if c.stacks == 1 {
		return fmt.Sprintf("%d idle", c.conns)
	}
	return fmt.Sprintf("%d idle, %d stacks", c.conns, c.stacks)
}

// each is how many connections a stack may have: those that idle, and some more.
func (c crowd) each() int {
	n := c.conns / c.stacks
	return n + n/4 + 100
}

// crowds are what is compared; all have to do with the descriptors that a process may have.
func crowds() ([]crowd, error) {
	all := []crowd{{10, 1}, {1000, 1}, {10000, 1}, {10000, 100}}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("limit of open files: %w", err)
	}
	for i := range all {
		all[i].conns = min(all[i].conns, int(limit.Max)-spareFiles)
	}
	return all, nil
}

// spareFiles is what a worker needs besides idle connections.
const spareFiles = 400

// SetUp implements engine.Bed: it opens the idle connections.
func (s *levels) SetUp(ctx context.Context) ([]engine.Path, error) {
	all, err := crowds()
	if err != nil {
		return nil, err
	}
	var paths []engine.Path
	for _, c := range all {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		s.b.Logf("open connections: %v", c)
		p := s.b.pair(9000)
		p.maxConns, p.stacks, p.profiles = c.each(), c.stacks, s.b.profiles("scale", c.conns)
		l := &level{pair: &p, conns: c.conns, name: c.String()}
		s.all = append(s.all, l)
		if err := l.fill(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", l.name, err)
		}
		paths = append(paths, l.path)
	}
	return paths, nil
}

// Close implements engine.Bed.
func (s *levels) Close() error {
	var errs []error
	for _, l := range s.all {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// fill sets the pair up and opens the level's connections.
func (l *level) fill(ctx context.Context) error {
	if _, err := l.SetUp(ctx); err != nil {
		return err
	}
	conn := l.ways()[1]
	conn.name = l.name
	l.path = l.paths(conn)[0]
	if err := conn.Start(ctx, load.Load{}); err != nil {
		return err
	}
	var err error
	if l.empty, err = l.sample(); err != nil {
		return err
	}
	if l.open, err = conn.Run(ctx, load.Load{Kind: load.Idle, Conns: l.conns}); err != nil {
		return err
	}
	if err := settle(ctx); err != nil {
		return err
	}
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

// scaleConns measures smcr.Conn.
func (b *bench) scaleConns(ctx context.Context) error {
	s := &levels{b: b}
	return b.In(ctx, s, func(paths []engine.Path) error {
		const group = "idle smcr.Conns between two processes, buffers of 16 KiB: client and server together"
		base := s.all[0].name
		for _, l := range s.all {
			b.costs(group, base, l)
		}
		const busy = "one more smcr.Conn beside idle ones"
		var others []string
		for _, l := range s.all[1:] {
			others = append(others, l.name)
		}
		jobs := b.besideJobs(busy, base, others)
		if err := b.Measure(ctx, "beside idle connections", jobs, paths); err != nil {
			return err
		}
		// A while after the link groups were made: until then groups with one
		// link try often to get another.
		workers := make([]watched, len(s.all))
		for i, l := range s.all {
			workers[i] = watched{l.name, []int{l.client.pid(), l.server.pid()}}
		}
		return b.idle(ctx, group, "", base, workers)
	})
}

// besideJobs measure one more connection beside idle ones: many, or as few as base.
func (b *bench) besideJobs(group, base string, many []string) []engine.Job {
	targets := besideTargets(base, many)
	return append([]engine.Job{b.RoundTrip(group, "", base, targets...)}, b.setupJobs(group, base, targets, nil)...)
}

// costs notes what the connections of a level cost.
func (b *bench) costs(group, base string, l *level) {
	n := float64(l.conns)
	per := func(name, unit string, scale float64, f func(sample) int64, targets ...report.Target) {
		before := f(l.empty[0]) + f(l.empty[1])
		after := f(l.full[0]) + f(l.full[1])
		b.Value(group, name, unit, base, l.name, float64(after-before)/n/scale, targets...)
	}
	per("Go heap and stacks per connection", "KiB", 1<<10, func(s sample) int64 { return s.HeapBytes })
	var memory []report.Target
	if l.name != base { // of few connections it is mostly what every stack has
		memory = idleMemory(l.name)
	}
	per(idleResident, "KiB", 1<<10, func(s sample) int64 { return s.rss }, memory...)
	per("registered memory per connection", "KiB", 1<<10, func(s sample) int64 { return s.RegisteredBytes })
	per("goroutines per connection", "", 1, func(s sample) int64 { return s.Goroutines })
	per("file descriptors per connection", "", 1, func(s sample) int64 { return s.fds })
	per("CLC messages per opening", "", 1, func(s sample) int64 { return s.CLC })
	per("LLC messages per opening", "", 1, func(s sample) int64 { return s.LLC })
	per("CDC messages per opening and two messages", "", 1, func(s sample) int64 { return s.CDC })
	b.Value(group, "link groups", "", base, l.name, float64(l.full[0].Groups))
	b.Value(group, "opening, 8 at a time", "us each", base, l.name, engine.Micros(l.open.Elapsed)/n)
}

// watched are processes to be looked at while their connections idle.
type watched struct {
	path string
	pids []int
}

// idle watches all of them at once.
func (b *bench) idle(ctx context.Context, group, prefix, base string, all []watched) error {
	before := make([]engine.Usage, len(all))
	for i, w := range all {
		before[i] = usageOf(w.pids)
	}
	b.Logf("watch what idles for %v", idleWindow)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(idleWindow):
	}
	for i, w := range all {
		u := usageOf(w.pids).Minus(before[i])
		b.Value(group, prefix+"processor time of idling", "us per second", base, w.path, engine.Micros(u.CPU)/idleWindow.Seconds())
		b.Value(group, prefix+"context switches of idling", "per second", base, w.path, float64(u.Switches)/idleWindow.Seconds())
	}
	return nil
}

// podsIdle is how many idle connections each path between pods has.
const podsIdle = 1000

// scalePods measures the whole path: agents and haproxies.
func (b *bench) scalePods(ctx context.Context) error {
	p := b.pods(fmt.Sprintf("  rmbe: %dKiB\n  sendBuffer: %dKiB\n", smallBuffer>>10, smallBuffer>>10))
	return b.In(ctx, p, func(paths []engine.Path) error {
		relayed := p.ways()[1:]
		relays := make([]watched, len(relayed))
		for i, w := range relayed {
			relays[i] = watched{w.name, w.relays}
		}
		const busy = "one more connection between two pods"
		alone := b.RoundTrip(busy, "alone: ", pathTCP)
		if err := b.Measure(ctx, "pods, alone", []engine.Job{alone}, paths); err != nil {
			return err
		}
		group := fmt.Sprintf("%d idle connections between two pods, buffers of 16 KiB: all relays together", podsIdle)
		if err := b.idle(ctx, group, "without connections: ", pathSidecar, relays); err != nil {
			return err
		}
		before, err := p.goroutines(ctx)
		if err != nil {
			return err
		}
		if err := b.openIdle(ctx, group, relayed); err != nil {
			return err
		}
		after, err := p.goroutines(ctx)
		if err != nil {
			return err
		}
		b.Value(group, "goroutines per connection", "", pathPods, pathPods, (after-before)/podsIdle,
			report.Target{Path: pathPods, Limit: idleGoroutines})
		beside := b.RoundTrip(busy, fmt.Sprintf("beside %d idle ones: ", podsIdle), pathTCP)
		jobs := append([]engine.Job{beside}, b.setupJobs(busy, pathTCP, nil, nil)...)
		if err := b.Measure(ctx, "pods, beside idle connections", jobs, paths); err != nil {
			return err
		}
		return b.idle(ctx, group, "", pathSidecar, relays)
	})
}

// openIdle opens idle connections over each way.
func (b *bench) openIdle(ctx context.Context, group string, ways []*way) error {
	total := func(w *way) (rss, fds int64) {
		for _, pid := range w.relays {
			s := sampleProcess(pid)
			rss, fds = rss+s.rss, fds+s.fds
		}
		return rss, fds
	}
	l := load.Load{Kind: load.Idle, Conns: podsIdle}
	for _, w := range ways {
		rss, fds := total(w)
		b.Logf("open %d connections over %s", podsIdle, w.name)
		r, err := w.Run(ctx, l)
		if err == nil {
			err = w.Check(ctx, l, r)
		}
		if err != nil {
			return fmt.Errorf("open %d connections over %s: %w", podsIdle, w.name, err)
		}
		if err := settle(ctx); err != nil {
			return err
		}
		rss2, fds2 := total(w)
		var memory []report.Target
		if w.name == pathPods {
			memory = idleMemory(w.name)
		}
		b.Value(group, idleResident, "KiB", pathSidecar, w.name, float64(rss2-rss)/podsIdle/1024, memory...)
		b.Value(group, "file descriptors per connection", "", pathSidecar, w.name, float64(fds2-fds)/podsIdle)
		b.Value(group, "opening, 8 at a time", "us each", pathSidecar, w.name, engine.Micros(r.Elapsed)/podsIdle)
	}
	return nil
}
