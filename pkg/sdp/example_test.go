// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"

	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// openStack opens SDP over iWARP in software.
func openStack(addr string) (*sdp.Stack, func()) {
	dev, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: netip.MustParseAddr(addr)})
	if err != nil {
		log.Fatal(err)
	}
	stack, err := sdp.NewStack(sdp.Config{Device: dev})
	if err != nil {
		log.Fatal(err)
	}
	return stack, func() {
		_ = stack.Close()
		_ = dev.Close()
	}
}

// A server sends from a Buffer, and the client receives into a Buffer of its own. This package copies only the first 64 bytes, which go with
// the offer.
func Example() {
	server, done := openStack("127.93.0.4")
	defer done()
	l, err := sdp.Listen(context.Background(), server, "tcp", "127.93.0.4:0")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		c, err := l.Accept()
		if err != nil {
			log.Print(err)
			return
		}
		buf, err := server.AllocBuffer(1 << 20)
		if err != nil {
			log.Print(err)
			return
		}
		for i := range buf.Bytes() {
			buf.Bytes()[i] = 'x'
		}
		if _, err := c.(*sdp.Conn).WriteBuffer(buf, 0, 1<<20); err != nil {
			log.Print(err)
		}
		_ = c.Close()
		_ = buf.Close()
	}()

	client, done := openStack("127.93.0.3")
	defer done()
	dialer := sdp.Dialer{Stack: client, Dialer: net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 93, 0, 3)}}}
	c, _, err := dialer.Dial(context.Background(), l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	conn := c.(*sdp.Conn)
	buf, err := client.AllocBuffer(1 << 20)
	if err != nil {
		log.Fatal(err)
	}
	n, err := conn.ReadBuffer(buf, 0, 1<<20, true)
	fmt.Println(n, "bytes,", conn.Info().BytesRead, "by RDMA READ,", conn.Info().BytesCopied, "copied:", err)
	_, err = conn.Read(make([]byte, 1))
	fmt.Println(errors.Is(err, io.EOF))
	_ = conn.Close()
	_ = buf.Close()
	// Output:
	// 1048576 bytes, 1048512 by RDMA READ, 64 copied: <nil>
	// true
}
