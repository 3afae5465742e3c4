// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"encoding/binary"
	"errors"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

const (
	// sendRetry is when a queue pair tries again after the wire was full.
	sendRetry = 500 * time.Microsecond

	// answerBytes is how much of the responses to READs a queue pair sends before others have their turn, or a
	// batch more. A peer may ask for 1 GiB with one packet, and repeat that.
	answerBytes = 256 << 10

	// answerPause is when a queue pair goes on with its responses: a moment after the time of what is handled now, so
	// that of many packets that arrive together no more than one has it send responses.
	answerPause = time.Microsecond

	// freeBatches is the number of idle batches that a device keeps. More
	// goroutines than that rarely transmit at once.
	freeBatches = 8

	// trailerBytes is the room for pad and ICRC.
	trailerBytes = 3 + rocev2.ICRCLen

	// copyBytes is the payload up to which it is copied between its header and
	// trailer: cheaper than two more pieces for the kernel to gather.
	copyBytes = 128
)

// batch is the packets of one queue pair on their way to the wire.
type batch struct {
	pkts    [txBatch]rocev2.TxPacket
	msgs    [txBatch]Message
	runs    [txBatch]run // of msgs
	bufs    [txBatch * (rocev2.MaxSGE + 2)][]byte
	scratch [txBatch * (rocev2.MaxHeaderLen + copyBytes + trailerBytes)]byte
	made    int // messages
	sent    int
}

// run is the packets of a message: those from from on, before to.
type run struct{ from, to uint8 }

// sourcePort is the UDP source port of a flow.
func (d *Device) sourcePort(flow uint8) uint16 {
	if p, ok := d.wire.(PortSender); ok {
		return p.SourcePort(flow)
	}
	return d.Addr().Port()
}

func (d *Device) getBatch() *batch {
	select {
	case b := <-d.batches:
		return b
	default:
		return new(batch)
	}
}

func (d *Device) putBatch(b *batch) {
	select {
	case d.batches <- b:
	default:
	}
}

// segmentable returns how many of pkts make one message: all of one size, but the
// last may be shorter.
func segmentable(pkts []rocev2.TxPacket, most int) int {
	size := pkts[0].UDPLen()
	n, total := 1, size
	for n < len(pkts) && n < most {
		s := pkts[n].UDPLen()
		if s > size || total+s > maxMessageBytes {
			break
		}
		n, total = n+1, total+s
		if s < size {
			break
		}
	}
	return n
}

// build makes messages of the first n packets. A packet's trailer and the
// next one's header lie together in scratch, so that a packet costs two
// pieces at most.
//
// The ICRC covers the IPv4 identification: 0 for a packet by itself, and i
// for packet i of a segmented send.
func (b *batch) build(n, segments int, q *qp) {
	s, bufs := b.scratch[:0], b.bufs[:0]
	b.made, b.sent = 0, 0
	for i := 0; i < n; {
		count := segmentable(b.pkts[i:n], segments)
		first, open := len(bufs), len(s)
		for k := range count {
			p := &b.pkts[i+k]
			crc := q.txICRC.SumTx(uint16(k), p)
			s = append(s, p.Hdr[:p.HdrLen]...)
			if p.PayloadLen <= copyBytes {
				for _, b := range p.Payload[:p.Segs] {
					s = append(s, b...)
				}
			} else {
				bufs = append(bufs, s[open:len(s):len(s)])
				open = len(s)
				bufs = append(bufs, p.Payload[:p.Segs]...)
			}
			s = append(s, "\x00\x00\x00"[:p.Pad]...)
			s = binary.LittleEndian.AppendUint32(s, crc)
		}
		bufs = append(bufs, s[open:len(s):len(s)])
		m := &b.msgs[b.made]
		b.runs[b.made] = run{uint8(i), uint8(i + count)}
		b.made++
		m.Peer, m.Flow = q.peer, q.flow
		m.Bufs = bufs[first:len(bufs):len(bufs)]
		m.SegmentBytes = 0
		if count > 1 {
			m.SegmentBytes = b.pkts[i].UDPLen()
		}
		i += count
	}
}

// burst is how many packets are made at a time: so many that a long WRITE fills each of
// its UDP_SEGMENT sends. Batches of 64 packets would leave as 61 and 3 at path MTU 1024.
func burst(mtu, segments int) int {
	run := max(1, min(segments, maxMessageBytes/rocev2.FullWrite(mtu)))
	return txBatch / run * run
}

// answerFirst puts an acknowledgement behind what leaves with the first message beside it: the
// peer waits for that, and a shorter packet at its end costs no message of its own.
func (b *batch) answerFirst(n, segments int) {
	if n < 2 || rocev2.OpCode(b.pkts[0].Hdr[0]) != rocev2.Acknowledge {
		return
	}
	last := segmentable(b.pkts[1:n], segments)
	ack := b.pkts[0]
	copy(b.pkts[:last], b.pkts[1:last+1])
	b.pkts[last] = ack
}

// Transmit implements [softdev.Carrier].
func (q *qp) Transmit(now time.Time) {
	if now.Before(q.answerAt) && q.m.Answers() {
		return
	}
	q.answerAt = time.Time{}
	b := q.unsent
	q.unsent = nil
	if b == nil {
		b = q.dev.getBatch()
	} else {
		b.forget(q.m, &q.txICRC) // the program knows what completed meanwhile
		if !q.dev.send(b) {
			q.unsent = b
			return
		}
	}
	segments := q.dev.wire.MaxSegments()
	for left := answerBytes; left > 0; {
		answers := q.m.Answers()
		n := q.m.PollTx(now, b.pkts[:q.burst])
		if n == 0 {
			break
		}
		if answers {
			left -= b.payload(n)
		}
		b.answerFirst(n, segments)
		b.build(n, segments, q)
		q.dev.stats.txPackets.Add(uint64(n))
		if !q.dev.send(b) {
			q.unsent = b
			return
		}
		if left <= 0 {
			q.answerAt = now.Add(answerPause)
		}
	}
	q.dev.putBatch(b)
}

// payload is the bytes that the first n packets carry.
func (b *batch) payload(n int) (sum int) {
	for i := range b.pkts[:n] {
		sum += b.pkts[i].PayloadLen
	}
	return sum
}

// send gives a batch to the wire. False means that some of it has to wait.
func (d *Device) send(b *batch) bool {
	for b.sent < b.made {
		n, err := d.wire.Send(b.msgs[b.sent:b.made])
		b.sent += n
		switch {
		case err == nil:
		case errors.Is(err, ErrWouldBlock):
			d.stats.txWaits.Add(1)
			return false
		case errors.Is(err, net.ErrClosed):
			b.sent = b.made
		default:
			// No route, a neighbour that does not answer, a packet above the
			// interface's MTU: as if it was lost on the way.
			d.stats.txErrors.Add(1)
			if errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EINVAL) {
				d.tellTooLarge(&b.msgs[b.sent], err)
			}
			b.sent++
		}
	}
	return true
}

// tellTooLarge has Config.TooLarge called for a message. Of segments that are too large most kernels say EINVAL.
func (d *Device) tellTooLarge(m *Message, err error) {
	if errors.Is(err, unix.EINVAL) && m.SegmentBytes == 0 {
		return
	}
	p := TooLarge{Peer: m.Peer.Addr(), PacketBytes: m.SegmentBytes}
	if p.PacketBytes == 0 {
		for _, b := range m.Bufs {
			p.PacketBytes += len(b)
		}
	}
	if p.Peer.Is4() {
		p.PacketBytes += 20 + 8 // IPv4 and UDP
	} else {
		p.PacketBytes += 40 + 8
	}
	select {
	case d.refused <- p:
	default: // another one is to be told
	}
}

// forget drops the messages that refer to memory which the machine does not lend any more, as if
// they were lost on the way: their work requests completed while the wire was full, and the
// program may have other bytes there, which are not the peer's. Without a machine it drops all
// that refer to memory. The others stay, and an acknowledgement at the end of one that is dropped:
// a NAK is sent only once, and the peer needs it to learn why nobody answers any more.
//
//	program            queue pair                               wire
//	posts a WRITE -->  makes a batch, which has to wait         full
//	                   ERR; or the peer acknowledges the
//	completion    <--  WRITE, of which this is a repetition
//	fills the memory
//	for others         forget                                   has room
func (b *batch) forget(m *rocev2.QP, icrc *rocev2.ICRC) {
	kept := b.sent
	for i := b.sent; i < b.made; i++ {
		if !b.isStale(i, m) || b.onlyAnswer(i, icrc) {
			b.msgs[kept], b.runs[kept] = b.msgs[i], b.runs[i]
			kept++
		}
	}
	b.made = kept
}

// onlyAnswer makes of a message only the acknowledgement at its end, which by itself has another ICRC, see build. False
// means that there is none.
func (b *batch) onlyAnswer(i int, icrc *rocev2.ICRC) bool {
	m, last := &b.msgs[i], b.runs[i].to-1
	p := &b.pkts[last]
	if rocev2.OpCode(p.Hdr[0]) != rocev2.Acknowledge {
		return false
	}
	piece := m.Bufs[len(m.Bufs)-1] // with the trailer of the packet before
	piece = piece[len(piece)-p.UDPLen():]
	binary.LittleEndian.PutUint32(piece[p.HdrLen:], icrc.SumTx(0, p))
	m.Bufs, m.SegmentBytes = append(m.Bufs[:0], piece), 0
	b.runs[i].from = last
	return true
}

// isStale reports whether forget drops a message.
func (b *batch) isStale(i int, m *rocev2.QP) bool {
	switch {
	case len(b.msgs[i].Bufs) == 1: // all in scratch
		return false
	case m == nil:
		return true
	}
	for k := b.runs[i].from; k < b.runs[i].to; k++ {
		if p := &b.pkts[k]; p.PayloadLen > copyBytes && !m.Lends(p) {
			return true
		}
	}
	return false
}
