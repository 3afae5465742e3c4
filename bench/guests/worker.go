// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/bench/engine"
	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/bench/sdpload"
	"github.com/smcr-io/kube-smcr/bench/softload"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
	"github.com/smcr-io/kube-smcr/test/vm/afsmc"
)

// request is what the main process asks of a worker, one JSON value per line.
type request struct {
	Op    operation   `json:"op"`
	Stack stack       `json:"stack,omitempty"`
	Addr  string      `json:"addr,omitempty"` // to serve, or to connect to; the file of opProfile
	Load  load.Load   `json:"load"`
	IWARP iwarpForm   `json:"iwarp,omitzero"`
	Way   sdpload.Way `json:"way,omitempty"` // of opLoadRoCE

	// Receivers and Stacks are for opOpenSoft.
	Receivers int `json:"receivers,omitempty"`
	Stacks    int `json:"stacks,omitempty"`
}

type operation string

const (
	opOpen    operation = "open"    // the device and the engine, and the kernel's ID
	opServe   operation = "serve"   // connections of Stack
	opLoad    operation = "load"    // as a client
	opState   operation = "state"   // of the guest
	opAwait   operation = "await"   // until somebody listens on the port Addr
	opProfile operation = "profile" // to the file Addr; "" ends it
	opHold    operation = "hold"    // connections, as a client
	opAgent   operation = "agent"   // says what the agent with the API socket Addr says

	opOpenIWARP  operation = "open iwarp"  // both devices, at the address Addr
	opServeIWARP operation = "serve iwarp" // on both
	opLoadIWARP  operation = "load iwarp"

	opOpenSoft operation = "open soft" // a software device at the address Addr, with stacks

	opOpenSDP operation = "open sdp on siw" // at the address Addr

	opOpenRoCE  operation = "open sdp on roce" // on the device of opOpen
	opServeRoCE operation = "serve sdp on roce"
	opLoadRoCE  operation = "load sdp on roce"
)

// stack is what makes connections.
type stack string

const (
	stackTCP    stack = "tcp"
	stackEngine stack = "engine" // pkg/smcr over pkg/rdma/verbs
	stackSoft   stack = "soft"   // pkg/smcr over pkg/rdma/soft
	stackKernel stack = "kernel" // AF_SMC
)

// response is the worker's answer.
type response = engine.Answer[state]

// state is what a guest has done so far.
type state struct {
	// KernelSMCR are the connections that the kernel made over SMC-R, KernelTCP
	// those that it made over TCP though SMC-R was asked for.
	KernelSMCR uint64 `json:"kernelSMCR"`
	KernelTCP  uint64 `json:"kernelTCP"`
	// GIDIndex is of the device that the engine uses.
	GIDIndex int `json:"gidIndex"`
	// Receivers is how many receivers the software device has.
	Receivers int `json:"receivers,omitempty"`
	// Agent is what an agent says.
	Agent agentState `json:"agent,omitzero"`
}

// workload is what a worker has open.
type workload struct {
	device *verbs.Device
	option *synopt.Option
	engine *smcr.Stack
	soft   *softload.End
	opened engine.Opened

	softiwarp *softiwarp.Device
	siw       *kernel
	sdp       *sdp.Stack // on siw
	roce      *sdp.Stack // on device
}

// runWorker obeys requests until the input ends.
func runWorker(in io.Reader, out io.Writer) error {
	w := &workload{}
	return errors.Join(engine.Serve(in, out, w.do), w.opened.Close())
}

func (w *workload) do(req request) (resp response, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	switch req.Op {
	case opOpen:
		return resp, w.open(req.Addr)
	case opOpenSoft:
		w.soft, err = softload.Open(softload.Config{Addr: req.Addr, Receivers: req.Receivers, Stacks: req.Stacks}, w.opened.Add)
		return resp, err
	case opServe:
		return resp, w.serve(ctx, req)
	case opLoad:
		resp.Result, err = req.Load.Run(ctx, w.dialer(req))
		return resp, err
	case opState:
		resp.State, err = w.state()
		return resp, err
	case opHold:
		_, err = req.Load.Hold(ctx, w.dialer(req), &w.opened.Held)
		return resp, err
	case opAgent:
		resp.State, err = askAgent(ctx, req.Addr)
		return resp, err
	case opAwait:
		return resp, awaitListener(ctx, req.Addr)
	case opOpenIWARP:
		return resp, w.openIWARP(req.Addr)
	case opServeIWARP:
		return resp, w.serveIWARP(req.Addr)
	case opLoadIWARP:
		resp.Result, err = w.loadIWARP(ctx, req)
		return resp, err
	case opOpenSDP:
		return resp, w.openSDP(req.Addr)
	case opOpenRoCE:
		return resp, w.openRoCE()
	case opServeRoCE:
		return resp, w.serveRoCE(ctx, req.Addr)
	case opLoadRoCE:
		resp.Result, err = w.loadRoCE(ctx, req)
		return resp, err
	case opProfile:
		return resp, w.opened.Profile.Set(req.Addr)
	}
	return resp, fmt.Errorf("unknown operation %q", req.Op)
}

// ueid is the kernel's enterprise ID: without one it does not offer version 2,
// and soft RoCE has no GIDs for version 1.
const ueid = "SMCV2-DEFAULT-UEID"

// optionMark selects the engine's sockets.
const optionMark = 0x7609

func (w *workload) open(device string) error {
	if err := smcnl.AddUEID(ueid); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("give the kernel's SMC an enterprise ID: %w", err)
	}
	var err error
	if w.device, err = verbs.Open(verbs.Config{Name: device}); err != nil {
		return err
	}
	w.opened.Add(w.device.Close)
	if w.option, err = synopt.Open(synopt.Config{Mark: optionMark}); err != nil {
		return err
	}
	w.opened.Add(w.option.Close)
	if w.engine, err = smcr.NewStack(smcr.Config{Devices: []rdma.Device{w.device}, Option: w.option}); err != nil {
		return err
	}
	w.opened.Add(w.engine.Close)
	return nil
}

func (w *workload) serve(ctx context.Context, req request) error {
	var l net.Listener
	var err error
	switch req.Stack {
	case stackSoft:
		all, err := w.soft.Listen(ctx, req.Addr)
		for _, l := range all {
			w.opened.Serve(l)
		}
		return err
	case stackEngine:
		l, err = smcr.Listen(ctx, w.engine, "tcp", req.Addr)
	case stackKernel:
		l, err = afsmc.Listen(req.Addr, 0)
	case stackTCP:
		l, err = engine.ListenTCP(ctx, req.Addr)
	case stackSDP:
		l, err = sdp.Listen(ctx, w.sdp, "tcp", req.Addr)
	case stackSDPBuffers:
		if l, err = sdp.Listen(ctx, w.sdp, "tcp", req.Addr); err == nil {
			l = bufferListener{l, w}
		}
	}
	if err != nil {
		return err
	}
	w.opened.Serve(l)
	return nil
}

func (w *workload) dialer(req request) load.DialFunc {
	return func(ctx context.Context) (c net.Conn, _ func() error, err error) {
		switch req.Stack {
		case stackSoft:
			c, err = w.soft.Dial(ctx, req.Addr)
		case stackEngine:
			c, err = (&smcr.Dialer{Stack: w.engine, Require: true}).DialContext(ctx, "tcp", req.Addr)
		case stackKernel:
			c, err = afsmc.Dial(req.Addr, 0)
		case stackTCP:
			c, err = engine.DialTCP(ctx, req.Addr)
		case stackSDP, stackSDPBuffers:
			c, err = w.dialSDP(ctx, req)
		}
		return c, nil, err
	}
}

func (w *workload) state() (state, error) {
	var s state
	if w.device != nil {
		s.GIDIndex = w.device.GIDs()[0].Index
	}
	if w.soft != nil {
		s.Receivers = w.soft.Receivers()
		return s, nil
	}
	k, err := smcnl.ReadCounters()
	s.KernelSMCR = k.ClientV1 + k.ClientV2 + k.ServerV1 + k.ServerV2
	s.KernelTCP = k.ClientFallbacks + k.ServerFallbacks
	return s, err
}

// awaitListener returns when a TCP socket listens on that port.
func awaitListener(ctx context.Context, port string) error {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
			table, err := os.ReadFile(name)
			if err != nil {
				return err
			}
			if listens(string(table), uint16(n)) {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("nobody listens on port %s: %w", port, ctx.Err())
		case <-tick.C: // polls the sockets
		}
	}
}

// listens looks for a listening socket in a table of /proc/net.
func listens(table string, port uint16) bool {
	const listening = "0A"
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) > 3 && f[3] == listening && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
			return true
		}
	}
	return false
}
