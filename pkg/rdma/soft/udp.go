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

// udpWire is UDP sockets to receive, of which there may be one or several, and one to send for each flow. The latter
// are not in the network poller: there, each datagram that leaves would wake a
// thread, because the poller also watches for room to send.
type udpWire struct {
	in       *inSocket // the first one, and the only one beside another device
	spread   spread    // further ones
	outs     [flows]outSocket
	share    *share // nil: the address is the device's alone
	link     *linkWatch
	scope    uint32 // of link-local addresses
	v6       bool
	segments atomic.Int32
	senders  chan *udpSender // free ones
}

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
	_ Spreader    = (*udpWire)(nil)
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
	defer func() {
		if err != nil {
			_ = errors.Join(w.unbind(), w.closeOuts())
			if w.in != nil {
				w.in.release() // nobody receives
			}
		}
	}()
	if err := w.spread.prepare(w, cfg); err != nil {
		return nil, err
	}
	if err := w.bind(network, cfg); err != nil {
		return nil, err
	}
	for i := range w.outs {
		if w.outs[i], err = w.openOut(cfg); err != nil {
			return nil, err
		}
	}
	link.start()
	return w, nil
}

// bind opens the first receiving socket.
func (w *udpWire) bind(network string, cfg Config) (err error) {
	local := netip.AddrPortFrom(cfg.Addr, cfg.Port)
	var lc net.ListenConfig
	if cfg.Share {
		if w.share, err = join(cfg, w); err != nil {
			return err
		}
		lc.Control = func(_, _ string, c syscall.RawConn) error { return reusePort(c, true) }
	}
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
	if w.in, err = newInSocket(conn.(*net.UDPConn), w.v6); err != nil {
		return errors.Join(err, conn.Close())
	}
	var optErr error
	if err := w.in.raw.Control(func(fd uintptr) { optErr = w.options(int(fd), cfg) }); err != nil || optErr != nil {
		return errors.Join(err, optErr)
	}
	if w.share != nil {
		return w.share.start()
	}
	return nil
}

// unbind closes the receiving sockets. The address is given back before the generation.
func (w *udpWire) unbind() error {
	errs := []error{w.spread.close()}
	if w.in != nil {
		errs = append(errs, w.in.close())
	}
	if w.share != nil {
		errs = append(errs, w.share.close())
	}
	return errors.Join(errs...)
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
	if err := unix.Bind(fd, w.local(cfg.Addr, 0)); err != nil {
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
	if err := sendOnly(fd); err != nil {
		return o, err
	}
	o.raw, err = o.file.SyscallConn()
	return o, err
}

// sendOnly has the kernel drop what comes to a socket that nobody reads: peers know the port, and what they sent there
// would stay until the device is closed.
func sendOnly(fd int) error {
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}} // of each packet 0 bytes are taken
	err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]})
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0)
	}
	if err != nil {
		return fmt.Errorf("refuse packets to the sending socket: %w", err)
	}
	return nil
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

// local is the local address, with a port of the kernel's choice if that is 0.
func (w *udpWire) local(a netip.Addr, port uint16) unix.Sockaddr {
	if w.v6 {
		return &unix.SockaddrInet6{Addr: a.As16(), ZoneId: w.scope, Port: int(port)}
	}
	return &unix.SockaddrInet4{Addr: a.As4(), Port: int(port)}
}

// SourcePort implements [PortSender].
func (w *udpWire) SourcePort(flow uint8) uint16 { return w.outs[flow%flows].port }

// options sets up a socket. Packets are never fragmented: with DF an
// unconnected socket also sends the identification 0 that the ICRC expects.
// As with an RNIC, the interface's MTU is the limit, not that of the route: the
// kernel lowers the latter for any ICMP message, which may be forged, and the path
// MTU of a queue pair stays what it is.
func (w *udpWire) options(fd int, cfg Config) error {
	level, opt, val := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE
	if w.v6 {
		level, opt, val = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE
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
	// A receiver is in Receive or about to find its socket closed: the read
	// lock of the connection makes sure that it is out.
	return err
}

// Receive implements [Wire].
func (w *udpWire) Receive(take func([]Message), idle func() bool) error {
	return w.in.receive(take, idle)
}

// Spread implements [Spreader].
func (w *udpWire) Spread(start func(Receive)) { w.spread.begin(start) }

// Receivers implements [Spreader].
func (w *udpWire) Receivers() int { return int(w.spread.receivers.Load()) }

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
