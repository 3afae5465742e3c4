// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
		Header{Tagged: true, Last: true, Op: OpWrite, STag: 1}, "",
	},
	{
		"WRITE", "0014c140 11223344 00000000 00001000 61626364 65660000 7991e54f",
		Header{Tagged: true, Last: true, Op: OpWrite, STag: 0x11223344, TO: 0x1000}, "abcdef",
	},
	{
		"SEND", "00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000 b990b10c",
		Header{Last: true, Op: OpSend, MSN: 1}, "hello",
	},
	{
		"SEND with SE and invalidate", "00134146 0a0b0c0d 00000000 00000002 00000000 78000000 e3fc66ff",
		Header{Last: true, Op: OpSendSEInv, STag: 0x0a0b0c0d, MSN: 2}, "x",
	},
	{
		"SEND, first segment", "001e0143 00000000 00000000 00000003 00000000 30313233 34353637 38394142 131f4984",
		Header{Op: OpSend, MSN: 3}, "0123456789AB",
	},
	{
		"SEND, last segment", "00144143 00000000 00000000 00000003 0000000c 43440000 aa58c9fb",
		Header{Last: true, Op: OpSend, MSN: 3, MO: 12}, "CD",
	},
	{
		"READ request", "002e4141 00000000 00000001 00000001 00000000 55667788 00000000 00002000 00000004 11223344 00000000 00001000 871f535c",
		Header{Last: true, Op: OpReadRequest, QN: 1, MSN: 1},
		"\x55\x66\x77\x88\x00\x00\x00\x00\x00\x00\x20\x00\x00\x00\x00\x04\x11\x22\x33\x44\x00\x00\x00\x00\x00\x00\x10\x00",
	},
	{
		"READ response", "0012c142 55667788 00000000 00002000 61626364 dba0cfa8",
		Header{Tagged: true, Last: true, Op: OpReadResponse, STag: 0x55667788, TO: 0x2000}, "abcd",
	},
	{
		"Terminate of DDP", "002a4147 00000000 00000002 00000001 00000000 1202c000 00174143 00000000 00000000 00000001 00000000 9b27256c",
		Header{Last: true, Op: OpTerminate, QN: 2, MSN: 1},
		"\x12\x02\xc0\x00\x00\x17\x41\x43\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00",
	},
	{
		"Terminate of MPA", "00164147 00000000 00000002 00000001 00000000 20020000 7fe42585",
		Header{Last: true, Op: OpTerminate, QN: 2, MSN: 1}, "\x20\x02\x00\x00",
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
