// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
	"github.com/smcr-io/kube-smcr/test/vm/peer/script"
)

// stack is what carries connections.
type stack interface {
	dial(ctx context.Context, to string) (script.Conn, error)
	listen(ctx context.Context, addr string) (listener, error)
	// describe adds what the stack knows about connections that are open.
	// Their reports may be at work in other goroutines after it.
	describe(conns []*openConn)
	// close ends the stack, all of whose connections were closed, and adds
	// what it had left.
	close(end *report.End) error
}

type listener interface {
	accept() (script.Conn, error)
	addr() string
	close() error
}

// openConn is a connection with what its stack says of it.
type openConn struct {
	script.Conn
	about report.Conn // Engine, Kernel, ConnectMS
}

// take adds what is known of the connection to the report of its script.
func (c *openConn) take(r report.Conn) report.Conn {
	r.Engine, r.Kernel, r.ConnectMS = c.about.Engine, c.about.Kernel, c.about.ConnectMS
	if e, ok := c.Conn.(*smcr.Conn); ok {
		r.Engine.RDMAWrites = e.Info().RDMAWrites
	}
	return r
}

// EndState is of a kernel's socket.
func (c *openConn) EndState() string {
	if k, ok := c.Conn.(kernelConn); ok {
		return k.EndState()
	}
	return ""
}

// output writes lines. Any goroutine may, the stack's callbacks included.
type output struct {
	start time.Time

	mu  sync.Mutex
	enc *json.Encoder
	err error // the first
}

func newOutput(w io.Writer) *output { return &output{start: time.Now(), enc: json.NewEncoder(w)} }

func (o *output) line(l report.Line) {
	o.mu.Lock()
	defer o.mu.Unlock()
	l.MS = time.Since(o.start).Seconds() * 1e3
	o.err = errors.Join(o.err, o.enc.Encode(l))
}

// end writes the last line and returns what went wrong with any.
func (o *output) end(e *report.End) error {
	o.line(report.Line{End: e})
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// tcpStack is plain TCP, to compare with.
type tcpStack struct{}

type tcpConn struct{ *net.TCPConn }

func (c tcpConn) Abort() error { return errors.Join(c.SetLinger(0), c.Close()) }

func (c tcpConn) WriteUrgent(p []byte) (int, error) { return sendUrgent(c.TCPConn, p) }

func (c tcpConn) ReadUrgent() (byte, error) { return receiveUrgent(c.TCPConn) }

func (tcpStack) dial(ctx context.Context, to string) (script.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", to)
	if err != nil {
		return nil, err
	}
	return tcpConn{c.(*net.TCPConn)}, nil
}

func (tcpStack) listen(ctx context.Context, addr string) (listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return tcpListener{l}, nil
}

func (tcpStack) describe([]*openConn) {}

func (tcpStack) close(*report.End) error { return nil }

type tcpListener struct{ l net.Listener }

func (l tcpListener) accept() (script.Conn, error) {
	c, err := l.l.Accept()
	if err != nil {
		return nil, err
	}
	return tcpConn{c.(*net.TCPConn)}, nil
}

func (l tcpListener) addr() string { return l.l.Addr().String() }

func (l tcpListener) close() error { return l.l.Close() }

// sendUrgent sends p, whose last byte is urgent.
func sendUrgent(c syscall.Conn, p []byte) (n int, err error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	if e := rc.Write(func(fd uintptr) bool {
		n, err = unix.SendmsgN(int(fd), p, nil, nil, unix.MSG_OOB|unix.MSG_NOSIGNAL)
		return !errors.Is(err, unix.EAGAIN)
	}); e != nil {
		return 0, e
	}
	return n, err
}

// receiveUrgent takes the peer's urgent byte, without waiting.
func receiveUrgent(c syscall.Conn) (byte, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var b [1]byte
	if e := rc.Control(func(fd uintptr) {
		_, _, err = unix.Recvfrom(int(fd), b[:], unix.MSG_OOB|unix.MSG_DONTWAIT)
	}); e != nil {
		return 0, e
	}
	return b[0], err
}
