// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inSocket is a receiving socket, bound, and what its receiver owns.
type inSocket struct {
	conn   *net.UDPConn
	raw    syscall.RawConn
	v6     bool
	closed atomic.Bool // by close

	ring   []byte // rxBatch buffers outside the Go heap
	hdr    [rxBatch]mmsghdr
	iov    [rxBatch]unix.Iovec
	name   [rxBatch]unix.RawSockaddrInet6 // also holds an IPv4 one
	ctl    [rxBatch][cmsgRoom]byte
	msgs   [rxBatch]Message
	used   int // messages whose headers the last call changed
	err    error
	stream stream
	calls  uint // of recvmmsg
	take   func([]Message)
	idle   func() bool
}

// newInSocket makes buffers for a socket.
func newInSocket(conn *net.UDPConn, v6 bool) (*inSocket, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("get the socket: %w", err)
	}
	in := &inSocket{conn: conn, raw: raw, v6: v6}
	if err := in.mapRing(); err != nil {
		return nil, err
	}
	return in, nil
}

// mapRing maps the receive buffers, if they are not mapped.
func (in *inSocket) mapRing() (err error) {
	if in.ring != nil {
		return nil
	}
	in.ring, err = unix.Mmap(-1, 0, rxBatch*rxBufferBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map receive buffers: %w", err)
	}
	return nil
}

// release unmaps the receive buffers; nobody is in receive, and receive maps them again.
func (in *inSocket) release() {
	if in.ring != nil {
		_ = unix.Munmap(in.ring)
		in.ring = nil
	}
}

// receive is a [Receive]. It leaves no buffers behind, whatever its error: a device that is closed before the
// next call makes none.
func (in *inSocket) receive(take func([]Message), idle func() bool) error {
	if err := in.mapRing(); err != nil {
		return err
	}
	defer in.release()
	for i := range in.hdr {
		in.iov[i].Base = &in.ring[i*rxBufferBytes]
		in.iov[i].SetLen(rxBufferBytes)
		h := &in.hdr[i].hdr
		h.Name = (*byte)(unsafe.Pointer(&in.name[i]))
		h.Iov = &in.iov[i]
		h.SetIovlen(1)
		h.Control = &in.ctl[i][0]
	}
	in.take, in.idle, in.used = take, idle, rxBatch
	err := in.raw.Read(in.read)
	if err == nil {
		err = in.err
	}
	if in.closed.Load() {
		err = net.ErrClosed // whatever it was: there is no next time
	}
	return fmt.Errorf("receive: %w", err)
}

// close ends receive, also while packets come so fast that it finds no end of them, and closes the socket.
func (in *inSocket) close() error {
	in.closed.Store(true)
	return in.conn.Close()
}

// read is called by the network poller's loop whenever something may have
// arrived. It stays in this loop: a batch that is not full has emptied the
// socket, and what comes later is noticed, so that no call is needed to find it
// empty. True ends the loop with err.
func (in *inSocket) read(fd uintptr) bool {
	for {
		if in.closed.Load() {
			in.err = net.ErrClosed
			return true
		}
		n, errno := in.recvmmsg(fd)
		if errno != 0 && errno != unix.EAGAIN {
			in.err = os.NewSyscallError("recvmmsg", errno)
			return true
		}
		for i := range n {
			m := &in.msgs[i]
			off := i * rxBufferBytes
			m.Data = in.ring[off : off+int(in.hdr[i].n)]
			m.Peer = in.sender(&in.name[i])
			m.SegmentBytes = segmentSize(in.ctl[i][:in.hdr[i].hdr.Controllen])
		}
		if n > 0 {
			in.stream.arrived(time.Now(), bytesOf(in.msgs[:n]))
			in.take(in.msgs[:n])
		}
		if n == rxBatch || in.idle() {
			continue
		}
		if !in.stream.goesOn(time.Now()) {
			return false
		}
		runtime.Gosched() // to those who read what came
	}
}

// bytesOf is how much arrived.
func bytesOf(msgs []Message) int {
	n := 0
	for i := range msgs {
		n += len(msgs[i].Data)
	}
	return n
}

// quietCalls: of so many system calls one is ordinary, and the Go scheduler
// does not see the others. None of them waits. A call that it sees wakes its
// monitor thread if the process was idle before, which is before every message
// of a dialogue: two context switches for nothing. But a process that goes on
// working needs the monitor at times: it polls the network and preempts.
const quietCalls = 1024

func (in *inSocket) recvmmsg(fd uintptr) (int, syscall.Errno) {
	for i := range in.used { // the kernel wrote what it used
		h := &in.hdr[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(cmsgRoom)
	}
	for {
		call := unix.RawSyscall6
		if in.calls++; in.calls%quietCalls == 0 {
			call = unix.Syscall6
		}
		n, _, errno := call(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&in.hdr[0])), rxBatch, unix.MSG_DONTWAIT, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		in.used = 0
		if errno == 0 {
			in.used = int(n)
		}
		return in.used, errno
	}
}

// sender returns the sender's address.
func (in *inSocket) sender(n *unix.RawSockaddrInet6) netip.AddrPort {
	if in.v6 {
		return netip.AddrPortFrom(netip.AddrFrom16(n.Addr), swap16(n.Port))
	}
	n4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(n))
	return netip.AddrPortFrom(netip.AddrFrom4(n4.Addr), swap16(n4.Port))
}

// swap16 turns a port in network order, read as native, into its number.
func swap16(p uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], p)
	return binary.BigEndian.Uint16(b[:])
}

// segmentSize finds the UDP_GRO value among control messages; 0 if none.
func segmentSize(ctl []byte) int {
	const hdr = unix.SizeofCmsghdr
	if len(ctl) < hdr+4 {
		return 0
	}
	c := (*unix.Cmsghdr)(unsafe.Pointer(unsafe.SliceData(ctl)))
	if c.Level != unix.SOL_UDP || c.Type != unix.UDP_GRO {
		return 0
	}
	return int(int32(binary.NativeEndian.Uint32(ctl[hdr:])))
}
