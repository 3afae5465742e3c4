// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
	"github.com/smcr-io/kube-smcr/test/vm/peer/script"
)

// results counts the connections that ended.
type results struct {
	out *output

	mu    sync.Mutex
	conns int
	bad   int
}

func (r *results) add(c report.Conn) {
	r.out.line(report.Line{Conn: &c})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns++
	if c.Err != "" {
		r.bad++
	}
}

// finish closes the stack and writes the last line. An error that only
// connections had is not repeated.
func (r *results) finish(st stack, err error) error {
	end := &report.End{Conns: r.conns, Bad: r.bad}
	err = errors.Join(err, st.close(end))
	if err != nil {
		end.Err = err.Error()
	}
	if e := r.out.end(end); e != nil {
		return e
	}
	if err == nil && r.bad > 0 {
		return fmt.Errorf("%d of %d connections failed", r.bad, r.conns)
	}
	return err
}

// server is the role that accepts.
type server struct {
	options
	address string
	count   int
	grace   time.Duration
}

func (s *server) register(f *flag.FlagSet) {
	s.options.register(f)
	f.StringVar(&s.address, "listen", "", "address and port")
	f.IntVar(&s.count, "count", 0, "end after so many connections; 0: by a signal")
	f.DurationVar(&s.grace, "grace", 20*time.Second, "how long connections may go on after the signal")
}

// errStopped ends connections that a signal has caught.
var errStopped = errors.New("the server was told to end")

// run serves until ctx ends, or until count connections have ended.
func (s *server) run(ctx context.Context, st stack, out *output) error {
	res := &results{out: out}
	l, err := st.listen(ctx, s.address)
	if err != nil {
		return res.finish(st, err)
	}
	out.line(report.Line{Listening: l.addr()})
	var wg sync.WaitGroup
	all := make(chan struct{}) // closed when the last of count connections is accepted
	accepted := make(chan struct{})
	var failed error // read it after accepted
	// A client that has ended may have done so a moment ago: its connections
	// are not cut off.
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	go func() {
		defer close(accepted)
		failed = s.accept(work, st, l, res, &wg, all)
	}()
	select {
	case <-ctx.Done():
	case <-all:
	case <-accepted:
		err = failed
	}
	err = errors.Join(err, l.close())
	<-accepted // which the closed listener ended
	late := context.AfterFunc(ctx, func() {
		t := time.AfterFunc(s.grace, func() { cancel(errStopped) })
		context.AfterFunc(work, func() { t.Stop() })
	})
	wg.Wait()
	late()
	return res.finish(st, err)
}

// accept serves each connection in a goroutine until the listener is closed.
func (s *server) accept(ctx context.Context, st stack, l listener, res *results, wg *sync.WaitGroup, all chan<- struct{}) error {
	for n := 1; ; n++ {
		c, err := l.accept()
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		o := &openConn{Conn: c}
		wg.Go(func() {
			ctx, cancel := context.WithTimeoutCause(ctx, s.timeout, fmt.Errorf("no end after %v", s.timeout))
			defer cancel()
			st.describe([]*openConn{o})
			res.add(o.take(script.Serve(ctx, o)))
		})
		if n == s.count {
			close(all)
		}
	}
}

// dialer is the role that connects.
type dialer struct {
	options
	to      string
	conns   int
	atOnce  int
	repeat  int
	specs   []script.Spec
	already uint64 // connections that were made, which seeds the next
	// enough is closed when scripts that have a time are to end before it.
	enough chan struct{}
}

func (d *dialer) register(f *flag.FlagSet) {
	d.options.register(f)
	f.StringVar(&d.to, "to", "", "address and port of the server")
	f.IntVar(&d.conns, "conns", 1, "connections at once for each script")
	f.IntVar(&d.atOnce, "dialers", 16, "how many of them are made at once")
	f.IntVar(&d.repeat, "repeat", 1, "how often all scripts are run")
}

// run runs the scripts, one after the other.
func (d *dialer) run(ctx context.Context, st stack, out *output) error {
	defer d.awaitEnough()()
	res := &results{out: out}
	var err error
	for range d.repeat {
		for _, spec := range d.specs {
			if err == nil && ctx.Err() == nil {
				err = d.script(ctx, st, spec, res)
			}
		}
	}
	return res.finish(st, err)
}

// awaitEnough closes d.enough at SIGUSR1, until stop is called.
func (d *dialer) awaitEnough() (stop func()) {
	d.enough = make(chan struct{})
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGUSR1)
	over := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-told:
			close(d.enough)
		case <-over:
		}
	})
	return func() {
		signal.Stop(told)
		close(over)
		wg.Wait()
	}
}

// script runs one script on d.conns connections, which are all open before it
// begins.
func (d *dialer) script(ctx context.Context, st stack, spec script.Spec, res *results) error {
	ctx, cancel := context.WithTimeoutCause(ctx, d.timeout, fmt.Errorf("no end after %v", d.timeout))
	defer cancel()
	conns, err := d.connect(ctx, st)
	st.describe(conns)
	if err != nil {
		for _, c := range conns {
			err = errors.Join(err, c.Abort())
		}
		return err
	}
	res.out.line(report.Line{Open: len(conns)})
	var wg sync.WaitGroup
	var holding atomic.Int32
	held := func() {
		if n := holding.Add(1); int(n) == len(conns) {
			res.out.line(report.Line{Held: len(conns)})
		}
	}
	for _, c := range conns {
		spec.Seed = d.already
		d.already++
		mine := spec
		mine.Enough = d.enough
		wg.Go(func() { res.add(c.take(script.Dial(ctx, c, mine, held))) })
	}
	wg.Wait()
	return nil
}

// connect makes the connections, some at a time. With an error it returns those
// that were made.
func (d *dialer) connect(ctx context.Context, st stack) ([]*openConn, error) {
	var mu sync.Mutex
	var conns []*openConn
	var failed error
	var wg sync.WaitGroup
	next := make(chan struct{})
	for range min(d.atOnce, d.conns) {
		wg.Go(func() {
			for range next {
				start := time.Now()
				c, err := st.dial(ctx, d.to)
				mu.Lock()
				if err != nil {
					failed = errors.Join(failed, err)
				} else {
					o := &openConn{Conn: c}
					o.about.ConnectMS = time.Since(start).Seconds() * 1e3
					conns = append(conns, o)
				}
				mu.Unlock()
			}
		})
	}
	for range d.conns {
		next <- struct{}{}
	}
	close(next)
	wg.Wait()
	return conns, failed
}
