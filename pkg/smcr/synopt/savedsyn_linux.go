// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"errors"
	"fmt"
	"unsafe" // see getsockoptBytes

	"golang.org/x/sys/unix"
)

// savedSYN returns the IP and TCP headers of the SYN that began the accepted
// connection fd, or nothing if the kernel did not keep them: the connection was
// made from a syncookie, or they have been read before.
func savedSYN(fd int) ([]byte, error) {
	b := make([]byte, savedSYNBytes)
	n, err := getsockoptBytes(fd, unix.IPPROTO_TCP, unix.TCP_SAVED_SYN, b)
	// When the buffer is too small the kernel keeps the SYN and tells its size.
	if errors.Is(err, unix.EINVAL) && n > len(b) {
		if n > maxSavedSYNBytes {
			return nil, fmt.Errorf("saved SYN has %d bytes, more than %d", n, maxSavedSYNBytes)
		}
		b = make([]byte, n)
		n, err = getsockoptBytes(fd, unix.IPPROTO_TCP, unix.TCP_SAVED_SYN, b)
	}
	if err != nil {
		return nil, err
	}
	return b[:min(n, len(b))], nil
}

// getsockoptBytes reads a socket option into b and returns its length, which on
// an error may be more than that of b.
//
// x/sys has no call for options that are neither a number, nor a known struct,
// nor text that ends at a zero byte; hence the only unsafe of this package.
func getsockoptBytes(fd, level, option int, b []byte) (int, error) {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(unsafe.Pointer(&n)), 0)
	if errno != 0 {
		return int(n), errno
	}
	return int(n), nil
}
