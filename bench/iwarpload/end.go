// SPDX-License-Identifier: Apache-2.0

package iwarpload

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/bench/load"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

const (
	regionBytes = 1 << 20 // of a region
	depth       = 4       // messages of a stream under way
	queue       = 32
	signal      = 8 // one of so many SENDs has a completion

	// answerBytes is how much of a message the server sends back: all that a round trip has, and of a
	// stream's enough to tell that it came.
	answerBytes = 64

	// regionLen is the length of what the server tells of its region: address and key.
	regionLen = 12

	// Patience is how long a client waits for a completion.
	Patience = 20 * time.Second
)

// End is one end of a connection. It is owned by one goroutine.
type End struct {
	rdma.Context
	QP rdma.QP // in INIT, with its receives posted

	cq     rdma.CQ
	mr     rdma.MR
	inline bool        // SENDs are
	late   *time.Timer // nil: it waits as long as the queue pair lives
	wcs    [16]rdma.WC
	recv   [1]rdma.RecvWR
	send   [1]rdma.SendWR
	sge    [1]rdma.SGE
	sent   int
}

// NewEnd makes an end on a device. Its region has all rights, and more: [rdma.StableRead] or nothing.
func NewEnd(d rdma.Device, more rdma.Access) (e *End, err error) {
	e = &End{inline: d.Attr().MaxInline > 0}
	if e.Context, err = d.Open(); err != nil {
		return nil, err
	}
	const access = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	pd, err := e.AllocPD()
	if err == nil {
		e.cq, err = e.CreateCQ(4 * queue)
	}
	if err == nil {
		e.mr, err = pd.AllocMR(regionBytes, access|more)
	}
	if err == nil {
		e.QP, err = pd.CreateQP(rdma.QPConfig{SendCQ: e.cq, RecvCQ: e.cq, MaxSendWR: queue, MaxRecvWR: queue})
	}
	if err == nil {
		err = e.QP.Modify(rdma.QPAttr{State: rdma.QPInit, Access: access})
	}
	for range queue {
		if err == nil {
			err = e.postRecv()
		}
	}
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

func (e *End) postRecv() error {
	e.recv[0] = rdma.RecvWR{SGE: rdma.SGE{Addr: e.mr.Addr(), Length: regionBytes, LKey: e.mr.LKey()}}
	_, err := e.QP.PostRecv(e.recv[:])
	return err
}

// postSend sends the first n bytes of the region, inline where the device can.
func (e *End) postSend(n int) error {
	e.send[0] = rdma.SendWR{Op: rdma.OpSend}
	if e.inline {
		e.send[0].Flags, e.send[0].Inline = rdma.SendInline, e.mr.Bytes()[:n]
	} else {
		e.sge[0] = rdma.SGE{Addr: e.mr.Addr(), Length: uint32(n), LKey: e.mr.LKey()}
		e.send[0].SGL = e.sge[:]
	}
	if e.sent%signal == 0 {
		e.send[0].Flags |= rdma.SendSignaled
	}
	e.sent++
	_, err := e.QP.PostSend(e.send[:])
	return err
}

// piece is the beginning of the region.
func (e *End) piece(n int) []rdma.SGE {
	return []rdma.SGE{{Addr: e.mr.Addr(), Length: uint32(n), LKey: e.mr.LKey()}}
}

// wait returns completions, at least one, all of them good.
func (e *End) wait() ([]rdma.WC, error) {
	for armed := false; ; armed = !armed {
		n, err := e.cq.Poll(e.wcs[:])
		if err != nil {
			return nil, err
		}
		for i := range n {
			if w := &e.wcs[i]; w.Status != rdma.StatusSuccess {
				return nil, fmt.Errorf("%v: %v", w.Op, w.Status)
			}
		}
		switch {
		case n > 0:
			return e.wcs[:n], nil
		case !armed:
			err = e.cq.Arm(false)
		case e.late == nil:
			<-e.cq.Notify()
		default:
			select {
			case <-e.cq.Notify():
			case <-e.late.C:
				err = fmt.Errorf("no completion after %v", Patience)
			}
		}
		if err != nil {
			return nil, err
		}
	}
}

// Region is what the server tells the client of its region, in its private data.
func (e *End) Region() []byte {
	b := binary.BigEndian.AppendUint64(nil, e.mr.Addr())
	return binary.BigEndian.AppendUint32(b, uint32(e.mr.RKey()))
}

// Answer is the server: it sends every message back, of a long one the beginning, until the connection ends,
// which is its error.
func (e *End) Answer() error {
	for {
		wcs, err := e.wait()
		if err != nil {
			return err
		}
		for _, wc := range wcs {
			if wc.Op != rdma.OpRecv {
				continue
			}
			if err := errors.Join(e.postRecv(), e.postSend(min(int(wc.Bytes), answerBytes))); err != nil {
				return err
			}
		}
	}
}

// Load is the client: it makes a load. Streams go to the server's region by WRITE, come from there by READ, or
// go into its receives by SEND.
func (e *End) Load(l load.Load, op rdma.Opcode, region []byte) (load.Result, error) {
	if len(region) != regionLen {
		return load.Result{}, fmt.Errorf("server tells of its region in %d bytes, want %d", len(region), regionLen)
	}
	e.late = time.NewTimer(Patience)
	defer e.late.Stop()
	if l.Kind == load.Echo {
		return e.echo(l)
	}
	s := &stream{End: e, message: []rdma.SendWR{{Op: op, Flags: rdma.SendSignaled, SGL: e.piece(l.SizeBytes)}}, done: op}
	if op == rdma.OpSend {
		s.done = rdma.OpRecv
	} else {
		s.message[0].RemoteAddr, s.message[0].RKey = binary.BigEndian.Uint64(region), rdma.RKey(binary.BigEndian.Uint32(region[8:]))
	}
	return s.run(l)
}

// echo sends messages and waits for each to come back.
func (e *End) echo(l load.Load) (r load.Result, err error) {
	turn := func() error {
		if err := e.postSend(l.SizeBytes); err != nil {
			return err
		}
		for {
			wcs, err := e.wait()
			if err != nil {
				return err
			}
			for _, wc := range wcs {
				if wc.Op == rdma.OpRecv {
					return e.postRecv() // there is one message at a time: nothing comes behind it but completions of SENDs
				}
			}
		}
	}
	return l.RoundTrips(turn)
}

// stream moves messages to or from the server.
type stream struct {
	*End
	message  []rdma.SendWR
	done     rdma.Opcode // what completes when a message is: the server answers each SEND
	underway int
}

// run makes the load. It ends when all has arrived: a READ behind the last WRITE says so.
func (s *stream) run(l load.Load) (r load.Result, err error) {
	begin := time.Now()
	for time.Since(begin) < l.Duration {
		if err := s.post(s.message); err != nil {
			return r, err
		}
		r.Ops++
	}
	if err := s.await(0); err != nil {
		return r, err
	}
	if w := s.message[0]; w.Op == rdma.OpWrite {
		w.Op, w.SGL, s.done = rdma.OpRead, s.piece(1), rdma.OpRead
		if err := errors.Join(s.post([]rdma.SendWR{w}), s.await(0)); err != nil {
			return r, err
		}
	}
	r.Bytes, r.Elapsed = int64(r.Ops)*int64(l.SizeBytes), time.Since(begin)
	return r, nil
}

// post posts a message once there is room.
func (s *stream) post(wrs []rdma.SendWR) error {
	if err := s.await(depth - 1); err != nil {
		return err
	}
	s.underway++
	_, err := s.QP.PostSend(wrs)
	return err
}

// await waits until at most so many messages are under way.
func (s *stream) await(most int) error {
	for s.underway > most {
		wcs, err := s.wait()
		if err != nil {
			return err
		}
		for _, wc := range wcs {
			if wc.Op == s.done {
				s.underway--
			}
			if wc.Op == rdma.OpRecv {
				err = errors.Join(err, s.postRecv())
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
