// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"context"
	"encoding/binary"
	"errors"
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

// mmsghdr is struct mmsghdr of sendmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
	_   [4]byte
}

// cmsgRoom is the room for one control message of a 4-byte value.
const cmsgRoom = 24

// udpWire is a UDP socket to receive and one to send for each flow. The others
// are not in the network poller: there, each datagram that leaves would wake a
// thread, because the poller also watches for room to send.
type udpWire struct {
	conn     *net.UDPConn
	raw      syscall.RawConn
	outs     [flows]outSocket
	share    *share // nil: the address is the device's alone
	link     *linkWatch
	scope    uint32 // of link-local addresses
	v6       bool
	segments atomic.Int32
	senders  chan *udpSender // free ones

	// owned by the receiver
	rxRing   []byte // rxBatch buffers outside the Go heap
	rxHdr    [rxBatch]mmsghdr
	rxIov    [rxBatch]unix.Iovec
	rxName   [rxBatch]unix.RawSockaddrInet6 // also holds an IPv4 one
	rxCtl    [rxBatch][cmsgRoom]byte
	rxMsgs   [rxBatch]Message
	rxUsed   int // messages whose headers the last call changed
	rxErr    error
	rxStream stream
	rxCalls  uint // of recvmmsg
	rxTake   func([]Message)
	rxIdle   func() bool
	rxFn     func(fd uintptr) bool
}

// flows is the number of flows: see flowOf.
const flows = 2

// outSocket sends one flow, from a port of its own.
type outSocket struct {
	file *os.File
	raw  syscall.RawConn
	port uint16
}

var (
	_ Wire        = (*udpWire)(nil)
	_ LinkWatcher = (*udpWire)(nil)
	_ PortSender  = (*udpWire)(nil)
)

// openUDP opens the socket and the link watch in the current namespace.
func openUDP(cfg Config) (_ *udpWire, err error) {
	network := "udp4"
	if cfg.Addr.Is6() {
		network = "udp6"
	}
	link, err := watchLink(cfg.Addr)
	if err != nil {
		return nil, fmt.Errorf("watch the link of %v: %w", cfg.Addr, err)
	}
	defer func() {
		if err != nil {
			_ = link.close()
		}
	}()
	w := &udpWire{link: link, v6: cfg.Addr.Is6(), scope: uint32(link.index()), senders: make(chan *udpSender, freeBatches)}
	if cfg.scoped() && w.scope == 0 {
		return nil, fmt.Errorf("interface %s does not have the address %v", cfg.Addr.Zone(), cfg.Addr.WithZone(""))
	}
	if err := w.bind(network, cfg); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = w.unbind()
		}
	}()
	var optErr error
	if err := w.raw.Control(func(fd uintptr) { optErr = w.options(int(fd), cfg) }); err != nil {
		return nil, fmt.Errorf("set socket options: %w", err)
	}
	if optErr != nil {
		return nil, optErr
	}
	defer func() {
		if err != nil {
			_ = w.closeOuts()
		}
	}()
	for i := range w.outs {
		if w.outs[i], err = w.openOut(cfg); err != nil {
			return nil, err
		}
	}
	w.rxRing, err = unix.Mmap(-1, 0, rxBatch*rxBufferBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map receive buffers: %w", err)
	}
	w.rxFn = w.receive
	link.start()
	return w, nil
}

// bind opens the receiving socket.
func (w *udpWire) bind(network string, cfg Config) (err error) {
	local := netip.AddrPortFrom(cfg.Addr, cfg.Port)
	var lc net.ListenConfig
	if cfg.Share {
		if w.share, err = join(cfg, w.scope); err != nil {
			return err
		}
		lc.Control = reusePort
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.unbind())
		}
	}()
	listen := func() (net.PacketConn, error) {
		if w.share != nil && w.share.older == nil {
			// Nobody agreed to share. Whoever has the port all the same, as a device of
			// a version that asks in another way, would let us in and lose packets to us.
			alone, err := (&net.ListenConfig{}).ListenPacket(context.Background(), network, local.String())
			if err == nil {
				err = alone.Close()
			}
			if err != nil {
				return nil, err
			}
		}
		return lc.ListenPacket(context.Background(), network, local.String())
	}
	conn, err := listen()
	for end := time.Now().Add(dyingTimeout); w.share != nil && errors.Is(err, unix.EADDRINUSE) && time.Now().Before(end); time.Sleep(joinPoll) {
		conn, err = listen()
	}
	if err != nil {
		return fmt.Errorf("bind the RoCEv2 socket (is another RDMA device or rxe using %v?): %w", local, err)
	}
	w.conn = conn.(*net.UDPConn)
	if w.raw, err = w.conn.SyscallConn(); err != nil {
		return fmt.Errorf("get the socket: %w", err)
	}
	if w.share != nil {
		return w.share.start(w.raw)
	}
	return nil
}

// unbind undoes bind. The address is given back before the generation.
func (w *udpWire) unbind() error {
	var errs []error
	if w.conn != nil {
		errs = append(errs, w.conn.Close())
	}
	if w.share != nil {
		errs = append(errs, w.share.close())
	}
	return errors.Join(errs...)
}

func reusePort(_, _ string, c syscall.RawConn) error {
	var err error
	cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	return errors.Join(cerr, os.NewSyscallError("setsockopt SO_REUSEPORT", err))
}

// openOut opens a sending socket, on a port of its own: RoCEv2 lets senders
// choose the source port.
func (w *udpWire) openOut(cfg Config) (o outSocket, err error) {
	family := unix.AF_INET
	if w.v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return o, fmt.Errorf("open the sending socket: %w", err)
	}
	// A blocking descriptor stays out of the poller; each send says that it
	// does not wait.
	o.file = os.NewFile(uintptr(fd), "roce-send")
	defer func() {
		if err != nil {
			err = errors.Join(err, o.file.Close())
		}
	}()
	if err := unix.Bind(fd, w.sendAddr(cfg.Addr)); err != nil {
		return o, fmt.Errorf("bind the sending socket to %v: %w", cfg.Addr, err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return o, fmt.Errorf("name the sending socket: %w", err)
	}
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		o.port = uint16(a.Port)
	case *unix.SockaddrInet6:
		o.port = uint16(a.Port)
	}
	if err := w.options(fd, cfg); err != nil {
		return o, err
	}
	o.raw, err = o.file.SyscallConn()
	return o, err
}

func (w *udpWire) closeOuts() error {
	var errs []error
	for _, o := range w.outs {
		if o.file != nil {
			errs = append(errs, o.file.Close())
		}
	}
	return errors.Join(errs...)
}

// sendAddr is the local address with a port of the kernel's choice.
func (w *udpWire) sendAddr(a netip.Addr) unix.Sockaddr {
	if w.v6 {
		return &unix.SockaddrInet6{Addr: a.As16(), ZoneId: w.scope}
	}
	return &unix.SockaddrInet4{Addr: a.As4()}
}

// SourcePort implements [PortSender].
func (w *udpWire) SourcePort(flow uint8) uint16 { return w.outs[flow%flows].port }

// options sets up a socket. Packets are never fragmented: with DF an
// unconnected socket also sends the identification 0 that the ICRC expects.
func (w *udpWire) options(fd int, cfg Config) error {
	level, opt, val := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO
	if w.v6 {
		level, opt, val = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO
	}
	if err := unix.SetsockoptInt(fd, level, opt, val); err != nil {
		return fmt.Errorf("forbid fragmentation: %w", err)
	}
	// RoCEv2 needs no UDP checksum, as it has the ICRC. NICs and rxe send none, which
	// a socket of IPv6 takes only if it is told to.
	if w.v6 {
		if err := unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_NO_CHECK6_RX, 1); err != nil {
			return fmt.Errorf("take packets without a UDP checksum: %w", err)
		}
	}
	for _, o := range []struct{ force, plain int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF},
	} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.force, cfg.SocketBufferBytes) == nil {
			continue
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.plain, cfg.SocketBufferBytes); err != nil {
			return fmt.Errorf("set socket buffers: %w", err)
		}
	}
	w.segments.Store(1)
	if cfg.NoSegmentation {
		return nil
	}
	// Kernels without the option refuse to set even 0, which means off.
	if unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_SEGMENT, 0) == nil {
		w.segments.Store(maxSegments)
	}
	// Without UDP_GRO packets come one by one: slower, nothing else.
	_ = unix.SetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO, 1)
	return nil
}

// MaxSegments implements [Wire].
func (w *udpWire) MaxSegments() int { return int(w.segments.Load()) }

// Link implements [LinkWatcher].
func (w *udpWire) Link() LinkState { return w.link.get() }

// LinkChanged implements [LinkWatcher].
func (w *udpWire) LinkChanged() <-chan struct{} { return w.link.changed }

// Close implements [Wire].
func (w *udpWire) Close() error {
	err := errors.Join(w.unbind(), w.closeOuts(), w.link.close())
	// The receiver is in Receive or about to find the socket closed: the read
	// lock of the connection makes sure that it is out.
	return err
}

// release unmaps the receive buffers; nobody is in Receive any more.
func (w *udpWire) release() {
	if w.rxRing != nil {
		_ = unix.Munmap(w.rxRing)
		w.rxRing = nil
	}
}

// Receive implements [Wire].
func (w *udpWire) Receive(take func([]Message), idle func() bool) error {
	for i := range w.rxHdr {
		w.rxIov[i].Base = &w.rxRing[i*rxBufferBytes]
		w.rxIov[i].SetLen(rxBufferBytes)
		h := &w.rxHdr[i].hdr
		h.Name = (*byte)(unsafe.Pointer(&w.rxName[i]))
		h.Iov = &w.rxIov[i]
		h.SetIovlen(1)
		h.Control = &w.rxCtl[i][0]
	}
	w.rxTake, w.rxIdle, w.rxUsed = take, idle, rxBatch
	err := w.raw.Read(w.rxFn)
	if err != nil {
		w.release()
	} else {
		err = w.rxErr
	}
	return fmt.Errorf("receive: %w", err)
}

// receive is called by the network poller's loop whenever something may have
// arrived. It stays in this loop: a batch that is not full has emptied the
// socket, and what comes later is noticed, so that no call is needed to find it
// empty. True ends the loop with rxErr.
func (w *udpWire) receive(fd uintptr) bool {
	for {
		n, errno := w.recvmmsg(fd)
		if errno != 0 && errno != unix.EAGAIN {
			w.rxErr = os.NewSyscallError("recvmmsg", errno)
			return true
		}
		for i := range n {
			m := &w.rxMsgs[i]
			off := i * rxBufferBytes
			m.Data = w.rxRing[off : off+int(w.rxHdr[i].n)]
			m.Peer = w.sender(&w.rxName[i])
			m.SegmentBytes = segmentSize(w.rxCtl[i][:w.rxHdr[i].hdr.Controllen])
		}
		if n > 0 {
			w.rxStream.arrived(time.Now(), bytesOf(w.rxMsgs[:n]))
			w.rxTake(w.rxMsgs[:n])
		}
		if n == rxBatch || w.rxIdle() {
			continue
		}
		if !w.rxStream.goesOn(time.Now()) {
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

func (w *udpWire) recvmmsg(fd uintptr) (int, syscall.Errno) {
	for i := range w.rxUsed { // the kernel wrote what it used
		h := &w.rxHdr[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(cmsgRoom)
	}
	for {
		call := unix.RawSyscall6
		if w.rxCalls++; w.rxCalls%quietCalls == 0 {
			call = unix.Syscall6
		}
		n, _, errno := call(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&w.rxHdr[0])), rxBatch, unix.MSG_DONTWAIT, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		w.rxUsed = 0
		if errno == 0 {
			w.rxUsed = int(n)
		}
		return w.rxUsed, errno
	}
}

// sender returns the sender's address.
func (w *udpWire) sender(n *unix.RawSockaddrInet6) netip.AddrPort {
	if w.v6 {
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

// udpSender is the system call's view of messages.
type udpSender struct {
	w    *udpWire
	hdr  [txBatch]mmsghdr
	iov  [len(batch{}.bufs)]unix.Iovec
	name [txBatch]unix.RawSockaddrInet6
	ctl  [txBatch][cmsgRoom]byte
	n    int
	fn   func(fd uintptr)

	calls uint // of sendmmsg
	sent  int
	err   error
}

// Send implements [Wire].
func (w *udpWire) Send(msgs []Message) (int, error) {
	var s *udpSender
	select {
	case s = <-w.senders:
	default:
		s = &udpSender{w: w}
		s.fn = s.sendmmsg
	}
	s.fill(msgs)
	// Control, not Write: Write would make senders wait for each other.
	err := w.outs[msgs[0].Flow%flows].raw.Control(s.fn)
	sent := s.sent
	if err == nil {
		err = s.err
	}
	s.err = nil
	select {
	case w.senders <- s:
	default:
	}
	switch {
	case err == nil:
		return sent, nil
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		return sent, ErrWouldBlock
	case errors.Is(err, unix.EIO) && msgs[sent].SegmentBytes != 0:
		// The route leads to an interface that cannot checksum segments.
		w.segments.Store(1)
	}
	return sent, err
}

func (s *udpSender) fill(msgs []Message) {
	s.n = min(len(msgs), txBatch)
	iovs := 0
	for i := range s.n {
		m := &msgs[i]
		if iovs+len(m.Bufs) > len(s.iov) {
			s.n = i
			break
		}
		h := &s.hdr[i].hdr
		first := iovs
		for _, b := range m.Bufs {
			s.iov[iovs].Base = unsafe.SliceData(b)
			s.iov[iovs].SetLen(len(b))
			iovs++
		}
		h.Iov = &s.iov[first]
		h.SetIovlen(iovs - first)
		h.Name = (*byte)(unsafe.Pointer(&s.name[i]))
		h.Namelen = s.w.sockaddr(&s.name[i], m.Peer)
		h.Control = nil
		h.SetControllen(0)
		if m.SegmentBytes != 0 {
			h.Control = &s.ctl[i][0]
			h.SetControllen(cmsgRoom)
			c := (*unix.Cmsghdr)(unsafe.Pointer(&s.ctl[i][0]))
			c.Level, c.Type = unix.SOL_UDP, unix.UDP_SEGMENT
			c.SetLen(unix.CmsgLen(2))
			binary.NativeEndian.PutUint16(s.ctl[i][unix.SizeofCmsghdr:], uint16(m.SegmentBytes))
		}
	}
}

// sockaddr writes the address and returns its length.
func (w *udpWire) sockaddr(n *unix.RawSockaddrInet6, to netip.AddrPort) uint32 {
	if w.v6 {
		*n = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: swap16(to.Port()), Addr: to.Addr().As16()}
		if to.Addr().IsLinkLocalUnicast() {
			n.Scope_id = w.scope
		}
		return unix.SizeofSockaddrInet6
	}
	n4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(n))
	*n4 = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: swap16(to.Port()), Addr: to.Addr().As4()}
	return unix.SizeofSockaddrInet4
}

func (s *udpSender) sendmmsg(fd uintptr) {
	s.sent, s.err = 0, nil
	call := unix.RawSyscall6
	if s.calls++; s.calls%quietCalls == 0 {
		call = unix.Syscall6
	}
	for s.sent < s.n {
		n, _, errno := call(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&s.hdr[s.sent])), uintptr(s.n-s.sent), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			s.sent += int(n)
		case unix.EINTR:
		default:
			s.err = errno
			return
		}
	}
}
