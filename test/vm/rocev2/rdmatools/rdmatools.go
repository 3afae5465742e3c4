// SPDX-License-Identifier: Apache-2.0

package rdmatools

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

// Tool is a program whose other end this package plays; its text is the
// program's name.
type Tool string

// Tools.
const (
	PingPong Tool = "ibv_rc_pingpong"
	WriteBW  Tool = "ib_write_bw"
	WriteLat Tool = "ib_write_lat"
	ReadBW   Tool = "ib_read_bw"
	ReadLat  Tool = "ib_read_lat"
	SendBW   Tool = "ib_send_bw"
	SendLat  Tool = "ib_send_lat"
)

// Tools returns them all.
func Tools() []Tool { return []Tool{PingPong, WriteBW, WriteLat, ReadBW, ReadLat, SendBW, SendLat} }

// Port is the TCP port of all of them.
const Port = 18515

const (
	depth   = 16      // requests under way
	maxSize = 8 << 20 // of a message; the memory is twice that

	// The programs' own values, but for the timeout, which is 67 ms there and 0.5 s
	// here: the peer may be emulated.
	ackTimeout, retries, rnrRetries = 17, 7, 7
	minRNRTimer                     = 12
)

// Config says what to do. Iters and SizeBytes are the programs' -n and -s.
type Config struct {
	Tool      Tool
	Client    bool
	Iters     int
	SizeBytes int
	// MTU of the queue pair; 0: the port's. Towards perftest it is the smaller
	// of both sides'.
	MTU rdma.MTU
	// PSN is the first that we send.
	PSN rdma.PSN
	// Linger is called when our part is done and before the queue pair ends: the
	// peer may have missed an answer and would repeat a message to nobody, which
	// rxe does for ever. Nil: no wait.
	Linger func(ctx context.Context)
}

func (c *Config) validate() error {
	switch {
	case c.Iters < 1 || c.SizeBytes < 1 || c.SizeBytes > maxSize:
		return fmt.Errorf("%s: %d iterations of %d bytes: want at least 1 of 1 to %d", c.Tool, c.Iters, c.SizeBytes, maxSize)
	case c.PSN > rdma.PSNMask:
		return fmt.Errorf("%s: PSN %#x has more than 24 bits", c.Tool, uint32(c.PSN))
	}
	if !slices.Contains(Tools(), c.Tool) {
		return fmt.Errorf("no program %q: want one of %v", c.Tool, Tools())
	}
	return nil
}

// Report is what a run did.
type Report struct {
	Tool      Tool
	Client    bool
	LocalQPN  rdma.QPN
	RemoteQPN rdma.QPN
	MTU       rdma.MTU
	// Stats are the queue pair's counters, of a device that has them.
	Stats rocev2.Stats
}

// counting is a device that counts for each queue pair; soft does.
type counting interface {
	QPStats(n rdma.QPN) (rocev2.Stats, bool)
}

// end is our end of a run.
type end struct {
	Config
	turns
	dev        rdma.Device
	ctx        context.Context //nolint:containedctx // an end is one call of Run
	rctx       rdma.Context
	send, recv rdma.CQ
	mr         rdma.MR
	qp         rdma.QP
	local      keys
	remote     keys
}

// Run plays one run over conn, which it does not close.
func Run(ctx context.Context, conn net.Conn, dev rdma.Device, c Config) (r Report, err error) {
	if err := c.validate(); err != nil {
		return r, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			err = errors.Join(err, context.Cause(ctx))
		}
	}()
	e := &end{Config: c, turns: turns{conn, c.Client}, dev: dev, ctx: ctx}
	if err := e.open(); err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, e.rctx.Close()) }()
	err = e.run()
	if err == nil && c.Linger != nil {
		c.Linger(ctx)
	}
	r = Report{Tool: c.Tool, Client: c.Client, LocalQPN: e.qp.Num(), RemoteQPN: e.remote.qpn, MTU: e.MTU}
	if d, ok := dev.(counting); ok {
		r.Stats, _ = d.QPStats(e.qp.Num())
	}
	if err != nil {
		err = fmt.Errorf("play %s: %w", c.Tool, err)
	}
	return r, err
}

func (e *end) open() (err error) {
	if e.rctx, err = e.dev.Open(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.rctx.Close())
		}
	}()
	pd, err := e.rctx.AllocPD()
	if err != nil {
		return err
	}
	if e.send, err = e.rctx.CreateCQ(2 * depth); err != nil {
		return err
	}
	if e.recv, err = e.rctx.CreateCQ(2 * depth); err != nil {
		return err
	}
	all := rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	if e.mr, err = pd.AllocMR(2*max(e.SizeBytes, cycleBuffer), all); err != nil {
		return err
	}
	e.qp, err = pd.CreateQP(rdma.QPConfig{SendCQ: e.send, RecvCQ: e.recv, MaxSendWR: depth, MaxRecvWR: depth})
	if err != nil {
		return err
	}
	if err = e.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: all}); err != nil {
		return err
	}
	e.MTU = cmp.Or(e.MTU, e.dev.Port().ActiveMTU)
	e.local = keys{
		reads: rocev2.MaxReads, qpn: e.qp.Num(), psn: e.PSN, rkey: e.mr.RKey(), addr: e.mr.Addr(), gid: e.dev.GIDs()[0].GID,
	}
	return e.receive(min(e.receives(), depth))
}

func (e *end) connect() error {
	gid := e.dev.GIDs()[0]
	if err := e.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTR, DestQPN: e.remote.qpn, RQPSN: e.remote.psn, MTU: e.MTU, MinRNRTimer: minRNRTimer,
		Path: rdma.Path{SGIDIndex: gid.Index, DGID: e.remote.gid, HopLimit: 64},
	}); err != nil {
		return err
	}
	return e.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTS, SQPSN: e.PSN, Timeout: ackTimeout, RetryCount: retries, RNRRetry: rnrRetries,
	})
}

func (e *end) run() error {
	meet, part := e.meetPerftest, e.partPerftest
	if e.Tool == PingPong {
		meet, part = e.meetPingpong, func() error { return nil }
	}
	if err := meet(); err != nil {
		return err
	}
	if err := e.traffic(); err != nil {
		return err
	}
	return part()
}

// meetPingpong connects with an ibv_rc_pingpong.
func (e *end) meetPingpong() error {
	err := e.take("the peer's queue pair", e.local.pingpong(), func(in []byte) (err error) {
		if e.remote, err = parsePingpong(in); err != nil {
			return err
		}
		return e.connect()
	})
	switch {
	case err != nil:
		return err
	case e.Client:
		return e.put("the end mark", done)
	}
	return e.awaitDone()
}

// meetPerftest connects with a program of perftest.
func (e *end) meetPerftest() error {
	v := make([]byte, 16)
	copy(v, version)
	for _, turn := range []struct {
		what string
		out  []byte
		then func([]byte) error
	}{
		{"the version", v, nil},
		{"the cycle buffer's size", binary.BigEndian.AppendUint32(nil, cycleBuffer), nil},
		{"the cache line's size", binary.BigEndian.AppendUint32(nil, cacheLine), nil},
		{"the path MTU", []byte{'0' + byte(e.MTU), 0}, func(in []byte) error {
			theirs := rdma.MTU(in[0] - '0')
			if !theirs.Valid() {
				return fmt.Errorf("exchange: path MTU code %q, want a digit from 1 to 5", in)
			}
			e.MTU = min(e.MTU, theirs)
			return nil
		}},
		{"the peer's queue pair", e.local.perftest(), func(in []byte) (err error) {
			if e.remote, err = parsePerftest(in); err != nil {
				return err
			}
			return e.connect()
		}},
	} {
		if err := e.take(turn.what, turn.out, turn.then); err != nil {
			return err
		}
	}
	for range 3 {
		if err := e.take("that the peer is ready", e.local.perftest(), nil); err != nil {
			return err
		}
	}
	return nil
}

// partPerftest ends a run as the program does.
func (e *end) partPerftest() error {
	switch e.Tool {
	case WriteLat:
		return nil
	case WriteBW, ReadBW: // the client's size, iterations, bandwidths and rate
		for i := range 5 {
			out := make([]byte, 8)
			if v := []int{e.SizeBytes, e.Iters}; e.Client && i < len(v) {
				binary.BigEndian.PutUint64(out, uint64(v[i]))
			}
			if err := e.take("the client's results", out, nil); err != nil {
				return err
			}
		}
	case PingPong, ReadLat, SendBW, SendLat:
	}
	if err := e.take("that the peer is done", e.local.perftest(), nil); err != nil {
		return err
	}
	if err := e.put("the end mark", done); err != nil {
		return err
	}
	return e.awaitDone()
}
