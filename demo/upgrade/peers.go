// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

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

// firstBytes is the length of the first WRITE and READ.
const firstBytes = 64

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

// serve is the server of one connection: its arguments are the kind of way and its own address.
func serve(t *teller, args []string) (err error) {
	if len(args) != 2 {
		return fmt.Errorf("%d arguments, want a kind and an address: %w", len(args), rdma.ErrInvalid)
	}
	w, err := begin(t, args[0], args[1])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	addr, err := w.listen()
	if err != nil {
		return err
	}
	if err := t.tell(line{Addr: addr}); err != nil {
		return err
	}
	if err := w.meet(); err != nil {
		return err
	}
	e, err := newEnd(w)
	if err != nil {
		return err
	}
	return errors.Join(e.serve(w), e.close())
}

// begin is what both programs begin with.
func begin(t *teller, kind, addr string) (way, error) {
	if err := tellRights(t); err != nil {
		return nil, err
	}
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return nil, err
	}
	return newWay(kind, a)
}

// serve makes the connection one of RDMA, and takes what comes until the client says that that is all.
func (e *end) serve(w way) error {
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
	if err := w.accept(ctx, e, o.append(nil)); err != nil {
		return err
	}
	return e.take(w)
}

// take checks each MiB that arrives, by SEND or by WRITE, and tells the sum of all so far, until the
// client ends the connection. A message of one byte says which slot was written.
func (e *end) take(w way) error {
	var sum uint32
	for {
		wc, err := e.next()
		switch {
		case wc.Status == rdma.StatusFlushed:
			return w.ended(e)
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

// ask is the client: its arguments are the kind of way, its own address, the server's, and the MiB.
func ask(t *teller, args []string) (err error) {
	if len(args) != 4 {
		return fmt.Errorf("%d arguments, want a kind, two addresses and the MiB: %w", len(args), rdma.ErrInvalid)
	}
	n, err := strconv.Atoi(args[3])
	if err != nil {
		return err
	}
	w, err := begin(t, args[0], args[1])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	e, err := newEnd(w)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	for i := range depth {
		if err := e.recv(uint64(i), e.note(i)); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), completionPatience)
	defer cancel()
	private, err := w.connect(ctx, t, e, args[2])
	if err != nil {
		return err
	}
	o, err := parseOffer(private)
	if err != nil {
		return err
	}
	if err := t.tell(line{Title: fmt.Sprintf("%d MiB each way of moving them", n)}); err != nil {
		return err
	}
	m := &mover{end: e, t: t, offer: o}
	if err := m.first(); err != nil {
		return err
	}
	m.fill()
	for _, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite} {
		if err := m.give(n, op); err != nil {
			return err
		}
	}
	if err := m.read(n); err != nil {
		return err
	}
	return w.disconnect(e)
}

// mover moves bytes as the client.
type mover struct {
	*end
	t     *teller
	offer offer
	sum   uint32 // of all that the server has
}

// first writes and reads a few bytes: so each kind of message is among the first frames, which the demo
// shows.
func (m *mover) first() error {
	piece := m.slot(0)
	piece.Length = firstBytes
	for _, wr := range []rdma.SendWR{
		{Op: rdma.OpWrite, RemoteAddr: m.offer.Write, RKey: m.offer.WriteKey},
		{Op: rdma.OpRead, RemoteAddr: m.offer.Read, RKey: m.offer.ReadKey},
	} {
		wr.SGL = []rdma.SGE{piece}
		if err := m.post(wr); err != nil {
			return err
		}
		for done := false; !done; {
			wc, err := m.next()
			if err != nil {
				return err
			}
			done = wc.Op == wr.Op
		}
	}
	return nil
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
