// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// Machine is the protocol of a queue pair. Whoever owns the queue pair calls it; only
// Limits is for everybody.
type Machine interface {
	// Limits returns what PostSend takes. They are constant.
	Limits() wq.Limits
	State() rdma.QPState
	// Modify does what [rdma.QP] says.
	Modify(now time.Time, a rdma.QPAttr) error
	// PostSend and PostRecv queue work requests in order and return how many were taken,
	// fewer than all only with an error: ErrState; ErrQueueFull, until completions are
	// polled; or what Limits refuse.
	PostSend(now time.Time, wrs []rdma.SendWR) (int, error)
	PostRecv(wrs []rdma.RecvWR) (int, error)
	// PollWC moves completions to dst, in order, and returns how many; PollEvent returns
	// the next asynchronous event.
	PollWC(dst []wq.Completion) int
	PollEvent() (rdma.AsyncEvent, bool)
	// NextTimeout returns when HandleTimeout is due next, if ever.
	NextTimeout() (time.Time, bool)
	HandleTimeout(now time.Time)
	// ForgetMemory drops all memory that was resolved: a region is closing. What was not
	// done yet is resolved, and refused, anew.
	ForgetMemory(now time.Time)
}

// Carrier is a provider's queue pair: a [QP] that it embeds, the protocol, and the way to
// the peer. But for those of [rdma.QP] and CheckModify its methods are called by the owner of
// the queue pair, and not after Drop at its end. A provider with goroutines of its own for a
// queue pair has a Close of its own that calls that of QP and then waits for them: what
// closes contexts calls it too.
type Carrier interface {
	rdma.QP
	base() *QP // by the embedded QP

	// Machine returns the protocol, always the same.
	Machine() Machine
	// CheckModify refuses attributes for reasons that the protocol does not know.
	CheckModify(a rdma.QPAttr) error
	// Modified is told of a transition that the protocol took because of Modify.
	Modified(a rdma.QPAttr)
	// Transmit sends what the protocol has to send, as far as the wire takes it.
	Transmit(now time.Time)
	// Retry returns when Transmit is to be called again because the wire was full, or others had
	// to have their turn; zero: no need.
	Retry() time.Time
	// SayLast sends what the peer has to learn before the protocol forgets it by a reset, or
	// the end of the queue pair.
	SayLast(now time.Time)
	// Drop forgets what the wire has not taken: the queue pair was reset, or is at its end.
	Drop()
	// ForgetMemory drops of what the wire has not taken all that refers to registered
	// memory.
	ForgetMemory()
}
