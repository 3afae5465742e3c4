// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// nftConn is a connection to nftables over one netlink socket, which stays open, so that a transaction does not enter the
// namespace.
//
// The library waits for an answer to each message of a transaction. The kernel gives them while it is sent to, and it may give
// another number: a single one for all messages when memory is short or nf_tables is being unloaded, and one
// more than messages when each was right, but the transaction as a whole could not be put in force.
type nftConn struct {
	*nftables.Conn
	sock   *netlink.Conn // that of Conn
	answer time.Duration // how long Flush waits for the answers behind what it sends
}

// openNFT opens a connection in ns.
func openNFT(ns *NetNS) (*nftConn, error) {
	var conn *nftConn
	err := ns.Do(func() (err error) {
		conn, err = newNFT()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open nftables in %s: %w", ns, err)
	}
	return conn, nil
}

// newNFT opens a connection in the thread's namespace.
func newNFT() (*nftConn, error) {
	c := &nftConn{answer: nftAnswerTime}
	keep := func(sock *netlink.Conn) error {
		c.sock = sock
		return nil
	}
	var err error
	c.Conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(prepareNFT, keep))
	return c, err
}

// Flush sends the transaction. It reads no answer of another one, and ends if the kernel gives too few.
func (c *nftConn) Flush() error {
	if err := c.drain(); err != nil {
		return err
	}
	noLimit, err := c.limitAnswers()
	if err != nil {
		return err
	}
	err = c.Conn.Flush()
	if errors.Is(err, os.ErrDeadlineExceeded) { // and once more for each message that has no answer
		err = fmt.Errorf("the kernel did not answer each message: %w", firstOf(err))
	}
	return errors.Join(err, noLimit())
}

// limitAnswers has reads end some time after what is being sent, or will be, has been sent: before that the kernel may load modules, and
// wait for other transactions. The function that it returns takes the limit away.
func (c *nftConn) limitAnswers() (end func() error, err error) {
	raw, err := c.sock.SyscallConn()
	if err != nil {
		return nil, err
	}
	set := make(chan struct{})
	t := time.AfterFunc(c.answer, func() {
		defer close(set)
		_ = raw.Write(func(uintptr) bool { return true })    // waits for whoever is sending
		_ = c.sock.SetReadDeadline(time.Now().Add(c.answer)) // fails if closed: then nobody reads
	})
	return func() error {
		if t.Stop() {
			return nil
		}
		<-set
		return c.sock.SetReadDeadline(time.Time{})
	}, nil
}

// GetObjects lists the objects of a table.
func (c *nftConn) GetObjects(t *nftables.Table) ([]nftables.Obj, error) {
	if err := c.drain(); err != nil {
		return nil, err
	}
	return c.Conn.GetObjects(t)
}

// drain throws away what the kernel has answered so far.
func (c *nftConn) drain() error {
	raw, err := c.sock.SyscallConn()
	if err != nil {
		return err
	}
	var rerr error
	err = raw.Control(func(fd uintptr) {
		var b [1]byte // the rest of an answer goes with it
		for rerr == nil || errors.Is(rerr, unix.EINTR) || errors.Is(rerr, unix.ENOBUFS) {
			_, _, rerr = unix.Recvfrom(int(fd), b[:], unix.MSG_DONTWAIT)
		}
	})
	if errors.Is(rerr, unix.EAGAIN) {
		rerr = nil
	}
	return errors.Join(err, os.NewSyscallError("receive", rerr))
}

// firstOf is the first of errors that were joined.
func firstOf(err error) error {
	for {
		var joined interface{ Unwrap() []error }
		if !errors.As(err, &joined) {
			return err
		}
		err = joined.Unwrap()[0]
	}
}

// prepareNFT connects the socket to the kernel, so that nobody else in the namespace can send to it, and gives it buffers for whole
// transactions, and a filter that drops the echoes of rules. The library asks the kernel for these echoes and expects all of them in
// one datagram, but the kernel may need several.
func prepareNFT(c *netlink.Conn) error {
	const typeOffset, newRule = 4, unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE
	filter, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: typeOffset, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: filterType(newRule), SkipTrue: 1},
		bpf.RetConstant{Val: 1<<32 - 1},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cerr error
	err = raw.Control(func(fd uintptr) { cerr = unix.Connect(int(fd), &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) })
	return errors.Join(err, os.NewSyscallError("connect", cerr),
		c.SetReadBuffer(netlinkBufferBytes), c.SetWriteBuffer(netlinkBufferBytes), c.SetBPF(filter))
}

// filterType is the type of a message as a filter reads it: the type is in the machine's byte order, and the filter reads the
// network's.
func filterType(t uint16) uint32 {
	return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, t)))
}
