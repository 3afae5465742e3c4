// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// device is the RDMA device of both guests.
const device = "rxe0"

// pair is a bed: a server and a client, each in a guest, with a worker.
type pair struct {
	name     string // of guests that are there, and stay; "" for new ones
	only     string // the names of the paths that are asked for; "" for all
	profiles string // the directory for them
	log      io.Writer

	lab            *lab.Lab
	server, client *worker
	gidIndex       int
}

// SetUp implements engine.Bed: it starts guests, or takes those of that name.
func (p *pair) SetUp(ctx context.Context) (_ []engine.Path, err error) {
	if err := p.up(ctx); err != nil {
		return nil, err
	}
	program, err := p.lab.Build(ctx, "github.com/smcr-io/kube-smcr/bench/guests", lab.BuildOptions{CGO: true})
	if err != nil {
		return nil, err
	}
	if p.server, err = p.start(ctx, 0, program); err != nil {
		return nil, err
	}
	if p.client, err = p.start(ctx, 1, program); err != nil {
		return nil, err
	}
	s, err := p.client.call(request{Op: opState})
	if err != nil {
		return nil, err
	}
	p.gidIndex = s.State.GIDIndex
	for st, port := range ports {
		if _, err := p.server.call(request{Op: opServe, Stack: st, Addr: p.addr(port)}); err != nil {
			return nil, err
		}
	}
	return p.paths(s.State), nil
}

// nics is the number of NICs of a guest, of which the first one is measured. With that one alone raw READs of 1 MiB
// have a quarter of the throughput that they have with a second one, and RDMA WRITE five sixths. What was measured is the
// number of NICs; the reason, probably, is QEMU's hub between the guests: it takes nothing as long as none of a guest's NICs
// has room for a packet, so that a burst stops until RDMA sends it again.
const nics = 2

// up starts the guests.
func (p *pair) up(ctx context.Context) (err error) {
	if p.name != "" {
		p.lab, err = lab.Open(p.name)
		return err
	}
	fmt.Fprintln(p.log, "bench-vm: start the guests")
	p.lab, err = lab.Up(ctx, lab.Config{NICs: nics, Log: p.log})
	return err
}

// addDevice gives a guest soft RoCE, and its kernel SMC-R.
func addDevice(ctx context.Context, g *lab.Guest) error {
	if err := g.AddRXE(ctx, 0); err != nil {
		return err
	}
	_, err := g.Run(ctx, "modprobe", "-a", "smc", "smc_diag")
	return err
}

// start sets a guest up and starts its worker.
func (p *pair) start(ctx context.Context, guest int, program string) (*worker, error) {
	g := p.lab.Guest(guest)
	if err := addDevice(ctx, g); err != nil {
		return nil, err
	}
	w, err := startWorker(ctx, g, nil, program)
	if err != nil {
		return nil, err
	}
	_, err = w.call(request{Op: opOpen, Addr: device})
	return w, err
}

// ports are the ports of the servers in the worker.
var ports = map[stack]uint16{stackTCP: 7001, stackEngine: 7002, stackKernel: 7003}

func (p *pair) addr(port uint16) string {
	return netip.AddrPortFrom(p.lab.Guest(0).Addr(0), port).String()
}

// Used implements engine.Peers, for every path: both guests are one path's alone.
func (p *pair) Used() (engine.Usage, error) {
	var u engine.Usage
	for i := range p.lab.Guests() {
		d, err := p.lab.Guest(i).CPU()
		if err != nil {
			return u, err
		}
		u.CPU += d
	}
	return u, nil
}

// Close implements engine.Bed.
func (p *pair) Close() error {
	var errs []error
	for _, w := range []*worker{p.client, p.server} {
		if w != nil {
			errs = append(errs, w.close())
		}
	}
	switch {
	case p.lab == nil:
	case p.name == "":
		errs = append(errs, p.lab.Close())
	default:
		p.lab.Forget()
	}
	return errors.Join(errs...)
}

// worker is this program in a guest, or in this machine's place among the guests.
type worker struct {
	guest  *lab.Guest // nil: this machine
	where  string
	in     io.WriteCloser
	out    *bufio.Reader
	wait   func() error
	stderr io.Reader
}

// startOnSIW starts the guests, loads siw with module parameters, and starts a worker in each guest, with an environment. The worker
// opens the device by the operation open.
func (p *pair) startOnSIW(ctx context.Context, open operation, parameters []string, env ...string) error {
	if err := p.up(ctx); err != nil {
		return err
	}
	program, err := p.lab.Build(ctx, "github.com/smcr-io/kube-smcr/bench/guests", lab.BuildOptions{CGO: true})
	if err != nil {
		return err
	}
	for i, w := range []**worker{&p.server, &p.client} {
		g := p.lab.Guest(i)
		if err := g.LoadSIW(ctx, parameters...); err != nil {
			return err
		}
		if err := g.AddSIW(ctx, 0); err != nil {
			return err
		}
		if *w, err = startWorker(ctx, g, env, program); err != nil {
			return err
		}
		if _, err := (*w).call(request{Op: open, Addr: g.Addr(0).String()}); err != nil {
			return err
		}
	}
	return nil
}

// startWorker starts a worker by a command, whose last word is this program.
func startWorker(ctx context.Context, g *lab.Guest, env []string, command ...string) (*worker, error) {
	p, err := g.StartIn(ctx, "", env, append(slices.Clone(command), engine.WorkerArg)...)
	if err != nil {
		return nil, err
	}
	return &worker{guest: g, where: g.Name(), in: p.Stdin, out: bufio.NewReader(p.Stdout), wait: p.Wait, stderr: p.Stderr}, nil
}

// call runs one request in the worker.
func (w *worker) call(req request) (response, error) {
	resp, err := engine.Ask[request, state](w.in, w.out, req)
	var gone *engine.GoneError
	if errors.As(err, &gone) {
		err = errors.Join(err, w.lastWords())
	}
	if err != nil {
		err = fmt.Errorf("worker of %s: %s: %w", w.where, req.Op, err)
	}
	return resp, err
}

// close ends the worker by ending its input.
func (w *worker) close() error {
	_ = w.in.Close() // it may have ended
	return w.lastWords()
}

// lastWords waits for the end of the worker and says how that was.
func (w *worker) lastWords() error {
	err := w.wait()
	text, _ := io.ReadAll(w.stderr)
	if s := strings.TrimSpace(string(text)); s != "" {
		err = errors.Join(err, errors.New(s))
	}
	return err
}
