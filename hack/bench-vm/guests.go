// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// device is the RDMA device of both guests.
const device = "rxe0"

// pair is a server and a client, each in a guest, with a worker.
type pair struct {
	lab            *lab.Lab
	own            bool // it ends with us
	server, client *worker
	gidIndex       int
}

// newPair starts guests, or takes those of that name.
func newPair(ctx context.Context, name string, log io.Writer) (p *pair, err error) {
	p = &pair{own: name == ""}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.own {
		fmt.Fprintln(log, "bench-vm: start the guests")
		p.lab, err = lab.Up(ctx, lab.Config{NICs: 1, Log: log})
	} else {
		p.lab, err = lab.Open(name)
	}
	if err != nil {
		return p, err
	}
	program, err := p.lab.Build(ctx, "github.com/smcr-io/kube-smcr/hack/bench-vm", lab.BuildOptions{CGO: true})
	if err != nil {
		return p, err
	}
	if p.server, err = p.start(ctx, 0, program); err != nil {
		return p, err
	}
	if p.client, err = p.start(ctx, 1, program); err != nil {
		return p, err
	}
	s, err := p.client.call(request{Op: opState})
	p.gidIndex = s.State.GIDIndex
	for st, port := range ports {
		_, e := p.server.call(request{Op: opServe, Stack: st, Addr: p.addr(port)})
		err = errors.Join(err, e)
	}
	return p, err
}

// start sets a guest up and starts its worker.
func (p *pair) start(ctx context.Context, guest int, program string) (*worker, error) {
	g := p.lab.Guest(guest)
	if err := g.AddRXE(ctx, 0); err != nil {
		return nil, err
	}
	if _, err := g.Run(ctx, "modprobe", "-a", "smc", "smc_diag"); err != nil {
		return nil, err
	}
	w, err := startWorker(ctx, g, program)
	if err != nil {
		return nil, err
	}
	_, err = w.call(request{Op: opOpen, Addr: device})
	return w, err
}

// ports are those of the servers in the worker.
var ports = map[stack]uint16{stackTCP: 7001, stackEngine: 7002, stackKernel: 7003}

func (p *pair) addr(port uint16) string {
	return netip.AddrPortFrom(p.lab.Guest(0).Addr(0), port).String()
}

// busy is the processor time that both guests have taken.
func (p *pair) busy() (time.Duration, error) {
	var sum time.Duration
	for i := range p.lab.Guests() {
		d, err := p.lab.Guest(i).CPU()
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

func (p *pair) close() error {
	var errs []error
	for _, w := range []*worker{p.client, p.server} {
		if w != nil {
			errs = append(errs, w.close())
		}
	}
	switch {
	case p.lab == nil:
	case p.own:
		errs = append(errs, p.lab.Close())
	default:
		p.lab.Forget()
	}
	return errors.Join(errs...)
}

// worker is this program in a guest.
type worker struct {
	guest *lab.Guest
	p     *lab.Process
	out   *bufio.Reader
}

func startWorker(ctx context.Context, g *lab.Guest, program string) (*worker, error) {
	p, err := g.Start(ctx, program, workerArg)
	if err != nil {
		return nil, err
	}
	return &worker{guest: g, p: p, out: bufio.NewReader(p.Stdout)}, nil
}

// call runs one request in the worker.
func (w *worker) call(req request) (response, error) {
	var resp response
	fail := func(err error) (response, error) {
		return resp, fmt.Errorf("worker of %s: %s: %w", w.guest.Name(), req.Op, err)
	}
	b, err := json.Marshal(req)
	if err != nil {
		return fail(err)
	}
	if _, err := w.p.Stdin.Write(append(b, '\n')); err != nil {
		return fail(errors.Join(err, w.lastWords()))
	}
	line, err := w.out.ReadBytes('\n')
	if err != nil {
		return fail(errors.Join(err, w.lastWords()))
	}
	if err := json.Unmarshal(line, &resp); err != nil {
		return fail(err)
	}
	if resp.Err != "" {
		return fail(errors.New(resp.Err))
	}
	return resp, nil
}

// close ends the worker by ending its input.
func (w *worker) close() error {
	_ = w.p.Stdin.Close() // it may have ended
	return w.lastWords()
}

// lastWords waits for the end of the worker and says how that was.
func (w *worker) lastWords() error {
	err := w.p.Wait()
	text, _ := io.ReadAll(w.p.Stderr)
	if s := strings.TrimSpace(string(text)); s != "" {
		err = errors.Join(err, errors.New(s))
	}
	return err
}
