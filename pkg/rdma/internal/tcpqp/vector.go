// SPDX-License-Identifier: Apache-2.0

package tcpqp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// vector is the pieces of memory of one system call, which x/sys would allocate anew for
// each. Its owner empties it after the call: the kernel keeps no reference.
type vector []unix.Iovec

// fill makes the vector the pieces, as far as one system call takes them.
func (v *vector) fill(pieces [][]byte) {
	*v = (*v)[:0]
	for _, p := range pieces[:min(len(pieces), maxPieces)] {
		e := unix.Iovec{Base: unsafe.SliceData(p)}
		e.SetLen(len(p))
		*v = append(*v, e)
	}
}

// forget drops the references to the pieces.
func (v *vector) forget() { clear((*v)[:cap(*v)]) }

// readv reads what there is, and does not block.
func (v *vector) readv(fd int, pieces [][]byte) (int, error) {
	return v.call(unix.SYS_READV, fd, pieces)
}

// writev writes what there is room for, and does not block.
func (v *vector) writev(fd int, pieces [][]byte) (int, error) {
	return v.call(unix.SYS_WRITEV, fd, pieces)
}

// call makes a system call on the pieces, of which there is at least one.
func (v *vector) call(trap uintptr, fd int, pieces [][]byte) (int, error) {
	v.fill(pieces)
	for {
		n, _, errno := unix.Syscall(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(*v))), uintptr(len(*v)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}
