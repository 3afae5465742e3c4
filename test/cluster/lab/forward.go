// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"

	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
)

// A forwarder lets the host's programs reach the API server, which listens in
// the control plane's network only: it listens on the host's loopback.
type forwarder struct {
	listener net.Listener
	to       *machine.Machine
	conns    sync.WaitGroup
}

func listen() (net.Listener, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the API server's clients: %w", err)
	}
	return l, nil
}

// forward starts to forward; close ends it.
func forward(l net.Listener, to *machine.Machine) *forwarder {
	f := &forwarder{listener: l, to: to}
	f.conns.Go(func() {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				f.conns.Go(func() { f.carry(conn.(*net.TCPConn)) })
			}
		}
	})
	return f
}

// carry copies in both directions until both have ended.
func (f *forwarder) carry(in *net.TCPConn) {
	defer func() { _ = in.Close() }()
	conn, err := dialIn(f.to, netip.MustParseAddrPort("127.0.0.1:"+apiServerPort))
	if err != nil {
		_ = in.SetLinger(0) // the client sees a refused connection, as it would directly
		return
	}
	out := conn.(*net.TCPConn)
	defer func() { _ = out.Close() }()
	var back sync.WaitGroup
	back.Go(func() { copyHalf(in, out) })
	copyHalf(out, in)
	back.Wait()
}

func copyHalf(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		_ = from.SetLinger(0)
		_ = from.Close()
		_ = to.Close()
		return
	}
	_ = to.CloseWrite()
}

// close ends listening; connections end with the machine, which is gone by then.
func (f *forwarder) close() {
	_ = f.listener.Close()
	f.conns.Wait()
}
