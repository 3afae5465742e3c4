// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// What is said in text.
const (
	wantRDMA = "MAY WE GO ON WITH RDMA?\n"
	goAhead  = "YES, SEND YOUR REQUEST\n" // the last message of the streaming mode
)

var loopback = netip.MustParseAddr("127.0.0.1")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// offer is what the server tells in its private data: where the client may write and read, and the
// sum of each slot to be read.
type offer struct {
	Write    uint64
	WriteKey rdma.RKey
	Read     uint64
	ReadKey  rdma.RKey
	Sums     [depth]uint32
}

const offerLen = 2*(8+4) + 4*depth

func (o *offer) append(b []byte) []byte {
	b, _ = binary.Append(b, binary.BigEndian, o) // all of it is of fixed size
	return b
}

func parseOffer(b []byte) (o offer, err error) {
	if n, err := binary.Decode(b, binary.BigEndian, &o); err != nil || n != len(b) {
		return o, fmt.Errorf("private data of %d bytes, want %d: %w", len(b), offerLen, errors.Join(err, rdma.ErrInvalid))
	}
	return o, nil
}

// serve is the server: one connection.
func serve(t *teller) error {
	if err := tellRights(t); err != nil {
		return err
	}
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(context.Background(), "tcp", net.JoinHostPort(loopback.String(), "0"))
	if err != nil {
		return err
	}
	defer l.Close() //nolint:errcheck // the program ends
	if err := t.tell(line{Addr: l.Addr().String()}); err != nil {
		return err
	}
	c, err := l.Accept()
	if err != nil {
		return err
	}
	said, err := bufio.NewReaderSize(c, len(wantRDMA)).ReadString('\n')
	if err != nil || said != wantRDMA {
		return fmt.Errorf("client said %q: %w", said, errors.Join(err, rdma.ErrInvalid))
	}
	e, err := newEnd(loopback)
	if err != nil {
		return err
	}
	return errors.Join(e.serve(c.(*net.TCPConn)), e.close())
}

// serve makes the connection one of RDMA, and takes what comes until the client says that that is all.
func (e *end) serve(c *net.TCPConn) error {
	o := offer{Write: e.open.Addr(), WriteKey: e.open.RKey(), Read: e.give.Addr(), ReadKey: e.give.RKey()}
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(e.give.Bytes()) // never fails
	for i := range o.Sums {
		o.Sums[i] = crc32.Checksum(e.give.Bytes()[i*mebibyte:][:mebibyte], castagnoli)
	}
	for i := range depth {
		if err := e.recv(uint64(i), e.slot(i)); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionPatience)
	defer cancel()
	s, err := e.dev.NewSSP(c, softiwarp.SSPOptions{QP: e.qp, Last: []byte(goAhead)})
	if err != nil {
		return err
	}
	r, err := s.Request(ctx)
	if err != nil {
		return errors.Join(err, e.dev.Close())
	}
	if err := r.Accept(ctx, nil, softiwarp.ConnectOptions{PrivateData: o.append(nil)}); err != nil {
		return err
	}
	return e.take()
}

// take checks each MiB that arrives, by SEND or by WRITE, and tells the sum of all so far, until the
// client ends the connection. A message of one byte says which slot was written.
func (e *end) take() error {
	var sum uint32
	for {
		wc, err := e.next()
		switch {
		case wc.Status == rdma.StatusFlushed:
			return e.whyEnded()
		case err != nil:
			return err
		case wc.Op != rdma.OpRecv:
			continue
		}
		slot := e.slot(int(wc.ID))
		got := e.bytesOf(slot)[:wc.Bytes]
		if len(got) == 1 {
			i := int(got[0]) % depth
			got = e.open.Bytes()[i*mebibyte:][:mebibyte]
		}
		sum = crc32.Update(sum, castagnoli, got)
		if err := e.recv(wc.ID, slot); err != nil {
			return err
		}
		if err := e.say(binary.BigEndian.AppendUint32(nil, sum)); err != nil {
			return err
		}
	}
}

// whyEnded returns nil if the peer ended the connection in order.
func (e *end) whyEnded() error {
	select {
	case ev := <-e.ctx.Events():
		if ev.Kind == rdma.EventDisconnected {
			return nil
		}
		return fmt.Errorf("connection ended: %v: %w", ev.Kind, ev.Err)
	case <-time.After(completionPatience):
		return errors.New("connection ended for no reason")
	}
}

// ask is the client.
func ask(t *teller, args []string) (err error) {
	if len(args) != 2 {
		return fmt.Errorf("%d arguments, want the address and the MiB: %w", len(args), rdma.ErrInvalid)
	}
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return err
	}
	if err := tellRights(t); err != nil {
		return err
	}
	e, err := newEnd(loopback)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	o, err := e.connect(t, args[0])
	if err != nil {
		return err
	}
	if err := t.tell(line{Title: fmt.Sprintf("%d MiB each way of moving them", n)}); err != nil {
		return err
	}
	m := &mover{end: e, t: t, offer: o}
	m.fill()
	for _, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite} {
		if err := m.give(n, op); err != nil {
			return err
		}
	}
	if err := m.read(n); err != nil {
		return err
	}
	return e.dev.Disconnect(e.qp)
}

// connect talks text, and then asks for RDMA on the same connection.
func (e *end) connect(t *teller, addr string) (o offer, err error) {
	var d net.Dialer
	d.SetMultipathTCP(false)
	ctx, cancel := context.WithTimeout(context.Background(), completionPatience)
	defer cancel()
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return o, err
	}
	c := nc.(*net.TCPConn)
	from, to := c.LocalAddr(), c.RemoteAddr()
	if err := t.tell(line{Title: fmt.Sprintf("A connection of text, %v to %v", from, to)}); err != nil {
		return o, err
	}
	if _, err := c.Write([]byte(wantRDMA)); err != nil {
		return o, err
	}
	answer := make([]byte, len(goAhead)) // and not a byte more: what comes behind it is not text
	for n := 0; n < len(answer); {
		k, err := c.Read(answer[n:])
		if err != nil {
			return o, err
		}
		n += k
	}
	for _, said := range []string{"client: " + wantRDMA, "server: " + string(answer)} {
		if err := t.tell(line{Say: said[:len(said)-1]}); err != nil {
			return o, err
		}
	}
	for i := range depth {
		if err := e.recv(uint64(i), e.note(i)); err != nil {
			return o, err
		}
	}
	pd, err := e.dev.Connect(ctx, e.qp, c, softiwarp.ConnectOptions{})
	if err != nil {
		return o, err
	}
	if o, err = parseOffer(pd); err != nil {
		return o, err
	}
	return o, t.check("the connection of text is one of RDMA now", e.qp.State() == rdma.QPRTS,
		"queue pair %v in %v; the server says what may be written and read", e.qp.Num(), e.qp.State())
}

// mover moves bytes as the client.
type mover struct {
	*end
	t     *teller
	offer offer
	sum   uint32 // of all that the server has
}

// fill fills the slots.
func (m *mover) fill() {
	rng := rand.NewChaCha8([32]byte{2})
	for i := range depth {
		_, _ = rng.Read(m.bytesOf(m.slot(i))) // never fails
	}
}

// give moves n MiB to the server by SEND or WRITE, and compares the sums that it tells.
func (m *mover) give(n int, op rdma.Opcode) error {
	begin := time.Now()
	right := true
	for posted, done := 0, 0; done < n; {
		for ; posted < n && posted-done < depth; posted++ {
			i := posted % depth
			wr := rdma.SendWR{Op: op, SGL: []rdma.SGE{m.slot(i)}}
			if op == rdma.OpWrite {
				wr.RemoteAddr, wr.RKey = m.offer.Write+uint64(i)*mebibyte, m.offer.WriteKey
			}
			if err := m.post(wr); err != nil {
				return err
			}
			if op == rdma.OpWrite {
				if err := m.say([]byte{byte(i)}); err != nil {
					return err
				}
			}
		}
		wc, err := m.next()
		if err != nil {
			return err
		}
		if wc.Op != rdma.OpRecv {
			continue
		}
		note := m.note(int(wc.ID))
		m.sum = crc32.Update(m.sum, castagnoli, m.bytesOf(m.slot(done%depth)))
		right = right && wc.Bytes == 4 && binary.BigEndian.Uint32(m.bytesOf(note)) == m.sum
		done++
		if err := m.recv(wc.ID, note); err != nil {
			return err
		}
	}
	return m.tell(op, n, right, time.Since(begin))
}

// read reads n MiB from the server, and compares their sums with those that it told.
func (m *mover) read(n int) error {
	begin := time.Now()
	right := true
	for posted, done := 0, 0; done < n; {
		for ; posted < n && posted-done < depth; posted++ {
			i := posted % depth
			if err := m.post(rdma.SendWR{
				ID: uint64(i), Op: rdma.OpRead, SGL: []rdma.SGE{m.slot(i)}, RemoteAddr: m.offer.Read + uint64(i)*mebibyte, RKey: m.offer.ReadKey,
			}); err != nil {
				return err
			}
		}
		wc, err := m.next()
		if err != nil {
			return err
		}
		if wc.Op == rdma.OpRead {
			right = right && crc32.Checksum(m.bytesOf(m.slot(int(wc.ID))), castagnoli) == m.offer.Sums[wc.ID]
			done++
		}
	}
	return m.tell(rdma.OpRead, n, right, time.Since(begin))
}

func (m *mover) tell(op rdma.Opcode, n int, right bool, d time.Duration) error {
	return m.t.check(fmt.Sprintf("%d MiB by %v are right", n, op), right,
		"%.2f s, %.1f Gbit/s, sums compared", d.Seconds(), float64(n)*mebibyte*8/1e9/d.Seconds())
}
