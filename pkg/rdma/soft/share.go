// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ErrShared says that two devices share the address already. One of them has
// to be closed before another one can be opened.
var ErrShared = errors.New("two devices share the address already")

// generationBit is the bit of a queue pair number by which the kernel tells
// the packets of two devices on one address apart: the topmost one.
const generationBit rdma.QPN = 1 << 23

// flowOf is the number of the sending socket for packets to a queue pair. The
// packets of one flow, as NICs and kernels see it, may arrive merged, and what
// is merged has one receiver: so a flow must not mix packets for two devices
// that share an address, or for two receivers of one device.
func flowOf(dest rdma.QPN) uint8 {
	f := uint8(dest & receiverBits)
	if dest&generationBit != 0 {
		f += maxReceivers
	}
	return f
}

// flows is the number of flows.
const flows = 2 * maxReceivers

// share is a device's part in sharing an address and port with one other
// device, of this process or another one: the sockets of both are bound with
// SO_REUSEPORT, and a program of the kernel's picks one by a bit of the packet's
// queue pair number, the generation of the device.
//
// The kernel numbers the sockets in the order in which they were bound, and
// when one is closed the last one takes its number. So with two sockets the
// older one is 0, and a socket that is alone is 0. The older one's program is
// in force; it sends its own generation to 0 and the other one to 1. When it
// is closed, 1 is out of range, and what is out of range goes to the one that is
// left. That one then puts its own program in force, and tells the next one that
// it may come. So no packet ever goes to the wrong device. (Queue pair 1, the
// general services of a real RNIC, has the generation 0. Neither device has
// such a queue pair, so it does not matter who drops the packet.)
//
// The devices find each other by Unix sockets, one for each generation, in a place
// that only their user can enter: see place. Whoever locked a generation has it, for as
// long as it lives.
//
// All of that is about two sockets: a device that is alone may have further ones, and closes
// them before another one joins, see spread.
//
// The sockets of two devices that share have SO_REUSEPORT on, and the kernel then lets
// every process of the user bind to the port. A device that is alone has the option off, or
// has a guard with the option off (see spread). The option is on only from the moment
// that a younger device asks until one of the two is left. In between a program of the same
// user can bind to the port without asking, and then gets the packets of one generation, or
// none: keep such programs off the network namespace.
type share struct {
	generation uint8
	w          *udpWire
	place      *place
	token      *net.UnixListener // nil: no generation was taken
	older      *net.UnixConn     // of the other device's token; nil if alone
	alone      chan struct{}     // closed when the program in force is our own
	done       chan struct{}     // closed by close
	wg         sync.WaitGroup

	mu     sync.Mutex    // guards what is below, and the socket's option
	guest  *net.UnixConn // of the younger device; its end is ours
	closed bool
}

// join takes the first generation that is free and waits until the other
// device, if there is one, is prepared. The caller binds its UDP socket and calls
// start.
func join(cfg Config, w *udpWire) (_ *share, err error) {
	s := &share{w: w, alone: make(chan struct{}), done: make(chan struct{})}
	if s.place, err = enterPlace(cfg, w.scope); err != nil {
		return nil, fmt.Errorf("share %v: %w", cfg.Addr, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	for s.token == nil {
		if s.generation > 1 {
			return nil, fmt.Errorf("share %v: %w: close one of them first", cfg.Addr, ErrShared)
		}
		mine, err := s.place.take(s.generation)
		if mine {
			s.token, err = s.place.listen(s.generation)
		} else {
			s.generation++
		}
		if err != nil {
			return nil, fmt.Errorf("take a generation of %v: %w", cfg.Addr, err)
		}
	}
	if err := s.joinOlder(cfg); err != nil {
		return nil, err
	}
	return s, nil
}

// joinOlder looks for the other device and waits for its word.
func (s *share) joinOlder(cfg Config) error {
	c, err := net.DialUnix("unix", nil, s.place.socket(1-s.generation))
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
		return nil // there is none
	}
	if err != nil {
		return fmt.Errorf("ask the device that shares %v: %w", cfg.Addr, err)
	}
	err = c.SetReadDeadline(time.Now().Add(joinTimeout))
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	switch {
	case err == nil:
		s.older = c
		return nil
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET):
		return c.Close() // it was closed meanwhile
	}
	return errors.Join(fmt.Errorf("the device that shares %v does not answer (is its process stopped?): %w", cfg.Addr, err), c.Close())
}

// start is called when the UDP socket is bound.
func (s *share) start() error {
	if s.older == nil {
		if err := s.command(); err != nil {
			return err
		}
		s.w.spread.left()
	} else {
		s.wg.Add(1)
		go s.outlive()
	}
	s.wg.Add(1)
	go s.welcome()
	return s.place.endEntry()
}

// outlive waits for the end of the older device and takes its place.
func (s *share) outlive() {
	defer s.wg.Done()
	_ = s.older.SetReadDeadline(time.Time{})
	_, _ = s.older.Read(make([]byte, 1)) // nothing comes but the end
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return // it was our own end
	}
	// An error means that the socket is closed. Without the program in force a
	// third device cannot come, and all else is right.
	_ = s.command()
	// What ended is the connection. The sockets of a process that was killed end at about that time, before or
	// after, and its UDP socket has to be gone before there are more of ours.
	select {
	case <-time.After(leftDelay):
	case <-s.done:
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.guest == nil {
		s.w.spread.left()
	}
}

// command puts our program in force, and lets nobody else in.
func (s *share) command() error {
	err := attach(s.w.in.raw, program(s.generation))
	if err != nil {
		return fmt.Errorf("pick a device by queue pair: %w", err)
	}
	s.mu.Lock()
	err = reusePort(s.w.in.raw, false)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	close(s.alone)
	return nil
}

// program returns 0 for packets of a generation, else 1. It sees the payload
// of UDP, where the base transport header has the destination queue pair in
// bytes 5 to 7.
func program(generation uint8) []unix.SockFilter {
	const firstQPNByte, topBit = 5, 0x80
	own := uint32(generation)
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: firstQPNByte},
		{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: topBit, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 - own}, // generation 1
		{Code: unix.BPF_RET | unix.BPF_K, K: own},     // generation 0
	}
}

// welcome tells a younger device that it may bind.
func (s *share) welcome() {
	defer s.wg.Done()
	for {
		c, err := s.token.AcceptUnix()
		if err != nil {
			select {
			case <-s.done: // it is closed before the token is
				return
			case <-time.After(receiveRetry): // there may be no descriptor left for a moment
			}
			continue
		}
		if !ownUser(c) || !s.seat(c) {
			_ = c.Close() // nothing is lost
			continue
		}
		// Who asks has the other generation, so the older device is gone.
		select {
		case <-s.alone:
			s.admit(c)
		case <-s.done:
		}
	}
}

// admit lets the younger device bind, until it ends.
func (s *share) admit(c *net.UnixConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed { // the younger one finds out
		return
	}
	if err := s.w.spread.company(); err != nil || reusePort(s.w.in.raw, true) != nil {
		_ = c.Close() // it finds out, too
		s.guest = nil
		return
	}
	s.wg.Go(func() {
		_, _ = c.Read(make([]byte, 1)) // nothing comes but the end
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.guest == c && !s.closed {
			_ = c.Close()
			s.guest = nil
			_ = reusePort(s.w.in.raw, false) // but if our own socket is closed
		}
	})
	_, _ = c.Write([]byte{s.generation}) // it may have given up
}

// seat keeps the connection of the younger device, in place of the one of an
// earlier younger device, which is dead: there is one at a time.
func (s *share) seat(c *net.UnixConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.guest != nil {
		_ = s.guest.Close()
	}
	s.guest = c
	return true
}

// ownUser says whether a process of our user is at the other end. The kernel
// lets no others share the port, and some can enter every directory.
func ownUser(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return cerr == nil && err == nil && int(cred.Uid) == os.Geteuid()
}

// close gives the generation back, after the UDP socket was closed.
func (s *share) close() error {
	s.mu.Lock()
	s.closed = true
	open := []*net.UnixConn{s.older, s.guest}
	s.mu.Unlock()
	close(s.done)
	var errs []error
	if s.token != nil {
		errs = append(errs, s.token.Close())
	}
	for _, c := range open {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	s.wg.Wait()
	errs = append(errs, s.place.leave(s.token != nil, s.generation))
	return errors.Join(errs...)
}
