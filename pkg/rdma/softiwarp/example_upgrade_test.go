// SPDX-License-Identifier: Apache-2.0

package softiwarp_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// A protocol of lines gets a command UPGRADE: the same connection goes on as one of RDMA. What is
// refused, or not understood, leaves it one of lines.
func ExampleDevice_NewSSP() {
	d, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	served := make(chan error, 1)
	go func() {
		c, err := l.AcceptTCP()
		if err == nil {
			err = serveLines(d, c)
		}
		served <- err
	}()

	c, err := net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr))
	if err != nil {
		log.Fatal(err)
	}
	if err := sendUpgraded(d, c, "hello"); err != nil {
		log.Fatal(err)
	}
	if err := <-served; err != nil {
		log.Fatal(err)
	}
	// Output:
	// server: line "UPGRADE"
	// client: line "200 go on"
	// server: message "hello" by RDMA
}

// serveLines is the server.
func serveLines(d *softiwarp.Device, c *net.TCPConn) error {
	lines := bufio.NewReader(c)
	line, _, err := lines.ReadLine()
	if err != nil || string(line) != "UPGRADE" {
		return errors.Join(fmt.Errorf("line %q", line), err, c.Close())
	}
	fmt.Printf("server: line %q\n", line)
	e, err := newEndpoint(d)
	if err != nil {
		return err // and here the connection could go on with lines
	}
	defer func() { _ = e.Close() }()
	sge := rdma.SGE{Addr: e.mr.Addr(), Length: 64, LKey: e.mr.LKey()}
	if _, err := e.qp.PostRecv([]rdma.RecvWR{{SGE: sge}}); err != nil {
		return err
	}
	early, err := lines.Peek(lines.Buffered()) // what came behind the line
	if err != nil {
		return err
	}
	s, err := d.NewSSP(c, softiwarp.SSPOptions{QP: e.qp, Early: early, Last: []byte("200 go on\n")})
	if err != nil {
		return err
	}
	r, err := s.Request(context.Background())
	if err != nil {
		return err // and s.Close returns the connection
	}
	if err := r.Accept(context.Background(), nil, softiwarp.ConnectOptions{}); err != nil {
		return err
	}
	wc, err := e.next()
	if err == nil {
		fmt.Printf("server: message %q by RDMA\n", e.mr.Bytes()[:wc.Bytes])
	}
	return err
}

// sendUpgraded is the client.
func sendUpgraded(d *softiwarp.Device, c *net.TCPConn, message string) error {
	if _, err := io.WriteString(c, "UPGRADE\n"); err != nil {
		return err
	}
	answer := make([]byte, len("200 go on\n")) // and not a byte more: that would be RDMA's
	if _, err := io.ReadFull(c, answer); err != nil {
		return err
	}
	fmt.Printf("client: line %q\n", answer[:len(answer)-1])
	e, err := newEndpoint(d)
	if err != nil {
		return err
	}
	defer func() { _ = e.Close() }()
	if _, err := d.Connect(context.Background(), e.qp, c, softiwarp.ConnectOptions{}); err != nil {
		return err // a ConnectError has the connection
	}
	sge := rdma.SGE{Addr: e.mr.Addr(), Length: uint32(copy(e.mr.Bytes(), message)), LKey: e.mr.LKey()}
	if _, err := e.qp.PostSend([]rdma.SendWR{{Op: rdma.OpSend, SGL: []rdma.SGE{sge}, Flags: rdma.SendSignaled}}); err != nil {
		return err
	}
	if _, err := e.next(); err != nil {
		return err
	}
	return d.Disconnect(e.qp)
}
