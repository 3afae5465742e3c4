// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// receiverBits are the bits of a queue pair number by which the kernel spreads packets over
// receiving sockets: the lowest ones, as many as maxReceivers needs.
const receiverBits rdma.QPN = maxReceivers - 1

// spread is a device's receiving sockets behind the first one: each has a goroutine, so that a device can receive with
// several processors.
//
//	              lowest bits of the
//	packets ----> queue pair number ----+----> socket ---> goroutine
//	              (program)             +----> socket ---> goroutine
//	                                    +----> ...
//
// So all packets of a queue pair arrive by one socket, and in their order. The choice has no other purpose: each
// goroutine takes packets of each queue pair, which has a lock. A packet that arrives by another socket, as may happen
// while sockets come and go, is a late one at worst.
//
// The kernel numbers all sockets of an address together, also those of two devices that share it (see share), and when one is
// closed the last one takes its number. With several sockets of two devices the numbers would be hard to tell. So a
// device that gets company goes back to its first socket before. One that is left alone spreads then, unless it has spread
// before: its further sockets are made in its network namespace when the device is opened, and a socket cannot be
// bound a second time.
//
// # Keeping others out
//
// Two decisions of the kernel depend on the socket that was bound last:
//
//   - Another socket may bind to the port if the last one has SO_REUSEPORT.
//   - The program picks the socket for a packet if the last one has SO_REUSEPORT, of those to which the packet may go.
//
// So the last one is a guard. It has the option off: nobody else may bind. And no packet may go to it, so that the program
// still picks: it is connected to our own address and port, which sends nothing. In the end the device tries whether
// others are kept out; if not, the kernel looks in another order, and the device goes back to one socket.
//
//	first socket (0), socket 1, socket 2, socket 3, guard
//
// Until the guard is there, for some ten system calls, another socket of our user could join.
//
// With IPv6 the kernel asks the socket that was bound first, and what that takes could not be undone for a device
// that gets company. So a device with an IPv6 address has one receiver.
type spread struct {
	w         *udpWire
	cfg       Config
	receivers atomic.Int32

	mu    sync.Mutex // guards what is below
	alone bool       // no other device has the address
	start func(Receive)
	spare []*os.File   // not bound yet: one for each receiver
	probe *os.File     // not to be bound; nil without spare ones
	guard *net.UDPConn // one of the spare ones, or nil
	ins   []*inSocket  // bound
}

// prepare makes the sockets, in the network namespace of the calling thread.
func (s *spread) prepare(w *udpWire, cfg Config) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.w, s.cfg = w, cfg
	s.receivers.Store(1)
	s.alone = !cfg.Share
	if cfg.Receivers <= 1 || w.v6 {
		return nil
	}
	s.cfg.SocketBufferBytes /= cfg.Receivers // each has a part of the queue pairs
	for range cfg.Receivers {
		f, err := s.socket()
		if err != nil {
			return fmt.Errorf("open a receiving socket: %w", err)
		}
		s.spare = append(s.spare, f)
	}
	if s.probe, err = s.socket(); err != nil {
		return fmt.Errorf("open a socket to try the port: %w", err)
	}
	return nil
}

// socket makes a socket that may join the first one.
func (s *spread) socket() (_ *os.File, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "roce-receive")
	if err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1), s.w.options(fd, s.cfg)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// begin is called when the device is there: start starts the receiver of each further socket.
func (s *spread) begin(start func(Receive)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.start = start
	s.grow()
}

// left says that no other device has the address any more.
func (s *spread) left() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alone = true
	s.grow()
}

// grow binds the further sockets, if it is time to. All or none: with one socket all is right, too, but slower
// where there are more processors.
func (s *spread) grow() {
	if !s.alone || s.start == nil || len(s.spare) == 0 {
		return
	}
	n := len(s.spare)
	if s.open() != nil {
		ins := s.ins
		_ = s.fold()             // it has nothing more to try
		for _, in := range ins { // nobody receives
			in.release()
		}
		return
	}
	s.receivers.Store(int32(n))
	for _, in := range s.ins {
		s.start(in.receive)
	}
}

func (s *spread) open() (err error) {
	if err := reusePort(s.w.in.raw, true); err != nil {
		return err
	}
	for len(s.spare) > 1 {
		conn, err := s.bind()
		if err != nil {
			return err
		}
		in, err := newInSocket(conn, s.w.v6)
		if err != nil {
			return errors.Join(err, conn.Close())
		}
		s.ins = append(s.ins, in)
	}
	if err := attach(s.w.in.raw, receiverProgram(1+len(s.ins))); err != nil {
		return err
	}
	if s.guard, err = s.bind(); err != nil {
		return err
	}
	raw, err := s.guard.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 0) // nobody reads what may come with a forged address
		err = unix.Connect(int(fd), s.w.local(s.cfg.Addr, s.cfg.Port))
	})
	if err = errors.Join(cerr, os.NewSyscallError("connect", err)); err != nil {
		return err
	}
	if err := reusePort(raw, false); err != nil {
		return err
	}
	return s.tryPort()
}

// bind binds the next spare socket.
func (s *spread) bind() (*net.UDPConn, error) {
	f := s.spare[0]
	s.spare = s.spare[1:]
	defer func() { _ = f.Close() }()
	if err := s.bindFile(f); err != nil {
		return nil, err
	}
	conn, err := net.FilePacketConn(f) // the same socket
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

func (s *spread) bindFile(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.Bind(int(fd), s.w.local(s.cfg.Addr, s.cfg.Port)) })
	return errors.Join(cerr, os.NewSyscallError("bind", err))
}

var errOpenPort = errors.New("the kernel lets others bind to the port")

// tryPort reports an error if another socket of our user can be bound to the port.
func (s *spread) tryPort() error {
	err := s.bindFile(s.probe)
	_ = s.probe.Close()
	s.probe = nil
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return nil
	case err == nil:
		return errOpenPort
	}
	return err
}

// company says that another device joins the address, as soon as this returns.
// An error means that it must not.
func (s *spread) company() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alone = false
	return s.fold()
}

// fold goes back to the first socket. What the others have is received before, unless that takes longer than
// foldTimeout: what is lost then peers send again.
//
// An error means that the kernel still spreads packets over places that others might get.
func (s *spread) fold() error {
	var err error
	if s.w.share != nil {
		err = attach(s.w.in.raw, program(s.w.share.generation))
	}
	// A processor may be about to give a packet to the socket that the program before picked.
	for end := time.Now().Add(foldTimeout); len(s.ins) > 0 && time.Now().Before(end); {
		if time.Sleep(joinPoll); !s.pending() {
			break
		}
	}
	return errors.Join(err, reusePort(s.w.in.raw, false), s.shut())
}

// pending reports whether a further socket has packets that nobody has received.
func (s *spread) pending() bool {
	for _, in := range s.ins {
		n := 0
		_ = in.raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
		if n > 0 {
			return true
		}
	}
	return false
}

// close closes the further sockets for good.
func (s *spread) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.start = nil
	if len(s.ins) > 0 {
		_ = reusePort(s.w.in.raw, false) // while the others go
	}
	return s.shut()
}

// shut closes the further sockets. Their receivers end.
func (s *spread) shut() error {
	var errs []error
	for _, f := range s.spare {
		errs = append(errs, f.Close())
	}
	if s.probe != nil {
		errs = append(errs, s.probe.Close())
	}
	for _, in := range s.ins {
		errs = append(errs, in.close())
	}
	if s.guard != nil { // the last one
		errs = append(errs, s.guard.Close())
	}
	s.spare, s.probe, s.guard, s.ins = nil, nil, nil, nil
	s.receivers.Store(1)
	return errors.Join(errs...)
}

// receiverProgram returns the place of a socket in the group, of so many, for packets of a queue pair. It sees the payload
// of UDP, where the base transport header has the destination queue pair in bytes 5 to 7.
func receiverProgram(sockets int) []unix.SockFilter {
	const lastQPNByte = 7
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: lastQPNByte},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: uint32(sockets - 1)},
		{Code: unix.BPF_RET | unix.BPF_A},
	}
}

// attach puts a program in force that picks a socket of the group.
func attach(raw syscall.RawConn, p []unix.SockFilter) error {
	var err error
	cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF,
			&unix.SockFprog{Len: uint16(len(p)), Filter: &p[0]})
	})
	return errors.Join(cerr, os.NewSyscallError("setsockopt SO_ATTACH_REUSEPORT_CBPF", err))
}

// reusePort says whether the kernel lets other sockets of our user bind to the port.
func reusePort(raw syscall.RawConn, on bool) error {
	n := 0
	if on {
		n = 1
	}
	var err error
	cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, n) })
	return errors.Join(cerr, os.NewSyscallError("setsockopt SO_REUSEPORT", err))
}
