// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"runtime/debug"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/softload"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// request is what the main process asks of a worker, one JSON value per line.
type request struct {
	Op   operation `json:"op"`
	Addr string    `json:"addr,omitempty"` // to serve, or to connect to; of the device for openStack
	SMCR bool      `json:"smcr,omitempty"` // with the stack, not with plain TCP
	// FirstContact opens a stack for each connection.
	FirstContact bool `json:"firstContact,omitempty"`
	// MaxConns is for openStack: so many connections with small buffers, of each stack.
	MaxConns int `json:"maxConns,omitempty"`
	// Stacks is for openStack: so many on one device, as a node has one for each pod; 0: one.
	Stacks int       `json:"stacks,omitempty"`
	Load   load.Load `json:"load"`
	// IWARP is for load: over a connection of iWARP.
	IWARP *iwarpForm `json:"iwarp,omitempty"`
	// SDP is for load: over a connection of SDP.
	SDP *sdpForm `json:"sdp,omitempty"`
}

type operation string

const (
	opOpenStack operation = "open stack"
	opServe     operation = "serve"
	opLoad      operation = "load"
	opProfile   operation = "profile" // to the file Addr; "" ends it
	opHold      operation = "hold"    // open connections that stay open
	opState     operation = "state"   // how much the worker has of what

	opOpenIWARP  operation = "open iwarp"
	opServeIWARP operation = "serve iwarp"

	opOpenSDP  operation = "open sdp" // on the device of opOpenIWARP
	opServeSDP operation = "serve sdp"
)

// response is the worker's answer.
type response = engine.Answer[state]

// state is what a worker has of what. Messages are those sent since the
// start.
type state struct {
	HeapBytes       int64 `json:"heapBytes"` // of the Go heap, and stacks
	Goroutines      int64 `json:"goroutines"`
	RegisteredBytes int64 `json:"registeredBytes"`
	Conns           int64 `json:"conns"`
	Groups          int64 `json:"groups"`
	CLC             int64 `json:"clc"`
	LLC             int64 `json:"llc"`
	CDC             int64 `json:"cdc"`
}

// workload is what a worker has open.
type workload struct {
	soft   *softload.End
	iwarp  *softiwarp.Device
	sdp    map[bool]*sdp.Stack // without CRCs, and with them
	opened engine.Opened
}

// runWorker obeys requests until the input ends.
func runWorker(in io.Reader, out io.Writer) error {
	w := &workload{}
	return errors.Join(engine.Serve(in, out, w.do), w.opened.Close())
}

func (w *workload) do(req request) (resp response, err error) {
	ctx := context.Background()
	switch req.Op {
	case opOpenStack:
		return resp, w.openStacks(req)
	case opServe:
		return resp, w.serve(ctx, req)
	case opOpenIWARP:
		return resp, w.openIWARP(req.Addr)
	case opServeIWARP:
		return resp, w.serveIWARP(req.Addr)
	case opOpenSDP:
		return resp, w.openSDP()
	case opServeSDP:
		return resp, w.serveSDP(ctx, req.Addr)
	case opLoad:
		if req.SDP != nil {
			resp.Result, err = w.loadSDP(ctx, req)
			return resp, err
		}
		if req.IWARP != nil {
			resp.Result, err = w.loadIWARP(ctx, req)
			return resp, err
		}
		resp.Result, err = req.Load.Run(ctx, w.dialer(req))
		return resp, err
	case opHold:
		resp.Result, err = req.Load.Hold(ctx, w.dialer(req), &w.opened.Held)
		return resp, err
	case opProfile:
		return resp, w.opened.Profile.Set(req.Addr)
	case opState:
		resp.State = w.state()
		return resp, nil
	}
	return resp, fmt.Errorf("unknown operation %q", req.Op)
}

func (w *workload) openStacks(req request) (err error) {
	w.soft, err = softload.Open(softload.Config{Addr: req.Addr, Stacks: req.Stacks, Stack: func(c *smcr.Config) {
		if req.MaxConns > 0 {
			c.MaxConns = req.MaxConns
			c.RMBESizeBytes = smallBuffer
			c.MemoryBytes = 4 * smallBuffer * req.MaxConns // twice what the buffers take
		}
	}}, w.opened.Add)
	return err
}

// smallBuffer is the size of RMBEs and send buffers where there are many.
const smallBuffer = 16 << 10

// state collects garbage first: what is left is in use.
func (w *workload) state() state {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	s := state{HeapBytes: int64(m.HeapAlloc + m.StackInuse), Goroutines: int64(runtime.NumGoroutine())}
	if w.soft == nil {
		return s
	}
	for _, stack := range w.soft.Stacks() {
		st := stack.Stats()
		s.RegisteredBytes += int64(st.MemoryBytes)
		s.Conns += int64(st.Conns)
		s.Groups += int64(st.Groups)
		s.CLC += int64(st.CLCSent)
		s.LLC += int64(st.LLCSent)
		s.CDC += int64(st.CDCSent)
	}
	return s
}

func (w *workload) serve(ctx context.Context, req request) error {
	if !req.SMCR {
		l, err := engine.ListenTCP(ctx, req.Addr)
		if err != nil {
			return err
		}
		w.opened.Serve(l)
		return nil
	}
	all, err := w.soft.Listen(ctx, req.Addr)
	for _, l := range all {
		w.opened.Serve(l)
	}
	return err
}

// dialTimeout is for connections of all kinds.
const dialTimeout = softload.DialTimeout

func (w *workload) dialer(req request) load.DialFunc {
	switch {
	case req.FirstContact:
		return func(ctx context.Context) (net.Conn, func() error, error) { return w.soft.DialAlone(ctx, req.Addr) }
	case req.SMCR:
		return func(ctx context.Context) (net.Conn, func() error, error) {
			c, err := w.soft.Dial(ctx, req.Addr)
			return c, nil, err
		}
	}
	return func(ctx context.Context) (net.Conn, func() error, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		c, err := engine.DialTCP(ctx, req.Addr)
		return c, nil, err
	}
}
