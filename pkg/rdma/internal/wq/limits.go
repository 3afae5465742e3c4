// SPDX-License-Identifier: Apache-2.0

package wq

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

const (
	// MaxQueue bounds the send and the receive queue, so that no
	// configuration can ask for absurd memory.
	MaxQueue = 1 << 16

	// MaxMessage is the longest message of one work request, in bytes, that IBTA 9.3.3
	// allows. Protocols that have no bound of their own keep to it.
	MaxMessage = 1 << 31
)

// Limits are what a queue pair lets a work request ask for. They are constant, so that
// everybody may check, also who does not own the queue pair.
type Limits struct {
	SGEs    int    // pieces of a SEND or WRITE; a READ has one
	Inline  int    // bytes that SendInline copies
	Message uint64 // bytes of a message

	// What not every protocol has.

	WriteImm   bool // [rdma.OpWriteImm]
	Read       bool // [rdma.OpRead]
	Invalidate bool // [rdma.SendInvalidate]
	SendImm    bool // [rdma.SendImm]
	Solicited  bool // [rdma.SendSolicited]
}

// LimitsOf returns what a device with these capabilities lets work requests of a
// queue pair ask for that was made for a number of SGEs.
func LimitsOf(a rdma.DeviceAttr, sges int) Limits {
	return Limits{
		SGEs: sges, Inline: a.MaxInline, Message: MaxMessage,
		WriteImm: a.WriteWithImm, Read: a.RDMARead, Invalidate: a.SendWithInv, SendImm: a.SendWithImm,
		Solicited: a.Solicited,
	}
}

const (
	anySend  = rdma.SendSignaled | rdma.SendSolicited | rdma.SendInline
	onlySend = rdma.SendInvalidate | rdma.SendImm // of OpSend only
)

// Check returns the length of a work request's message in bytes, or why it is refused:
// [rdma.ErrInvalid], or [rdma.ErrNotSupported] for what other devices can do. What it
// lets pass completes, if only with an error.
func (l *Limits) Check(wr *rdma.SendWR) (uint32, error) {
	sges := l.SGEs
	switch wr.Op {
	case rdma.OpSend, rdma.OpWrite:
	case rdma.OpWriteImm:
		if !l.WriteImm {
			return 0, notSupported(wr)
		}
	case rdma.OpRead:
		if !l.Read {
			return 0, notSupported(wr)
		}
		sges = 1
	default:
		return 0, fmt.Errorf("post %v as a send: %w", wr.Op, rdma.ErrInvalid)
	}
	if wr.Flags&^anySend != 0 {
		if err := l.checkFlags(wr); err != nil {
			return 0, err
		}
	}
	if wr.Flags&rdma.SendSolicited != 0 && !l.Solicited {
		return 0, notSupported(wr)
	}
	var n uint64
	if wr.Flags&rdma.SendInline != 0 {
		if wr.Op == rdma.OpRead || len(wr.SGL) != 0 || len(wr.Inline) > l.Inline {
			return 0, fmt.Errorf("post %v with %d bytes inline and %d SGEs, want at most %d bytes and no SGE: %w",
				wr.Op, len(wr.Inline), len(wr.SGL), l.Inline, rdma.ErrInvalid)
		}
		n = uint64(len(wr.Inline))
	} else {
		if len(wr.SGL) > sges || len(wr.Inline) != 0 {
			return 0, fmt.Errorf("post %v with %d SGEs and %d inline bytes, want at most %d SGEs, and no inline bytes without SendInline: %w",
				wr.Op, len(wr.SGL), len(wr.Inline), sges, rdma.ErrInvalid)
		}
		for i := range wr.SGL {
			n += uint64(wr.SGL[i].Length)
		}
	}
	if n > l.Message {
		return 0, fmt.Errorf("post %v of %d bytes, want at most %d: %w", wr.Op, n, l.Message, rdma.ErrInvalid)
	}
	return uint32(n), nil
}

// checkFlags checks the flags that not every work request or device has.
func (l *Limits) checkFlags(wr *rdma.SendWR) error {
	f := wr.Flags &^ anySend
	switch {
	case f&^onlySend != 0:
		return fmt.Errorf("post %v with unknown flags %#x: %w", wr.Op, f&^onlySend, rdma.ErrInvalid)
	case wr.Op != rdma.OpSend || f == onlySend:
		return fmt.Errorf("post %v with flags %#x, of which a SEND may have one: %w", wr.Op, f, rdma.ErrInvalid)
	case f == rdma.SendInvalidate && !l.Invalidate, f == rdma.SendImm && !l.SendImm:
		return notSupported(wr)
	}
	return nil
}

func notSupported(wr *rdma.SendWR) error {
	return fmt.Errorf("post %v with flags %#x: %w", wr.Op, wr.Flags, rdma.ErrNotSupported)
}
