// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// testFrames talks to rping on siw byte by byte.
func (b *bed) testFrames(t *testing.T) {
	t.Run("initiator", b.testInitiator)
	t.Run("responder", b.testResponder)
	t.Run("RTR of siw by a READ", b.testRTRRead)
}

// A stream is a connection of a test's with its deadline.
type stream struct {
	*net.TCPConn
	r *bufio.Reader
}

func newStream(t *testing.T, c *net.TCPConn) *stream {
	t.Helper()
	t.Cleanup(func() { _ = c.Close() }) // most are closed by then
	if err := c.SetDeadline(time.Now().Add(caseTimeout)); err != nil {
		t.Fatal(err)
	}
	return &stream{TCPConn: c, r: bufio.NewReader(c)}
}

func (s *stream) write(t *testing.T, b []byte) {
	t.Helper()
	if _, err := s.Write(b); err != nil {
		t.Fatal(err)
	}
}

// want reads a frame that is to be these bytes.
func (s *stream) want(t *testing.T, size func([]byte) int, want []byte) {
	t.Helper()
	if got := s.next(t, size); !slices.Equal(got, want) {
		t.Fatalf("siw sent\n%s\nwant\n%s", hex.Dump(got), hex.Dump(want))
	}
}

func (s *stream) next(t *testing.T, size func([]byte) int) []byte {
	t.Helper()
	b, err := readFrame(s.r, size)
	if err != nil {
		t.Fatalf("read a frame of siw: %v, after %d bytes of it\n%s", err, len(b), hex.Dump(b))
	}
	return b
}

// await waits until siw answers our first FPDUs. Linux sends its Reply before it is ready to
// be told that more has come: what comes too soon it sees when something comes after it. So
// await sends Writes without data, which mean nothing, until there is an answer or the end.
func (s *stream) await(t *testing.T, crc bool) {
	t.Helper()
	const patience = 200 * time.Millisecond
	for began := time.Now(); time.Since(began) < caseTimeout; {
		if err := s.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.r.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if _, err := s.Write(fpdu(tagged(opWrite, 0, 0), crc)); err != nil {
			t.Logf("siw has ended the connection: %v", err)
			break
		}
	}
	if err := s.SetReadDeadline(time.Now().Add(caseTimeout)); err != nil {
		t.Fatal(err)
	}
}

// wantEnd waits until siw has closed or reset the connection.
func (s *stream) wantEnd(t *testing.T) {
	t.Helper()
	if got, err := readFrame(s.r, fpduSize); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("siw sent %x, %v; want the end of the connection", got, err)
	}
}

func (b *bed) open(t *testing.T, to netip.AddrPort) *stream {
	t.Helper()
	c, err := b.host.Dial(limited(t), to)
	if err != nil {
		t.Fatal(err)
	}
	return newStream(t, c)
}

// testInitiator sends siw Requests, checks the bytes of its Replies, and goes on until it is
// sure that rping has the connection: the kernel of a guest whose peer goes before stops with
// a BUG in iw_cm.
func (b *bed) testInitiator(t *testing.T) {
	_, server := b.serve(t, "rping", "-s", "-P")
	for _, c := range []struct {
		name           string
		request, reply []byte // no reply: siw resets the connection
	}{
		{"plain", start(requestKey, flagEnhanced, 2, depths(1, 1)...), start(replyKey, flagEnhanced, 2, depths(1, 1)...)},
		{"CRC", start(requestKey, flagCRC|flagEnhanced, 2, depths(16, 16)...), start(replyKey, flagCRC|flagEnhanced, 2, depths(16, 16)...)},
		{
			"RTR by a Write", start(requestKey, flagCRC|flagEnhanced, 2, depths(peerToPeer|16, rtrWrite|16)...),
			start(replyKey, flagCRC|flagEnhanced, 2, depths(peerToPeer|16, rtrWrite|16)...),
		},
		{
			"RTR by a Read", start(requestKey, flagCRC|flagEnhanced, 2, depths(peerToPeer|16, rtrRead|16)...),
			start(replyKey, flagCRC|flagEnhanced, 2, depths(peerToPeer|16, rtrRead|16)...),
		},
		{
			"RTR by either", start(requestKey, flagCRC|flagEnhanced, 2, depths(peerToPeer|16, rtrWrite|rtrRead|16)...),
			start(replyKey, flagCRC|flagEnhanced, 2, depths(peerToPeer|16, rtrWrite|16)...),
		},
		{
			"more READs than siw has", start(requestKey, flagEnhanced, 2, depths(1<<14-1, 1<<14-1)...),
			start(replyKey, flagEnhanced, 2, depths(128, 128)...),
		},
		{"revision 1", start(requestKey, flagCRC, 1), start(replyKey, flagCRC, 1)},
		{"markers", start(requestKey, flagMarkers|flagEnhanced, 2, depths(1, 1)...), start(replyKey, flagReject|flagEnhanced, 2, depths(0, 0)...)},
		{
			"as much private data as siw takes", start(requestKey, flagEnhanced, 2, append(depths(1, 1), make([]byte, 252)...)...),
			start(replyKey, flagEnhanced, 2, depths(1, 1)...),
		},
		{"more private data", start(requestKey, flagEnhanced, 2, append(depths(1, 1), make([]byte, 253)...)...), nil},
		{"another protocol", []byte("GET / HTTP/1.1\r\nHost: g0\r\n\r\n"), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := b.open(t, server)
			s.write(t, c.request)
			if c.reply == nil {
				if got, err := readFrame(s.r, startSize); !errors.Is(err, unix.ECONNRESET) || len(got) > 0 {
					t.Errorf("siw sent %q, %v; want it to reset the connection", got, err)
				}
				return
			}
			s.want(t, startSize, c.reply)
			switch {
			case c.reply[keyBytes]&flagReject != 0:
				s.wantEnd(t)
			case c.reply[keyBytes+1] == 1: // rping has no READs then, and gives up
				s.write(t, fpdu(untagged(opSend, sendQueue, pingInfo(1, 1, 1)), true))
				s.await(t, true)
				s.wantEnd(t)
			default:
				s.converse(t, c.reply, opSend)
			}
		})
	}
	t.Run("SEND with SE", func(t *testing.T) {
		s := b.open(t, server)
		s.write(t, start(requestKey, flagCRC|flagEnhanced, 2, depths(1, 1)...))
		reply := start(replyKey, flagCRC|flagEnhanced, 2, depths(1, 1)...)
		s.want(t, startSize, reply)
		s.converse(t, reply, opSendSE)
	})
	t.Run("SEND with Invalidate", func(t *testing.T) { b.testInvalidate(t, server) })
	t.Run("a wrong CRC", func(t *testing.T) { b.testWrongCRC(t, server) })
}

// testInvalidate has siw invalidate an STag that it has not. Its Terminate says remote operation, code 9, with layer
// and type the other way round.
func (b *bed) testInvalidate(t *testing.T, server netip.AddrPort) {
	s := b.open(t, server)
	s.write(t, start(requestKey, flagCRC|flagEnhanced, 2, depths(1, 1)...))
	s.want(t, startSize, start(replyKey, flagCRC|flagEnhanced, 2, depths(1, 1)...))
	u := untagged(opSendInv, sendQueue, pingInfo(1, 1, 1))
	binary.BigEndian.PutUint32(u[2:], 0x12345678)
	s.write(t, fpdu(u, true))
	s.await(t, true)
	got := s.next(t, fpduSize)
	const head = lengthBytes + untaggedBytes
	if len(got) < head+2 || got[lengthBytes+1] != rdmapVersion|opTerminate || got[head] != 0x20 || got[head+1] != 0x09 {
		t.Errorf("siw sent\n%swant a Terminate that says that it cannot invalidate", hex.Dump(got))
	}
	s.wantEnd(t)
}

// What a ULPDU begins with (RFC 5041 §4, RFC 5040 §4): DDP's control byte, here of the last
// segment of an untagged message, RDMAP's version with the opcode, and the rest of the header.
const (
	ddpTaggedLast, ddpUntaggedLast = 0xc1, 0x41
	rdmapVersion                   = 0x40
	untaggedBytes                  = 18

	opWrite, opReadRequest, opReadResponse, opSend, opSendInv, opSendSE, opTerminate = 0, 1, 2, 3, 4, 5, 7
	// The queues of untagged messages.
	sendQueue, readQueue, terminateQueue = 0, 1, 2
)

// untagged makes the ULPDU of the first message of a queue, of one segment.
func untagged(op byte, queue uint32, payload []byte) []byte {
	b := []byte{ddpUntaggedLast, rdmapVersion | op, 0, 0, 0, 0}
	b = binary.BigEndian.AppendUint32(b, queue)
	b = binary.BigEndian.AppendUint32(b, 1) // the message's number
	b = binary.BigEndian.AppendUint32(b, 0) // the offset in the message
	return append(b, payload...)
}

// tagged makes the ULPDU of a message without data.
func tagged(op byte, stag uint32, to uint64) []byte {
	b := binary.BigEndian.AppendUint32([]byte{ddpTaggedLast, rdmapVersion | op}, stag)
	return binary.BigEndian.AppendUint64(b, to)
}

// readRequest is what a Read Request has behind its header.
func readRequest(sink []byte, size, stag uint32, to uint64) []byte {
	b := binary.BigEndian.AppendUint32(slices.Clone(sink), size)
	b = binary.BigEndian.AppendUint32(b, stag)
	return binary.BigEndian.AppendUint64(b, to)
}

// sinkBytes are the STag and the offset of where a READ goes to, and readRequestBytes all that a Read
// Request has behind its header.
const (
	sinkBytes        = 4 + 8
	readRequestBytes = 28
)

// pingInfo is what rping says to rping of a buffer.
func pingInfo(to uint64, stag, size uint32) []byte {
	b := binary.BigEndian.AppendUint64(nil, to)
	b = binary.BigEndian.AppendUint32(b, stag)
	return binary.BigEndian.AppendUint32(b, size)
}

// pingInfoBytes is its size.
const pingInfoBytes = 16

// converse says that we are ready, if the Reply asks for it, and names rping a buffer by a form of
// SEND, which it then asks to read.
func (s *stream) converse(t *testing.T, reply []byte, op byte) {
	t.Helper()
	const stag, to, size = 0x12345601, 0x0102030405060708, 64
	crc := reply[keyBytes]&flagCRC != 0
	ird, ord := binary.BigEndian.Uint16(reply[startBytes:]), binary.BigEndian.Uint16(reply[startBytes+2:])
	switch {
	case ird&peerToPeer == 0:
	case ord&rtrWrite != 0:
		s.write(t, fpdu(tagged(opWrite, 0, 0), crc))
	case ord&rtrRead != 0:
		sink := make([]byte, sinkBytes)
		s.write(t, fpdu(untagged(opReadRequest, readQueue, readRequest(sink, 0, 0, 0)), crc))
		s.await(t, crc)
		s.want(t, fpduSize, fpdu(tagged(opReadResponse, 0, 0), crc))
	}
	s.write(t, fpdu(untagged(op, sendQueue, pingInfo(to, stag, size)), crc))
	s.await(t, crc)
	got := s.next(t, fpduSize)
	sink := make([]byte, sinkBytes) // is siw's choice
	copy(sink, got[min(len(got), lengthBytes+untaggedBytes):])
	if want := fpdu(untagged(opReadRequest, readQueue, readRequest(sink, size, stag, to)), crc); !slices.Equal(got, want) {
		t.Errorf("siw sent\n%swant a Read Request\n%s", hex.Dump(got), hex.Dump(want))
	}
}

// testWrongCRC flips a bit. The Terminate that siw answers with says that the CRC is
// wrong: layer 2, which is MPA's, type 0, code 2. RFC 5040 §4.8 has the layer in the upper
// four bits, as 0x20; Linux has it in the lower ones.
func (b *bed) testWrongCRC(t *testing.T, server netip.AddrPort) {
	s := b.open(t, server)
	s.write(t, start(requestKey, flagCRC|flagEnhanced, 2, depths(1, 1)...))
	reply := start(replyKey, flagCRC|flagEnhanced, 2, depths(1, 1)...)
	s.want(t, startSize, reply)
	s.converse(t, reply, opSend)
	bad := fpdu(tagged(opWrite, 0, 0), true)
	bad[len(bad)-1] ^= 1
	b.badCRCs++
	s.write(t, bad)
	s.want(t, fpduSize, fpdu(untagged(opTerminate, terminateQueue, []byte{0x02, 0x02, 0, 0}), true))
	s.wantEnd(t)
}

// testRTRRead takes a connection of a siw that is ready by a READ, which the Reply chooses.
func (b *bed) testRTRRead(t *testing.T) {
	b.set(t, settings{"peer_to_peer": "1"})
	l, err := b.host.Listen(limited(t), netip.AddrPortFrom(b.host.Addr(), 0))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	at := l.Addr().(*net.TCPAddr).AddrPort()
	p := b.start(t, "rping", "-c", "-a", at.Addr().String(), "-p", strconv.Itoa(int(at.Port())), "-C", "1", "-S", "64")
	conn, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	s := newStream(t, conn)
	request := s.next(t, startSize)
	ord := binary.BigEndian.Uint16(request[startBytes+2:])
	if request[startBytes]&(peerToPeer>>8) == 0 || ord&rtrRead == 0 {
		t.Fatalf("siw asks with %x, want peer-to-peer with a READ", request)
	}
	s.write(t, start(replyKey, flagEnhanced, 2, depths(peerToPeer|1, rtrRead|1)...))
	const head = lengthBytes + untaggedBytes
	got := s.next(t, fpduSize)
	if len(got) < head+readRequestBytes || got[lengthBytes+1] != rdmapVersion|opReadRequest || binary.BigEndian.Uint32(got[head+sinkBytes:]) != 0 {
		t.Fatalf("siw sent\n%swant a Read Request for nothing", hex.Dump(got))
	}
	s.write(t, fpdu(tagged(opReadResponse, binary.BigEndian.Uint32(got[head:]), binary.BigEndian.Uint64(got[head+4:])), false))
	info := s.next(t, fpduSize)
	if len(info) < lengthBytes+2 || info[lengthBytes+1] != rdmapVersion|opSend {
		t.Errorf("siw sent\n%swant a Send of rping's", hex.Dump(info))
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if said, err := p.said(); !strings.Contains(said, "DISCONNECT") {
		t.Errorf("rping ended with %v and said\n%s", err, said)
	}
}

// testResponder takes connections of rping. What rping is told of a connection that siw does
// not want depends on what comes first, the Reply or the end of the connection: so siw ends it.
func (b *bed) testResponder(t *testing.T) {
	l, err := b.host.Listen(limited(t), netip.AddrPortFrom(b.host.Addr(), 0))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	at := l.Addr().(*net.TCPAddr).AddrPort()
	request := start(requestKey, flagEnhanced, 2, depths(1, 1)...)
	for _, c := range []struct {
		name  string
		reply []byte
		says  string // rping
	}{
		{"rejects", start(replyKey, flagReject|flagEnhanced, 2, depths(0, 0)...), "RDMA_CM_EVENT_REJECTED, error -104"},
		{"wants markers", start(replyKey, flagMarkers|flagEnhanced, 2, depths(1, 1)...), "RDMA_CM_EVENT_REJECTED, error -111"},
		{
			"sends behind its Reply", append(start(replyKey, flagEnhanced, 2, depths(1, 1)...), fpdu(tagged(opWrite, 0, 0), false)...),
			"RDMA_CM_EVENT_CONNECT_ERROR, error -22",
		},
		{"takes it and goes", start(replyKey, flagEnhanced, 2, depths(1, 1)...), "DISCONNECT"},
		{"wants a CRC", start(replyKey, flagCRC|flagEnhanced, 2, depths(1, 1)...), "DISCONNECT"},
		{
			"has as much private data as siw takes", start(replyKey, flagEnhanced, 2, append(depths(1, 1), make([]byte, 252)...)...), "DISCONNECT",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := b.start(t, "rping", "-c", "-a", at.Addr().String(), "-p", strconv.Itoa(int(at.Port())), "-C", "1", "-S", "64")
			conn, err := l.AcceptTCP()
			if err != nil {
				t.Fatal(err)
			}
			s := newStream(t, conn)
			s.want(t, startSize, request)
			s.write(t, c.reply)
			if c.says == "DISCONNECT" {
				got := s.next(t, fpduSize)
				info := make([]byte, pingInfoBytes) // is rping's
				copy(info, got[min(len(got), lengthBytes+untaggedBytes):])
				if want := fpdu(untagged(opSend, sendQueue, info), c.reply[keyBytes]&flagCRC != 0); !slices.Equal(got, want) {
					t.Errorf("siw sent\n%swant a Send of rping's\n%s", hex.Dump(got), hex.Dump(want))
				}
			} else {
				s.wantEnd(t)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			// It ends with 0 also when the server is gone.
			if said, err := p.said(); !strings.Contains(said, c.says) {
				t.Errorf("rping ended with %v and said\n%swant %q", err, said, c.says)
			}
		})
	}
}
