// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

// UEID is the enterprise ID of both sides unless told otherwise.
const UEID = "SMCV2-DEFAULT-UEID"

// The names of the programs in guests: that at the ends of connections, and that which
// asks the kernel.
const (
	program = "peer"
	asks    = "kernelsmc"
)

// Build builds the programs for the guests of a lab.
func Build(ctx context.Context, l *lab.Lab) error {
	const pkg = "github.com/smcr-io/kube-smcr/test/vm/peer"
	if _, err := l.Build(ctx, pkg+"/"+asks, lab.BuildOptions{Name: asks}); err != nil {
		return err
	}
	_, err := l.Build(ctx, pkg, lab.BuildOptions{CGO: true, Name: program})
	return err
}

// SetUpKernel gives a guest soft RoCE on these NICs, and its kernel's SMC-R an
// enterprise ID. With more than one NIC, all belong to one physical network, so
// that the kernel adds a second link.
func SetUpKernel(ctx context.Context, g *lab.Guest, nics ...int) error {
	if err := g.AddRXE(ctx, nics...); err != nil {
		return err
	}
	return SetUpSMC(ctx, g, nics...)
}

// SetUpSMC is SetUpKernel for a guest that has the devices, and whose module was
// not loaded.
func SetUpSMC(ctx context.Context, g *lab.Guest, nics ...int) error {
	if _, err := g.Run(ctx, "modprobe", "-a", "smc", "smc_diag"); err != nil {
		return err
	}
	settings := []string{"ueid flush", "ueid add " + UEID, "pnet flush"} // guests that stayed may have some
	for _, n := range nics {
		if len(nics) > 1 {
			settings = append(settings, fmt.Sprintf("pnet add LAB %s rxe%d 1", g.NetDev(n), n))
		}
	}
	for _, s := range settings {
		if _, err := g.Run(ctx, append([]string{asks}, strings.Fields(s)...)...); err != nil {
			return err
		}
	}
	return nil
}

// Kernel asks the kernel of a guest for the state of its SMC.
func Kernel(ctx context.Context, g *lab.Guest) (report.Kernel, error) {
	var k report.Kernel
	out, err := g.Run(ctx, asks)
	if err != nil {
		return k, err
	}
	if err := json.Unmarshal([]byte(out), &k); err != nil {
		return k, fmt.Errorf("read the answer of %s: %w", g.Name(), err)
	}
	return k, nil
}

// Run is the program at work in a guest.
type Run struct {
	p    *lab.Process
	name string
	read chan struct{} // closed when the output has ended

	mu      sync.Mutex
	changed chan struct{} // closed, and made anew, with each line
	lines   []report.Line
	err     error // of reading
}

// Start starts the program.
func Start(ctx context.Context, g *lab.Guest, args ...string) (*Run, error) {
	p, err := g.Start(ctx, append([]string{program}, args...)...)
	if err != nil {
		return nil, err
	}
	_ = p.Stdin.Close()
	r := &Run{p: p, name: fmt.Sprintf("%s: peer %s", g.Name(), strings.Join(args, " ")), read: make(chan struct{}), changed: make(chan struct{})}
	go r.follow()
	return r, nil
}

func (r *Run) follow() {
	defer close(r.read)
	for d := json.NewDecoder(r.p.Stdout); ; {
		var l report.Line
		err := d.Decode(&l)
		r.mu.Lock()
		if err == nil {
			r.lines = append(r.lines, l)
		} else if !errors.Is(err, io.EOF) {
			r.err = fmt.Errorf("%s: read its output: %w", r.name, err)
		}
		close(r.changed)
		r.changed = make(chan struct{})
		r.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Await waits for a line, also one that was printed before.
func (r *Run) Await(ctx context.Context, what string, is func(report.Line) bool) (report.Line, error) {
	for seen := 0; ; {
		r.mu.Lock()
		lines, changed := r.lines[seen:], r.changed
		seen = len(r.lines)
		r.mu.Unlock()
		if i := slices.IndexFunc(lines, is); i >= 0 {
			return lines[i], nil
		}
		select {
		case <-changed:
		case <-r.read:
			r.mu.Lock()
			more := len(r.lines) > seen
			r.mu.Unlock()
			if !more {
				_, err := r.Wait()
				return report.Line{}, errors.Join(fmt.Errorf("%s: ended before %s", r.name, what), err)
			}
		case <-ctx.Done():
			return report.Line{}, fmt.Errorf("%s: wait for %s: %w", r.name, what, context.Cause(ctx))
		}
	}
}

// Wait waits for the end and returns what was printed.
func (r *Run) Wait() (*report.Report, error) {
	<-r.read
	err := r.p.Wait()
	var exit *lab.ExitError
	if errors.As(err, &exit) {
		text, _ := io.ReadAll(r.p.Stderr)
		exit.Stderr += string(text)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rep := &report.Report{}
	for _, l := range r.lines {
		rep.Add(l)
	}
	return rep, errors.Join(err, r.err)
}

// Log prints what the engine's link groups went through, and how connections ended,
// for a test that failed.
func (r *Run) Log(logf func(format string, args ...any)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.lines {
		if l.Group != nil {
			logf("%8.0f ms: %v", l.MS, *l.Group)
		}
		if l.Conn != nil {
			logf("%8.0f ms: connection %s: %s after %d rounds, error %q", l.MS, l.Conn.Local, l.Conn.End, l.Conn.Rounds, l.Conn.Err)
		}
	}
}

// Enough ends a client's scripts that have a time before it, in order.
func (r *Run) Enough() error { return r.p.Signal(unix.SIGUSR1) }

// Stop ends the program in order.
func (r *Run) Stop() (*report.Report, error) {
	_ = r.p.Signal(unix.SIGTERM) // if it has ended, Wait says how
	return r.Wait()
}

// Kill ends it at once. The error that this makes is left out.
func (r *Run) Kill() (*report.Report, error) {
	_ = r.p.Signal(unix.SIGKILL)
	rep, err := r.Wait()
	var exit *lab.ExitError
	if errors.As(err, &exit) && exit.Signal == int(unix.SIGKILL) {
		err = nil
	}
	return rep, err
}

// Serve starts a server and returns when it listens.
func Serve(ctx context.Context, g *lab.Guest, addr string, args ...string) (*Run, error) {
	r, err := Start(ctx, g, append([]string{"serve", "-listen", addr}, args...)...)
	if err != nil {
		return nil, err
	}
	if _, err := r.Await(ctx, "it listened", func(l report.Line) bool { return l.Listening != "" }); err != nil {
		_, _ = r.Kill()
		return nil, err
	}
	return r, nil
}

// Dial runs a client to its end.
func Dial(ctx context.Context, g *lab.Guest, args ...string) (*report.Report, error) {
	r, err := Start(ctx, g, append([]string{"dial"}, args...)...)
	if err != nil {
		return nil, err
	}
	return r.Wait()
}

// Opened waits until a client's connections are all open.
func (r *Run) Opened(ctx context.Context) error {
	_, err := r.Await(ctx, "its connections were open", func(l report.Line) bool { return l.Open > 0 })
	return err
}

// Held waits until all of a client's connections run the script hold and only
// wait.
func (r *Run) Held(ctx context.Context) error {
	_, err := r.Await(ctx, "its connections only waited", func(l report.Line) bool { return l.Held > 0 })
	return err
}
