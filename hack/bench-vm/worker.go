// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/hack/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
	"github.com/smcr-io/kube-smcr/test/vm/afsmc"
	"github.com/smcr-io/kube-smcr/test/vm/smcnl"
)

// workerArg is the first argument of this program as a worker.
const workerArg = "worker"

// request is what the main process asks of a worker, one JSON value per line.
type request struct {
	Op    operation `json:"op"`
	Stack stack     `json:"stack,omitempty"`
	Addr  string    `json:"addr,omitempty"` // to serve, or to connect to; the file of opProfile
	Load  load.Load `json:"load"`
}

type operation string

const (
	opOpen    operation = "open"    // the device and the engine, and the kernel's ID
	opServe   operation = "serve"   // connections of Stack
	opLoad    operation = "load"    // as a client
	opState   operation = "state"   // of the guest
	opAwait   operation = "await"   // until somebody listens on the port Addr
	opProfile operation = "profile" // to the file Addr; "" ends it
)

// stack is what makes connections.
type stack string

const (
	stackTCP    stack = "tcp"
	stackEngine stack = "engine" // pkg/smcr over pkg/rdma/verbs
	stackKernel stack = "kernel" // AF_SMC
)

// response is the worker's answer.
type response struct {
	Err    string      `json:"err,omitempty"`
	Result load.Result `json:"result"`
	State  state       `json:"state"`
}

// state is what a guest has done so far.
type state struct {
	// KernelSMCR are the connections that the kernel made over SMC-R, KernelTCP
	// those that it made over TCP though SMC-R was asked for.
	KernelSMCR uint64 `json:"kernelSMCR"`
	KernelTCP  uint64 `json:"kernelTCP"`
	// GIDIndex is of the device that the engine uses.
	GIDIndex int `json:"gidIndex"`
}

// workload is what a worker has open.
type workload struct {
	device    *verbs.Device
	option    *synopt.Option
	engine    *smcr.Stack
	listeners []net.Listener
	held      load.Held
	profile   *os.File
}

// runWorker obeys requests until the input ends.
func runWorker(in io.Reader, out io.Writer) error {
	w := &workload{}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, lineLimit)
	enc := json.NewEncoder(out)
	var err error
	for err == nil && lines.Scan() {
		var req request
		if err = json.Unmarshal(lines.Bytes(), &req); err != nil {
			break
		}
		resp, opErr := w.do(req)
		if opErr != nil {
			resp.Err = opErr.Error()
		}
		err = enc.Encode(resp)
	}
	return errors.Join(err, lines.Err(), w.close())
}

func (w *workload) do(req request) (resp response, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	switch req.Op {
	case opOpen:
		return resp, w.open(req.Addr)
	case opServe:
		return resp, w.serve(ctx, req)
	case opLoad:
		resp.Result, err = req.Load.Run(ctx, w.dialer(req))
		return resp, err
	case opState:
		resp.State, err = w.state()
		return resp, err
	case opAwait:
		return resp, awaitListener(ctx, req.Addr)
	case opProfile:
		return resp, w.setProfile(req.Addr)
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
	if w.option, err = synopt.Open(synopt.Config{Mark: optionMark}); err != nil {
		return err
	}
	w.engine, err = smcr.NewStack(smcr.Config{Devices: []rdma.Device{w.device}, Option: w.option})
	return err
}

func (w *workload) serve(ctx context.Context, req request) error {
	var l net.Listener
	var err error
	switch req.Stack {
	case stackEngine:
		l, err = smcr.Listen(ctx, w.engine, "tcp", req.Addr)
	case stackKernel:
		l, err = afsmc.Listen(req.Addr, 0)
	case stackTCP:
		var lc net.ListenConfig
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(ctx, "tcp", req.Addr)
	}
	if err != nil {
		return err
	}
	w.listeners = append(w.listeners, l)
	go load.Serve(l, &w.held)
	return nil
}

func (w *workload) dialer(req request) load.DialFunc {
	return func(ctx context.Context) (c net.Conn, _ func() error, err error) {
		switch req.Stack {
		case stackEngine:
			c, err = (&smcr.Dialer{Stack: w.engine, Require: true}).DialContext(ctx, "tcp", req.Addr)
		case stackKernel:
			c, err = afsmc.Dial(req.Addr, 0)
		case stackTCP:
			var d net.Dialer
			d.SetMultipathTCP(false)
			c, err = d.DialContext(ctx, "tcp", req.Addr)
		}
		return c, nil, err
	}
}

func (w *workload) state() (state, error) {
	var s state
	if w.device != nil {
		s.GIDIndex = w.device.GIDs()[0].Index
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

func (w *workload) setProfile(file string) error {
	if w.profile != nil {
		pprof.StopCPUProfile()
		err := w.profile.Close()
		w.profile = nil
		return err
	}
	if file == "" {
		return nil
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	w.profile = f
	return pprof.StartCPUProfile(f)
}

func (w *workload) close() error {
	errs := []error{w.setProfile("")}
	for _, l := range w.listeners {
		errs = append(errs, l.Close())
	}
	if w.engine != nil {
		errs = append(errs, w.engine.Close())
	}
	if w.option != nil {
		errs = append(errs, w.option.Close())
	}
	if w.device != nil {
		errs = append(errs, w.device.Close())
	}
	return errors.Join(errs...)
}
