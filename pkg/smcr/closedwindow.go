// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"time"

	"golang.org/x/sys/unix"
)

// Linux may forget that a program with a full receive buffer can still send. When the last
// segment that its window allowed finds no memory, the kernel drops the segment, closes the
// window, and refuses from then on (since 6.17) whatever lies behind the segment that it
// dropped, which includes every acknowledgement:
//
//	the program's kernel                         the relay's kernel
//	reply 115981..116135           ------------> within the window; no memory: dropped
//	                               <------------ window 0
//	acknowledges requests,                       behind 115981: refused, the window
//	"my window is 105 KiB"         ------------> update with it
//
// The relay cannot read on, since nobody takes the replies, so the requests stand still too,
// though the program waits for them: a client that pipelines and reads later would hang for
// ever. A receive buffer that is an eighth larger lets the dropped segment in.

const (
	// closedAfter is how long nothing of what a socket has sent must have been acknowledged
	// until its receive buffer grows. The time doubles with each further growth that changes
	// nothing.
	closedAfter = 500 * time.Millisecond
	// reopenShare is the part of the receive buffer by which that grows, and maxReopens how
	// often it does, so that it is never more than twice what it was. Linux closes its window
	// with 1/16 of the buffer left, so less does not help. Most connections need it once, for
	// afterwards the window closes in order. A program that does not read either looks the
	// same from here, so such a connection gets its maxStill of them, too.
	reopenShare = 8
	maxReopens  = 8
	maxStill    = 3
)

// reopener makes room where what a socket sends stands still.
type reopener struct {
	unacked int // bytes, at the last look
	since   time.Time
	still   int // how often the buffer has grown since then
	times   int // in all
	first   int // size of the buffer at first
}

// look is called repeatedly while nobody reads the socket, which has bytes to read.
func (r *reopener) look(fd int, now time.Time) {
	unacked, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return // the connection is about to end
	}
	if unacked == 0 || unacked != r.unacked {
		r.unacked, r.since, r.still = unacked, now, 0
		return
	}
	if r.still == maxStill || r.times == maxReopens || now.Sub(r.since) < closedAfter<<r.still {
		return
	}
	r.still++
	r.times++
	r.grow(fd)
}

// grow makes a receive buffer larger. Without CAP_NET_ADMIN the kernel's limit applies.
func (r *reopener) grow(fd int) {
	size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return
	}
	if r.first == 0 {
		r.first = size
	}
	// The kernel doubles the value, to allow for what its buffers cost.
	size = (size + r.first/reopenShare) / 2
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size)
	}
}
