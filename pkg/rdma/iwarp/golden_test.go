// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// golden are frames of FPDUs with CRC that another implementation, tshark 4.0.17, decoded
// field by field and called right.
var golden = []struct {
	name    string
	hex     string
	header  Header
	payload string
}{
	{
		"empty WRITE", "000ec140 00000001 00000000 00000000 ebd34c5f",
		Header{Tagged: true, Last: true, Op: OpWrite, STag: 1},
		"",
	},
	{
		"WRITE", "0014c140 11223344 00000000 00001000 61626364 65660000 7991e54f",
		Header{Tagged: true, Last: true, Op: OpWrite, STag: 0x11223344, TO: 0x1000},
		"abcdef",
	},
	{
		"SEND", "00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000 b990b10c",
		Header{Last: true, Op: OpSend, MSN: 1},
		"hello",
	},
	{
		"SEND with SE and invalidate", "00134146 0a0b0c0d 00000000 00000002 00000000 78000000 e3fc66ff",
		Header{Last: true, Op: OpSendSEInv, STag: 0x0a0b0c0d, MSN: 2},
		"x",
	},
	{
		"SEND, first segment", "001e0143 00000000 00000000 00000003 00000000 30313233 34353637 38394142 131f4984",
		Header{Op: OpSend, MSN: 3},
		"0123456789AB",
	},
	{
		"SEND, last segment", "00144143 00000000 00000000 00000003 0000000c 43440000 aa58c9fb",
		Header{Last: true, Op: OpSend, MSN: 3, MO: 12},
		"CD",
	},
	{
		"READ request", "002e4141 00000000 00000001 00000001 00000000 55667788 00000000 00002000 00000004 11223344 00000000 00001000 871f535c",
		Header{Last: true, Op: OpReadRequest, QN: 1, MSN: 1},
		"\x55\x66\x77\x88\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00\x00\x04\x11\x22\x33\x44\x00\x00\x00\x00\x00\x00\x10\x00",
	},
	{
		"READ response", "0012c142 55667788 00000000 00002000 61626364 dba0cfa8",
		Header{Tagged: true, Last: true, Op: OpReadResponse, STag: 0x55667788, TO: 0x2000},
		"abcd",
	},
	{
		"Terminate of DDP", "002a4147 00000000 00000002 00000001 00000000 1202c000 00174143 00000000 00000000 00000001 00000000 9b27256c",
		Header{Last: true, Op: OpTerminate, QN: 2, MSN: 1},
		"\x12\x02\xc0\x00\x00\x17\x41\x43\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00",
	},
	{
		"Terminate of MPA", "00164147 00000000 00000002 00000001 00000000 20020000 7fe42585",
		Header{Last: true, Op: OpTerminate, QN: 2, MSN: 1},
		"\x20\x02\x00\x00",
	},
}

func TestFPDU_golden(t *testing.T) {
	for _, g := range golden {
		t.Run(g.name, func(t *testing.T) {
			want := unhex(t, g.hex)
			f := Framing{CRC: true}
			if got := f.Append(nil, g.header.Append(nil), []byte(g.payload)); !bytes.Equal(got, want) {
				t.Errorf("encoded %x, want %x", got, want)
			}
			ulpdu, n, err := f.Next(want)
			if err != nil || n != len(want) {
				t.Fatalf("Next = %d, %v", n, err)
			}
			var h Header
			if err := h.Parse(ulpdu); err != nil || h != g.header {
				t.Errorf("header %+v, %v, want %+v", h, err, g.header)
			}
			if got := ulpdu[h.Len():]; string(got) != g.payload {
				t.Errorf("payload %q, want %q", got, g.payload)
			}
		})
	}
}

// capturedStream is one TCP connection: what each side sent.
type capturedStream struct {
	name      string
	segments  []capturedSegment
	initiator []byte
	responder []byte
}

type capturedSegment struct {
	initiator bool
	bytes     []byte
}

// capturedStreams reads testdata/siw. It fails when there is nothing.
func capturedStreams(tb testing.TB) []capturedStream {
	tb.Helper()
	files, err := filepath.Glob("testdata/siw/*.txt")
	if err != nil || len(files) == 0 {
		tb.Fatalf("no captured stream in testdata/siw: %v", err)
	}
	var all []capturedStream
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			tb.Fatal(err)
		}
		s := capturedStream{name: strings.TrimSuffix(filepath.Base(name), ".txt")}
		text := strings.ReplaceAll(string(b), "\n  ", "")
		for line := range strings.Lines(text) {
			who, data, ok := strings.Cut(line, " ")
			if !ok || who == "#" {
				continue
			}
			seg := capturedSegment{who == ">", unhex(tb, data)}
			s.segments = append(s.segments, seg)
			if seg.initiator {
				s.initiator = append(s.initiator, seg.bytes...)
			} else {
				s.responder = append(s.responder, seg.bytes...)
			}
		}
		if len(s.segments) < 2 {
			tb.Fatalf("%s has %d segments", name, len(s.segments))
		}
		all = append(all, s)
	}
	return all
}

// TestStream_captures decodes what siw and its peer said, encodes it again and compares
// all bytes.
func TestStream_captures(t *testing.T) {
	ops := map[Opcode]int{}
	for _, s := range capturedStreams(t) {
		t.Run(s.name, func(t *testing.T) {
			var frames [2]Frame
			crc := false
			streams := [2][]byte{s.initiator, s.responder}
			for i, b := range streams {
				n, err := FrameLen(b, i == 1)
				if err != nil {
					t.Fatal(err)
				}
				if frames[i], err = ParseFrame(b[:n]); err != nil {
					t.Fatal(err)
				}
				if got := frames[i].Append(nil); !bytes.Equal(got, b[:n]) {
					t.Errorf("encoded %x, captured %x", got, b[:n])
				}
				crc = crc || frames[i].CRC
				streams[i] = b[n:]
			}
			for _, b := range streams {
				f := Framing{CRC: crc}
				for len(b) > 0 {
					ulpdu, n, err := f.Next(b)
					if err != nil {
						t.Fatalf("%v: %x", err, b)
					}
					var h Header
					if err := h.Parse(ulpdu); err != nil {
						t.Fatalf("%v: %x", err, ulpdu)
					}
					ops[h.Op]++
					payload := ulpdu[h.Len():]
					if h.Op == OpReadRequest {
						r, err := ParseReadRequest(payload)
						if err != nil {
							t.Fatal(err)
						}
						payload = r.Append(nil)
					}
					if got := f.Append(nil, h.Append(nil), payload); !bytes.Equal(got, b[:n]) {
						t.Errorf("encoded %x, captured %x", got, b[:n])
					}
					b = b[n:]
				}
			}
		})
	}
	for _, op := range []Opcode{OpWrite, OpReadRequest, OpReadResponse, OpSend, OpSendSE} {
		if ops[op] == 0 {
			t.Errorf("captures have no %v", op)
		}
	}
}

// TestQP_likeCaptures plays the captured initiator's part against what siw said: a queue
// pair does what its program does, and everything that it sends is the same, byte for
// byte.
func TestQP_likeCaptures(t *testing.T) {
	played := 0
	for _, s := range capturedStreams(t) {
		ask, err := ParseFrame(s.segments[0].bytes)
		if err != nil {
			t.Fatal(err)
		}
		if ask.Enhanced.RTRRead {
			continue // its sink is drawn, and siw answered another one
		}
		played++
		t.Run(s.name, func(t *testing.T) {
			a := newSide(t, "a", nil)
			now := time.Unix(1000, 0)
			// What the captured program told siw to read and to write.
			shown, target := a.mem.add(4096, rdma.RemoteRead), a.mem.add(4096, allAccess)
			shown.rkey, shown.addr = 0x01234501, 0x10000
			target.rkey, target.addr = 0x06789a02, 0x7fff00000003
			for i := range 20 {
				a.recv(rdma.RecvWR{ID: uint64(i), SGE: a.mr.sge(i*64, 64)})
			}
			st := Startup{
				Rev: ask.Rev, NoCRC: !ask.CRC, PeerToPeer: ask.Enhanced.PeerToPeer, PrivateData: ask.PrivateData,
				IRD: int(ask.Enhanced.IRD), ORD: int(ask.Enhanced.ORD), MaxULPDU: 1414,
			}
			if err := a.q.Start(now, st); err != nil {
				t.Fatal(err)
			}
			a.transmit(now, 1<<20)
			a.sent = a.sent[:0] // offers an empty READ, too
			f := Framing{CRC: ask.CRC}
			for _, seg := range s.turns()[1:] {
				if !seg.initiator {
					if err := a.feed(now, seg.bytes); err != nil {
						t.Fatalf("siw's %x: %v", seg.bytes, err)
					}
					continue
				}
				for b := seg.bytes; len(b) > 0; {
					u, n, err := f.Next(b)
					if err != nil {
						t.Fatal(err)
					}
					b = b[n:]
					a.act(now, u, shown)
				}
				for a.transmit(now, 100) > 0 {
				}
				if !bytes.Equal(a.sent, seg.bytes) {
					t.Fatalf("sent %x, captured %x", a.sent, seg.bytes)
				}
				a.sent = a.sent[:0]
			}
			a.mem.intact(t)
		})
	}
	if played < 5 {
		t.Errorf("only %d streams were played", played)
	}
}

// turns are the segments with those in the same direction together.
func (s *capturedStream) turns() []capturedSegment {
	var all []capturedSegment
	for _, seg := range s.segments {
		if n := len(all); n > 0 && all[n-1].initiator == seg.initiator {
			all[n-1].bytes = append(bytes.Clone(all[n-1].bytes), seg.bytes...)
			continue
		}
		all = append(all, seg)
	}
	return all
}

// act does what the program did that sent a segment.
func (s *side) act(now time.Time, ulpdu []byte, shown *region) {
	s.tb.Helper()
	var h Header
	if err := h.Parse(ulpdu); err != nil {
		s.tb.Fatal(err)
	}
	payload := ulpdu[h.Len():]
	switch h.Op {
	case OpSend:
		s.send(now, rdma.SendWR{Flags: rdma.SendInline, Inline: payload})
	case OpSendSE:
		s.send(now, rdma.SendWR{Flags: rdma.SendInline | rdma.SendSolicited, Inline: payload})
	case OpReadResponse: // of the request that waits: siw's sink is somewhere else
		at := h.TO - s.q.tx.reads.toServe().SinkTO
		copy(shown.buf[at:], payload)
	default: // the RTR
	}
}
