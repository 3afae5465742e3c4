// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPacket_captures decodes every packet of a real rxe, encodes it again
// and compares all bytes, ICRC included.
func TestPacket_captures(t *testing.T) {
	ops := map[OpCode]int{}
	for _, c := range captures(t) {
		p, err := ParsePacket(c.udp)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		ops[p.BTH.OpCode]++
		hdr := p.AppendHeader(nil)
		pad := int(p.BTH.PadCount)
		got := append(append([]byte(nil), hdr...), p.Payload...)
		got = append(got, make([]byte, pad)...)
		ic := NewICRC(c.addrs)
		half := len(p.Payload) / 2
		got = binary.LittleEndian.AppendUint32(got, ic.Sum(c.ipID, hdr, [][]byte{p.Payload[:half], p.Payload[half:]}, pad))
		if d := cmp.Diff(c.udp, got); d != "" {
			t.Fatalf("%s: encoded again differs (-captured +encoded):\n%s", c.name, d)
		}
		if !ic.Check(c.udp, c.ipID) {
			t.Fatalf("%s: ICRC wrong with the ID of the IP header", c.name)
		}
		if !ic.Check(c.udp, c.ipID+1) {
			t.Fatalf("%s: ICRC not accepted with another ID hint", c.name)
		}
		if p.BTH.OpCode.HeaderLen() != len(hdr) {
			t.Fatalf("%s: HeaderLen %d, encoded %d", c.name, p.BTH.OpCode.HeaderLen(), len(hdr))
		}
	}
	for _, op := range []OpCode{SendOnly, WriteFirst, WriteMiddle, WriteLast, WriteOnly, Acknowledge} {
		if ops[op] == 0 {
			t.Errorf("captures have no %v", op)
		}
	}
}

// TestICRC_corruption flips every bit of a packet of each IP version. With an
// unknown IPv4 ID the check is one of 16 bits, which still finds any single
// bit but the congestion marks of BTH byte 4.
func TestICRC_corruption(t *testing.T) {
	done := map[bool]bool{}
	for _, c := range captures(t) {
		v6 := c.addrs.Src.Is6()
		if done[v6] {
			continue
		}
		done[v6] = true
		ic := NewICRC(c.addrs)
		for i := range c.udp {
			for bit := range 8 {
				b := bytes.Clone(c.udp)
				b[i] ^= 1 << bit
				for _, id := range []uint16{c.ipID, c.ipID + 77} {
					want := i == 4 // variant byte
					if got := ic.Check(b, id); got != want {
						t.Errorf("%s: byte %d bit %d flipped, hint %d: Check = %v", c.name, i, bit, id, got)
					}
				}
			}
		}
	}
	if len(done) != 2 {
		t.Errorf("captures have not both IP versions")
	}
}

func TestParsePacket_errors(t *testing.T) {
	mk := func(op OpCode, flags byte, n int) []byte {
		b := make([]byte, n)
		b[0], b[1] = byte(op), flags
		return b
	}
	tests := []struct {
		name string
		b    []byte
		want error
	}{
		{"empty", nil, ErrShort},
		{"no ICRC", mk(SendOnly, 0, 12), ErrShort},
		{"empty send", mk(SendOnly, 0, 16), nil},
		{"pad without payload", mk(SendOnly, 0x30, 16), ErrShort},
		{"pad reaches into the header", mk(WriteOnly, 0x10, 12+16+4), ErrShort},
		{"misfit", mk(SendOnly, 0, 17), ErrMisfit},
		{"version", mk(SendOnly, 1, 16), ErrTVer},
		{"unreliable connection", mk(0x24, 0, 16), ErrOpCode},
		{"hole in the table", mk(21, 0, 16), ErrOpCode},
		{"RETH cut", mk(WriteOnly, 0, 12+12+4), ErrShort},
		{"ACK with payload", mk(Acknowledge, 0, 12+4+4+4), ErrLength},
		{"ACK with pad", mk(Acknowledge, 0x10, 12+4+4+4), ErrLength},
		{"READ request with payload", mk(ReadRequest, 0, 12+16+4+4), ErrLength},
		{"largest", mk(WriteMiddle, 0, 12+4096+4), nil},
		{"payload too long", mk(WriteMiddle, 0, 12+4100+4), ErrLong},
		{"packet too long", mk(WriteMiddle, 0, MaxPacketLen+4), ErrLong},
		{"atomic", mk(CmpSwap, 0, 12+28+4), nil},
		{"send with invalidate", mk(SendOnlyInv, 0, 12+4+8+4), nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := ParsePacket(tt.b); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

func FuzzParsePacket(f *testing.F) {
	for i, c := range captures(f) {
		if i%10 == 0 {
			f.Add(c.udp)
		}
	}
	for op := range numOpCodes {
		b := make([]byte, OpCode(op).HeaderLen()+ICRCLen+8)
		b[0] = byte(op)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePacket(b)
		if err != nil {
			return
		}
		got := p.AppendHeader(nil)
		if len(got)+len(p.Payload)+int(p.BTH.PadCount)+ICRCLen != len(b) {
			t.Fatalf("lengths do not add up: header %d, payload %d, pad %d, packet %d",
				len(got), len(p.Payload), p.BTH.PadCount, len(b))
		}
		want := bytes.Clone(b[:len(got)])
		want[4] &= 0xc0 // reserved bits are not kept
		want[8] &= 0x80
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("header differs (-input +encoded):\n%s", d)
		}
	})
}

func TestSyndrome(t *testing.T) {
	tests := []struct {
		name string
		s    Syndrome
		want string
	}{
		{"ACK", SyndromeACK(creditsInvalid), "ACK credit 31"},
		{"RNR 655 ms", SyndromeRNR(0), "RNR NAK, 655.36ms"},
		{"RNR 10 us", SyndromeRNR(1), "RNR NAK, 10µs"},
		{"RNR 491 ms", SyndromeRNR(31), "RNR NAK, 491.52ms"},
		{"RNR 0.64 ms", SyndromeRNR(12), "RNR NAK, 640µs"},
		{"sequence", SyndromeNAK(NAKSequence), "NAK PSN sequence error"},
		{"access", SyndromeNAK(NAKRemoteAccess), "NAK remote access error"},
		{"reserved", 0x40, "Syndrome(0x40)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.s.String(); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
