// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

const loopback = "127.0.0.1"

// block is how much is read and written at a time.
const block = 1 << 20

// openStack opens SDP over iWARP in software, which takes no rights.
func openStack() (*sdp.Stack, func(), error) {
	dev, err := softiwarp.Open(softiwarp.Config{Name: "iw0", Addr: netip.MustParseAddr(loopback)})
	if err != nil {
		return nil, nil, err
	}
	s, err := sdp.NewStack(sdp.Config{Device: dev, MaxULPDU: iwarp.MaxOwnULPDU})
	if err != nil {
		return nil, nil, errors.Join(err, dev.Close())
	}
	return s, func() {
		_ = s.Close()
		_ = dev.Close()
	}, nil
}

// cpu is the processor time that this program has used.
func cpu() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// serve is the server: it answers as many connections as there are ways.
func serve(ctx context.Context, out *json.Encoder, file string) error {
	stack, done, err := openStack()
	if err != nil {
		return err
	}
	defer done()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.ParseIP(loopback)})
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }()
	if err := out.Encode(said{Addr: l.Addr().String()}); err != nil {
		return err
	}
	for range ways {
		tcp, err := l.AcceptTCP()
		if err != nil {
			return err
		}
		s, err := answer(ctx, stack, tcp, file)
		if err == nil {
			err = out.Encode(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// answer sends the file in the way that the client asks for.
func answer(ctx context.Context, stack *sdp.Stack, tcp *net.TCPConn, file string) (said, error) {
	f, err := os.Open(file)
	if err != nil {
		return said{}, errors.Join(err, tcp.Close())
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return said{}, errors.Join(err, tcp.Close())
	}
	asked, err := readLine(tcp)
	way, ok := strings.CutPrefix(asked, "GET ")
	if err == nil && !ok {
		err = fmt.Errorf("client says %q", asked)
	}
	if err == nil {
		_, err = fmt.Fprintf(tcp, "200 %d bytes by %s\n", info.Size(), way)
	}
	if err != nil {
		return said{}, errors.Join(err, tcp.Close())
	}
	s, began := said{Way: way}, cpu()
	if way == "tcp" {
		_, err = io.CopyBuffer(struct{ io.Writer }{tcp}, struct{ io.Reader }{f}, make([]byte, block))
		s.CPU = cpu() - began
		return s, errors.Join(err, tcp.Close())
	}
	c, err := stack.Server(ctx, tcp)
	if err != nil {
		return s, err
	}
	if way == "bcopy" {
		_, err = io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{f}, make([]byte, block))
	} else {
		_, err = c.ReadFrom(f)
	}
	if err = errors.Join(err, c.CloseWrite()); err == nil {
		_, err = io.Copy(io.Discard, c) // until the client has all, and says so by its end
	}
	s.account(c, began)
	return s, errors.Join(err, c.Close())
}

// account takes what a connection says of itself.
func (s *said) account(c *sdp.Conn, began time.Duration) {
	i := c.Info()
	s.CPU, s.Copied, s.ByRDMA, s.Messages = cpu()-began, i.BytesCopied, i.BytesRead+i.BytesWritten, i.MessagesSent
}

// get is the client: it gets the file in each way.
func get(ctx context.Context, out *json.Encoder, addr string) error {
	stack, done, err := openStack()
	if err != nil {
		return err
	}
	defer done()
	for _, way := range ways {
		s, err := ask(ctx, stack, addr, way)
		if err == nil {
			err = out.Encode(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ask gets the file in one way.
func ask(ctx context.Context, stack *sdp.Stack, addr, way string) (said, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil {
		return said{}, err
	}
	tcp, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(at))
	if err != nil {
		return said{}, err
	}
	s := said{Way: way}
	if _, err = fmt.Fprintf(tcp, "GET %s\n", way); err == nil {
		s.Text, err = readLine(tcp)
	}
	if err != nil {
		return s, errors.Join(err, tcp.Close())
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	began, start, before := cpu(), time.Now(), packets()
	var n int64
	if way == "tcp" {
		n, err = io.CopyBuffer(sum, struct{ io.Reader }{tcp}, make([]byte, block))
		s.CPU = cpu() - began
		err = errors.Join(err, tcp.Close())
	} else {
		var c *sdp.Conn
		if c, err = stack.Client(ctx, tcp); err != nil {
			return s, err
		}
		if way == "bcopy" {
			n, err = io.CopyBuffer(sum, struct{ io.Reader }{c}, make([]byte, block))
		} else {
			n, err = c.WriteTo(sum)
		}
		s.account(c, began)
		err = errors.Join(err, c.Close())
	}
	s.Bytes, s.Sum, s.Took, s.Packets = uint64(n), sum.Sum32(), time.Since(start), packets()-before
	return s, err
}

// readLine reads a line and not a byte more: what follows may be SDP's.
func readLine(r io.Reader) (string, error) {
	var b [1]byte
	for line := []byte(nil); len(line) < 100; line = append(line, b[0]) {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
	}
	return "", errors.New("a line of more than 100 bytes")
}
