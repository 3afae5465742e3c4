// SPDX-License-Identifier: Apache-2.0

package tcpqp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vector is the pieces of memory of one system call, which x/sys would allocate anew for
// each. Its owner empties it after the call: the kernel keeps no reference.
type vector struct {
	pieces []unix.Iovec
	msg    unix.Msghdr
	calls  uint
}

// quietCalls: of so many system calls one is ordinary. A process that goes on working needs the
// runtime's monitor at times, which polls the network and preempts, and which sleeps since the process
// was last idle until a call wakes it that the runtime sees.
const quietCalls = 256

// fill makes the vector name the pieces, as many as one system call takes.
func (v *vector) fill(pieces [][]byte) {
	v.pieces = v.pieces[:0]
	for _, p := range pieces[:min(len(pieces), maxPieces)] {
		e := unix.Iovec{Base: unsafe.SliceData(p)}
		e.SetLen(len(p))
		v.pieces = append(v.pieces, e)
	}
	v.msg.Iov = unsafe.SliceData(v.pieces)
	v.msg.SetIovlen(len(v.pieces))
}

// forget drops the references to the pieces.
func (v *vector) forget() { clear(v.pieces[:cap(v.pieces)]) }

// receive reads what there is, and does not wait.
func (v *vector) receive(fd int, pieces [][]byte) (int, error) {
	return v.call(unix.SYS_RECVMSG, fd, pieces)
}

// send writes what there is room for, and does not wait.
func (v *vector) send(fd int, pieces [][]byte) (int, error) {
	return v.call(unix.SYS_SENDMSG, fd, pieces)
}

// call makes a system call on the pieces, of which there is at least one. It does not wait, even if
// another process that has the connection, too, made that block, and it has an end by the bytes that
// a queue pair offers. So the Go runtime is not told of most, which takes the processor from calls of
// more than 20 us, as copying alone takes, and starts a thread that finds nothing to do.
func (v *vector) call(trap uintptr, fd int, pieces [][]byte) (int, error) {
	v.fill(pieces)
	enter := unix.RawSyscall
	if v.calls++; v.calls%quietCalls == 0 {
		enter = unix.Syscall
	}
	for {
		n, _, errno := enter(trap, uintptr(fd), uintptr(unsafe.Pointer(&v.msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
