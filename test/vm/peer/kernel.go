// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/vm/afsmc"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
	"github.com/smcr-io/kube-smcr/test/vm/peer/script"
)

type kernelOptions struct {
	buffer int
}

func (o *kernelOptions) register(f *flag.FlagSet) {
	f.IntVar(&o.buffer, "kernel-buffer", 0, "SO_SNDBUF and SO_RCVBUF of the kernel's sockets; 0: as the system has it")
}

// usesKernel reports whether a command line asks for the kernel's stack.
func usesKernel(args []string) bool {
	return slices.ContainsFunc(args, func(a string) bool {
		return a == "kernel" || strings.HasSuffix(a, "-stack=kernel")
	})
}

// kernelStack is AF_SMC.
type kernelStack struct{ o kernelOptions }

func (k *kernelStack) dial(_ context.Context, to string) (script.Conn, error) {
	return kernelConnOf(afsmc.Dial(to, k.o.buffer))
}

func (k *kernelStack) listen(_ context.Context, addr string) (listener, error) {
	l, err := afsmc.Listen(addr, k.o.buffer)
	if err != nil {
		return nil, err
	}
	return kernelListener{l}, nil
}

// describe finds the kernel's view of each connection by its local address.
func (k *kernelStack) describe(conns []*openConn) {
	all, err := smcnl.Sockets(nil)
	for _, c := range conns {
		c.about.Kernel = find(all, c)
		if err != nil {
			c.about.Kernel = &smcnl.Socket{State: err.Error()}
		}
	}
}

func (k *kernelStack) close(*report.End) error { return nil }

type kernelListener struct{ l *afsmc.Listener }

func (l kernelListener) addr() string { return l.l.Addr().String() }

func (l kernelListener) close() error { return l.l.Close() }

func (l kernelListener) accept() (script.Conn, error) { return kernelConnOf(l.l.AcceptSMC()) }

// kernelConn is a connected socket of AF_SMC.
type kernelConn struct{ *afsmc.Conn }

func kernelConnOf(c *afsmc.Conn, err error) (script.Conn, error) {
	if err != nil {
		return nil, err
	}
	return kernelConn{c}, nil
}

// Abort is what makes TCP reset a connection. The kernel's SMC-R closes it in
// order all the same.
func (c kernelConn) Abort() error {
	err := c.Control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	return errors.Join(err, c.Close())
}

// endStateTime bounds the wait for the state after the end of a stream.
const endStateTime = 20 * time.Second

// EndState is the socket's state after the end of its stream. A reader may see the end
// before the kernel's worker has changed the state.
func (c kernelConn) EndState() string {
	for end := time.Now().Add(endStateTime); ; time.Sleep(5 * time.Millisecond) { // polls the socket's state
		all, err := smcnl.Sockets(nil)
		s := find(all, c)
		switch {
		case s == nil:
			return fmt.Sprintf("unknown: %v", err)
		case s.State != stateActive || time.Now().After(end):
			return s.State
		}
	}
}

// stateActive is the state of a socket whose stream has not ended.
const stateActive = "ACTIVE"

// find finds a connection among the kernel's sockets.
func find(all []smcnl.Socket, c script.Conn) *smcnl.Socket {
	i := slices.IndexFunc(all, func(s smcnl.Socket) bool {
		return s.Local.String() == c.LocalAddr().String() && s.Peer.String() == c.RemoteAddr().String()
	})
	if i < 0 {
		return nil
	}
	return &all[i]
}

func (c kernelConn) WriteUrgent(p []byte) (int, error) { return sendUrgent(c.File, p) }

func (c kernelConn) ReadUrgent() (byte, error) { return receiveUrgent(c.File) }
