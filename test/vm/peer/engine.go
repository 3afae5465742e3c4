// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
	"github.com/smcr-io/kube-smcr/test/vm/peer/script"
)

const (
	// optionMark selects our sockets in our cgroup.
	optionMark = 0x7609
	// settleTime bounds the wait for what the peer has to end: longer than a link group takes to find that the peer is gone, and
	// shorter than linkgroup.CloseTimeout, by which the stack ends connections without the peer.
	settleTime = 45 * time.Second
	// defaultUEID is the one that the kernel's tools suggest.
	defaultUEID = "SMCV2-DEFAULT-UEID"
)

type engineOptions struct {
	devices, eids, versions     string
	mtu                         int
	rmbe, memory, conns, links  int
	maxConns                    int
	idle, closeTimeout, message time.Duration
	decline                     uint64
	require, deviceless         bool
}

func (o *engineOptions) register(f *flag.FlagSet) {
	f.StringVar(&o.devices, "device", "", "RDMA devices of the engine: soft:ADDRESS or verbs:NAME, separated by commas")
	f.StringVar(&o.eids, "eid", defaultUEID, "enterprise IDs, separated by commas")
	f.StringVar(&o.versions, "versions", "both", "versions of SMC-R: both, v1 or v2")
	f.IntVar(&o.mtu, "mtu", 0, "path MTU of software devices in bytes; 0: what the interface carries")
	f.IntVar(&o.rmbe, "rmbe", 0, "receive buffer of a connection in bytes; 0: the default")
	f.IntVar(&o.memory, "memory", 0, "limit for registered memory in bytes; 0: the default")
	f.IntVar(&o.conns, "conns-per-group", 0, "connections per link group; 0: the default")
	f.IntVar(&o.links, "links", 0, "links per link group; 0: the default")
	f.IntVar(&o.maxConns, "max-conns", 0, "connections of the stack; 0: the default")
	f.DurationVar(&o.idle, "idle", 0, "how long a link group lives without connections; 0: the default")
	f.DurationVar(&o.closeTimeout, "close-timeout", 0, "limit for the peer's close; 0: the default")
	f.DurationVar(&o.message, "message-timeout", 0, "limit for each CLC message; 0: the default")
	f.Uint64Var(&o.decline, "decline", 0, "a server declines every proposal with this code")
	f.BoolVar(&o.deviceless, "deviceless", false, "the devices are gone before there are connections")
	f.BoolVar(&o.require, "require", false, "a client fails where it would fall back to TCP")
}

// engineStack is our engine.
type engineStack struct {
	o       *engineOptions
	out     *output
	option  *synopt.Option
	devices []device
	stack   *smcr.Stack
}

func openEngine(o *engineOptions, out *output) (_ *engineStack, err error) {
	e := &engineStack{o: o, out: out}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.release())
		}
	}()
	if e.option, err = synopt.Open(synopt.Config{Mark: optionMark}); err != nil {
		return nil, err
	}
	mtu, err := pathMTU(o.mtu)
	if err != nil {
		return nil, err
	}
	for name := range strings.SplitSeq(o.devices, ",") {
		d, err := openDevice(name, mtu)
		if err != nil {
			return nil, err
		}
		e.devices = append(e.devices, d)
	}
	cfg, err := o.config()
	if err != nil {
		return nil, err
	}
	for _, d := range e.devices {
		cfg.Devices = append(cfg.Devices, d)
	}
	cfg.Option, cfg.Hooks = e.option, e.hooks()
	if e.stack, err = smcr.NewStack(cfg); err != nil {
		return nil, err
	}
	if o.deviceless {
		return e, e.loseDevices()
	}
	return e, nil
}

// loseDevices closes the devices, and returns when the stack knows.
func (e *engineStack) loseDevices() error {
	for _, d := range e.devices {
		if err := d.Close(); err != nil {
			return err
		}
		// One that the stack has is not added again, and this one cannot be.
		for end := time.Now().Add(settleTime); e.stack.AddDevice(d) == nil; {
			if time.Now().After(end) {
				return fmt.Errorf("the stack has not noticed in %v that %s is gone", settleTime, d.Name())
			}
			time.Sleep(time.Millisecond) // polls the stack's devices
		}
	}
	e.devices = nil
	return nil
}

// pathMTU is the code of a path MTU of so many bytes, 0 for 0.
func pathMTU(bytes int) (rdma.MTU, error) {
	for m := rdma.MTU(1); m.Valid(); m++ {
		if m.Bytes() == bytes {
			return m, nil
		}
	}
	if bytes != 0 {
		return 0, usageError{fmt.Sprintf("-mtu %d: want 256, 512, 1024, 2048 or 4096", bytes)}
	}
	return 0, nil
}

// device is a device that we have opened.
type device interface {
	rdma.Device
	Close() error
}

func openDevice(name string, mtu rdma.MTU) (device, error) {
	kind, what, _ := strings.Cut(name, ":")
	switch kind {
	case "soft":
		addr, err := netip.ParseAddr(what)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", name, err)
		}
		return soft.Open(soft.Config{Name: name, Addr: addr, MTU: mtu})
	case "verbs":
		return verbs.Open(verbs.Config{Name: what})
	default:
		return nil, usageError{fmt.Sprintf("-device %q: want soft:ADDRESS or verbs:NAME", name)}
	}
}

// config is what does not need devices.
func (o *engineOptions) config() (smcr.Config, error) {
	cfg := smcr.Config{
		RMBESizeBytes: o.rmbe, MemoryBytes: o.memory, ConnsPerGroup: o.conns, LinksPerGroup: o.links, MaxConns: o.maxConns,
		IdleGroupTimeout: o.idle, CloseTimeout: o.closeTimeout, MessageTimeout: o.message,
	}
	switch o.versions {
	case "both":
		cfg.Versions = smcr.VersionsBoth
	case "v1":
		cfg.Versions = smcr.VersionsV1
	case "v2":
		cfg.Versions = smcr.VersionsV2
	default:
		return cfg, usageError{fmt.Sprintf("-versions %q: want both, v1 or v2", o.versions)}
	}
	for id := range strings.SplitSeq(o.eids, ",") {
		eid, err := clc.ParseUEID(id)
		if err != nil {
			return cfg, err
		}
		cfg.EIDs = append(cfg.EIDs, eid)
	}
	name, err := os.Hostname()
	if err != nil {
		return cfg, err
	}
	cfg.Hostname = name
	return cfg, nil
}

func (e *engineStack) hooks() smcr.Hooks {
	wrong := func(where string, err error) {
		e.out.line(report.Line{Malformed: fmt.Sprintf("%s: %v", where, err)})
	}
	return smcr.Hooks{
		GroupChanged: func(g smcr.GroupInfo) { e.out.line(report.Line{Group: report.GroupOf(g)}) },
		Malformed:    wrong,
		Failed:       wrong, // tests expect none of either
	}
}

func (e *engineStack) dial(ctx context.Context, to string) (script.Conn, error) {
	c, err := (&smcr.Dialer{Stack: e.stack, Require: e.o.require}).DialContext(ctx, "tcp", to)
	if err != nil {
		return nil, err
	}
	return c.(*smcr.Conn), nil
}

// listen accepts by itself and not with smcr.Listen, so that it can decline.
func (e *engineStack) listen(ctx context.Context, addr string) (listener, error) {
	lc := net.ListenConfig{Control: e.option.ControlListen}
	lc.SetMultipathTCP(false)
	if e.o.decline == 0 {
		l, err := smcr.Listen(ctx, e.stack, "tcp", addr)
		if err != nil {
			return nil, err
		}
		return engineListener{l}, nil
	}
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return &decliningListener{e: e, l: l}, nil
}

func (e *engineStack) describe(conns []*openConn) {
	for _, c := range conns {
		c.about.Engine = report.EngineOf(c.Conn.(*smcr.Conn).Info())
	}
}

// close waits for the peers' part in the end of the connections.
func (e *engineStack) close(end *report.End) error {
	for until := time.Now().Add(settleTime); len(e.stack.Conns()) > 0 && time.Now().Before(until); {
		time.Sleep(5 * time.Millisecond)
	}
	end.Left = len(e.stack.Conns())
	for _, g := range e.stack.LinkGroups() {
		end.Groups = append(end.Groups, *report.GroupOf(g))
	}
	before := e.stack.Stats()
	err := e.release()
	after := e.stack.Stats()
	end.Stats, end.Closed = &before, &after
	return err
}

// release closes in the order of use.
func (e *engineStack) release() error {
	var err error
	if e.stack != nil {
		err = e.stack.Close()
	}
	for _, d := range e.devices {
		err = errors.Join(err, d.Close())
	}
	if e.option != nil {
		err = errors.Join(err, e.option.Close())
	}
	return err
}

type engineListener struct{ l *smcr.Listener }

func (l engineListener) accept() (script.Conn, error) {
	c, err := l.l.Accept()
	if err != nil {
		return nil, err
	}
	return c.(*smcr.Conn), nil
}

func (l engineListener) addr() string { return l.l.Addr().String() }

func (l engineListener) close() error { return l.l.Close() }

// decliningListener says no to every proposal, one after the other.
type decliningListener struct {
	e *engineStack
	l net.Listener
}

func (l *decliningListener) accept() (script.Conn, error) {
	c, err := l.l.Accept()
	if err != nil {
		return nil, err
	}
	conn, err := l.e.stack.ServerDecline(context.Background(), c.(*net.TCPConn), clc.Reason(l.e.o.decline))
	if err != nil {
		return nil, err
	}
	return conn, nil
}

func (l *decliningListener) addr() string { return l.l.Addr().String() }

func (l *decliningListener) close() error { return l.l.Close() }
