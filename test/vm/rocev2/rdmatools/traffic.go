// SPDX-License-Identifier: Apache-2.0

package rdmatools

import (
	"context"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// pollEvery is the pause between two looks at memory that the peer writes.
const pollEvery = 100 * time.Microsecond

// traffic does what the program does once it is connected.
func (e *end) traffic() error {
	switch e.Tool {
	case PingPong, SendLat:
		return e.dialogue()
	case WriteLat:
		return e.memoryDialogue()
	case WriteBW, ReadBW, SendBW, ReadLat:
	}
	if e.Client {
		return e.stream()
	}
	return e.swallow()
}

// receives is how many messages the peer sends us.
func (e *end) receives() int {
	switch e.Tool {
	case PingPong, SendLat:
		return e.Iters
	case SendBW:
		if !e.Client {
			return e.Iters
		}
	case WriteBW, WriteLat, ReadBW, ReadLat:
	}
	return 0
}

func (e *end) sge() rdma.SGE {
	return rdma.SGE{Addr: e.mr.Addr(), Length: uint32(e.SizeBytes), LKey: e.mr.LKey()}
}

// receive posts n buffers. They share the second half of the memory.
func (e *end) receive(n int) error {
	s := e.sge()
	s.Addr += uint64(len(e.mr.Bytes()) / 2)
	for range n {
		if _, err := e.qp.PostRecv([]rdma.RecvWR{{SGE: s}}); err != nil {
			return err
		}
	}
	return nil
}

func (e *end) post(op rdma.Opcode) error {
	_, err := e.qp.PostSend([]rdma.SendWR{{
		Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e.sge()}, RemoteAddr: e.remote.addr, RKey: e.remote.rkey,
	}})
	return err
}

// stream posts all iterations, some at a time: one in ib_read_lat.
func (e *end) stream() error {
	op, under := rdma.OpSend, depth
	switch e.Tool {
	case WriteBW:
		op = rdma.OpWrite
	case ReadBW:
		op = rdma.OpRead
	case ReadLat:
		op, under = rdma.OpRead, 1
	case PingPong, WriteLat, SendBW, SendLat:
	}
	for posted, completed := 0, 0; completed < e.Iters; {
		for ; posted < e.Iters && posted-completed < under; posted++ {
			if err := e.post(op); err != nil {
				return err
			}
		}
		n, err := e.await(e.send)
		if err != nil {
			return fmt.Errorf("%v %d of %d: %w", op, completed, e.Iters, err)
		}
		completed += n
	}
	return nil
}

// swallow takes what the peer sends; WRITE and READ need nobody.
func (e *end) swallow() error {
	want := e.receives()
	for posted, got := min(want, depth), 0; got < want; {
		n, err := e.await(e.recv)
		if err != nil {
			return fmt.Errorf("receive %d of %d: %w", got, want, err)
		}
		got += n
		again := min(n, want-posted)
		if err := e.receive(again); err != nil {
			return err
		}
		posted += again
	}
	return nil
}

// dialogue answers each message with one; the client begins.
func (e *end) dialogue() error {
	for i := range e.Iters {
		for _, sends := range []bool{e.Client, !e.Client} {
			if sends {
				if err := e.post(rdma.OpSend); err != nil {
					return err
				}
				continue
			}
			if _, err := e.await(e.recv); err != nil {
				return fmt.Errorf("receive %d of %d: %w", i, e.Iters, err)
			}
			if i+depth < e.Iters {
				if err := e.receive(1); err != nil {
					return err
				}
			}
		}
		if _, err := e.await(e.send); err != nil {
			return fmt.Errorf("send %d of %d: %w", i, e.Iters, err)
		}
	}
	return nil
}

// memoryDialogue is ib_write_lat: each side writes its count into the last byte
// of the other's memory and looks at its own until the answer is there. It is the
// server that begins.
func (e *end) memoryDialogue() error {
	last := &e.mr.Bytes()[e.SizeBytes-1]
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	// What is sent must not be what is received: it is sent from elsewhere.
	from := e.sge()
	from.Addr += uint64(len(e.mr.Bytes()) / 2)
	source := &e.mr.Bytes()[len(e.mr.Bytes())/2+e.SizeBytes-1]
	for i := range e.Iters {
		count := byte(i + 1)
		for _, writes := range []bool{!e.Client, e.Client} {
			if !writes {
				for *last != count { // polls the byte that the peer's WRITE ends with
					select {
					case <-tick.C:
					case <-e.ctx.Done():
						return fmt.Errorf("write %d of the peer is not in our memory: %w", i, context.Cause(e.ctx))
					}
				}
				continue
			}
			*source = count
			if _, err := e.qp.PostSend([]rdma.SendWR{{
				Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{from},
				RemoteAddr: e.remote.addr, RKey: e.remote.rkey,
			}}); err != nil {
				return err
			}
			if _, err := e.await(e.send); err != nil {
				return fmt.Errorf("write %d of %d: %w", i, e.Iters, err)
			}
		}
	}
	return nil
}

// await polls one or more completions and fails if one did not succeed.
func (e *end) await(q rdma.CQ) (int, error) {
	var wcs [depth]rdma.WC
	for armed := false; ; armed = !armed {
		n, err := q.Poll(wcs[:])
		if err != nil {
			return 0, err
		}
		for _, w := range wcs[:n] {
			if w.Status != rdma.StatusSuccess {
				return 0, fmt.Errorf("%v completes with %v", w.Op, w.Status)
			}
		}
		if n > 0 {
			return n, nil
		}
		if !armed { // and look once more
			if err := q.Arm(false); err != nil {
				return 0, err
			}
			continue
		}
		select {
		case <-q.Notify():
		case <-e.ctx.Done():
			return 0, fmt.Errorf("await a completion: %w", context.Cause(e.ctx))
		}
	}
}
