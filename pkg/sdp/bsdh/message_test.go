// SPDX-License-Identifier: Apache-2.0

package bsdh

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// golden are whole messages, written down by hand from figures 2 and 5 to 15, word by word, in both layouts. All
// but Hello, HelloAck and SendSm have Bufs 30 and MSeqAck 9.
var golden = []struct {
	name          string
	figures, ibta string
	m             Message
}{
	{
		name:    "Hello",
		figures: "00200000 00000020 00000000 00000000 00100011 00008000 00010000 00080004",
		ibta:    "00000020 00000020 00000000 00000000 11000010 00008000 00010000 00040008",
		m: Message{MID: Hello, Bufs: 32, Setup: Setup{
			MaxAdverts: 16, Major: 1, Minor: 1, WantRecvBytes: 32768, RecvBytes: 65536, IRD: 8, ORD: 4,
		}},
	}, {
		name:    "HelloAck of version 1.2",
		figures: "00300001 0000001c 00000000 00000000 00110021 00004000 00040008",
		ibta:    "01000030 0000001c 00000000 00000000 12000011 00004000 00080004",
		m: Message{MID: HelloAck, Bufs: 48, Setup: Setup{
			MaxAdverts: 17, Major: 1, Minor: 2, RecvBytes: 16384, IRD: 4, ORD: 8,
		}},
	}, {
		name:    "Data",
		figures: "001e00ff 00000015 00000005 00000009 68656c6c6f",
		ibta:    "ff00001e 00000015 00000005 00000009 68656c6c6f",
		m:       Message{MID: Data, Bufs: 30, Seq: 5, Ack: 9, Payload: []byte("hello")},
	}, {
		name:    "Data with an out-of-band byte",
		figures: "001e03ff 00000013 00000006 00000009 616263",
		ibta:    "ff03001e 00000013 00000006 00000009 616263",
		m:       Message{MID: Data, Flags: OOBPresent | OOBPending, Bufs: 30, Seq: 6, Ack: 9, Payload: []byte("abc")},
	}, {
		name:    "SrcAvail",
		figures: "001e00fe 00000024 00000007 00000009 00010001 01020304 00007f11 22334455 44415441",
		ibta:    "fe00001e 00000024 00000007 00000009 00010001 01020304 00007f11 22334455 44415441",
		m: Message{
			MID: SrcAvail, Bufs: 30, Seq: 7, Ack: 9, Payload: []byte("DATA"),
			Advert: Advert{Len: 65537, Key: 0x01020304, Addr: 0x7f1122334455},
		},
	}, {
		name:    "SinkAvail",
		figures: "001e00fd 00000024 00000008 00000009 00020000 a0b0c0d0 00007f11 22334457 00000002",
		ibta:    "fd00001e 00000024 00000008 00000009 00020000 a0b0c0d0 00007f11 22334457 00000002",
		m: Message{
			MID: SinkAvail, Bufs: 30, Seq: 8, Ack: 9,
			Advert: Advert{Len: 131072, Key: 0xa0b0c0d0, Addr: 0x7f1122334457, NonDiscards: 2},
		},
	}, {
		name:    "RdmaWrCompl that asks for Pipelined mode",
		figures: "001e0405 00000014 00000009 00000009 000186a0",
		ibta:    "0504001e 00000014 00000009 00000009 000186a0",
		m:       Message{MID: RdmaWrCompl, Flags: RequestPipelined, Bufs: 30, Seq: 9, Ack: 9, Bytes: 100_000},
	}, {
		name:    "RdmaRdCompl",
		figures: "001e0006 00000014 0000000a 00000009 0000fffd",
		ibta:    "0600001e 00000014 0000000a 00000009 0000fffd",
		m:       Message{MID: RdmaRdCompl, Bufs: 30, Seq: 10, Ack: 9, Bytes: 65533},
	}, {
		name:    "ModeChange of a sender to Combined",
		figures: "001e0007 00000014 0000000b 00000009 00000003",
		ibta:    "0700001e 00000014 0000000b 00000009 90000000",
		m:       Message{MID: ModeChange, Bufs: 30, Seq: 11, Ack: 9, Change: ModeWord{Combined, true}},
	}, {
		name:    "ModeChange of a receiver to Pipelined",
		figures: "001e0007 00000014 0000000b 00000009 00000004",
		ibta:    "0700001e 00000014 0000000b 00000009 20000000",
		m:       Message{MID: ModeChange, Bufs: 30, Seq: 11, Ack: 9, Change: ModeWord{Pipelined, false}},
	}, {
		name:    "ChRcvBuf",
		figures: "001e000b 00000014 0000000c 00000009 00010000",
		ibta:    "0b00001e 00000014 0000000c 00000009 00010000",
		m:       Message{MID: ChRcvBuf, Bufs: 30, Seq: 12, Ack: 9, Bytes: 65536},
	}, {
		name:    "SuspComm",
		figures: "001e000d 00000018 0000000d 00000009 00000000 1f900001",
		ibta:    "0d00001e 00000018 0000000d 00000009 00000000 00011f90",
		m:       Message{MID: SuspComm, Bufs: 30, Seq: 13, Ack: 9, Port: 8080},
	}, {
		name:    "SendSm that acknowledges the last number",
		figures: "001e0004 00000010 0000000e ffffffff",
		ibta:    "0400001e 00000010 0000000e ffffffff",
		m:       Message{MID: SendSm, Bufs: 30, Seq: 14, Ack: 0xffffffff},
	},
}

func TestSection6_Golden(t *testing.T) {
	for _, g := range golden {
		for l, text := range map[Layout]string{LayoutFigures: g.figures, LayoutIBTA: g.ibta} {
			raw := unhex(t, text)
			if got := g.m.Append(nil, l); !bytes.Equal(got, raw) {
				t.Errorf("%s, %v: encoded %x, want %x", g.name, l, got, raw)
			}
			m, err := Parse(raw, l)
			if err != nil {
				t.Errorf("%s, %v: %v", g.name, l, err)
				continue
			}
			if diff := cmp.Diff(g.m, m, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s, %v: decoded (-want +got):\n%s", g.name, l, diff)
			}
		}
	}
}

// kinds is figure 3: what there is, how long its extended header is, whether payload may follow, and what §14.2
// says of its class.
var kinds = map[MID]struct {
	extended  int
	payload   bool
	solicited bool
}{
	0x00: {16, false, false}, 0x01: {12, false, true}, 0x02: {0, false, false}, 0x03: {0, false, true}, 0x04: {0, false, true},
	0x05: {4, false, true}, 0x06: {4, false, true}, 0x07: {4, false, false}, 0x08: {0, false, true}, 0x09: {0, false, true},
	0x0a: {0, false, true}, 0x0b: {4, false, false}, 0x0c: {4, false, false}, 0x0d: {8, false, true}, 0x0e: {0, false, true},
	0xfd: {20, true, false}, 0xfe: {16, true, false}, 0xff: {0, true, false},
}

// valid is a message of a kind with nothing in it that could be refused.
func valid(mid MID, payload int) Message {
	m := Message{MID: mid, Payload: make([]byte, payload)}
	if mid == SrcAvail || mid == SinkAvail {
		m.Advert.Len = 1000
	}
	return m
}

// Every identifier with every length around that of its headers: what figure 3 does not have is refused.
func TestSection6_1_1_Kinds(t *testing.T) {
	for b := range 256 {
		mid := MID(b)
		k, known := kinds[mid]
		if known && mid.HeadersLen() != HeaderLen+k.extended {
			t.Errorf("%v: headers of %d bytes, want %d", mid, mid.HeadersLen(), HeaderLen+k.extended)
		}
		for n := range 60 {
			raw := make([]byte, n)
			if n >= HeaderLen {
				raw[3] = byte(b)
				binary.BigEndian.PutUint32(raw[4:], uint32(n))
			}
			if known && n >= HeaderLen+k.extended {
				m := valid(mid, 0)
				m.AppendHeaders(raw[:0], LayoutFigures, 0)
				binary.BigEndian.PutUint32(raw[4:], uint32(n))
			}
			want := known && (n == HeaderLen+k.extended || k.payload && n > HeaderLen+k.extended)
			m, err := Parse(raw, LayoutFigures)
			if (err == nil) != want || err != nil && !errors.Is(err, ErrMalformed) {
				t.Errorf("%v of %d bytes: %v, want accepted: %t", mid, n, err, want)
			}
			if want && len(m.Payload) != n-HeaderLen-k.extended {
				t.Errorf("%v of %d bytes: payload of %d", mid, n, len(m.Payload))
			}
			if want && m.Solicited() != k.solicited {
				t.Errorf("%v: solicited %t, want %t", mid, m.Solicited(), k.solicited)
			}
		}
	}
}

func TestSection6_1_4_Length(t *testing.T) {
	m := valid(Data, 10)
	raw := m.Append(nil, LayoutFigures)
	if n := binary.BigEndian.Uint32(raw[4:]); n != 26 {
		t.Errorf("Len %d of 16 bytes of header and 10 of payload", n)
	}
	for _, n := range []uint32{0, 16, 25, 27, 1<<32 - 1} {
		binary.BigEndian.PutUint32(raw[4:], n)
		if _, err := Parse(raw, LayoutFigures); !errors.Is(err, ErrMalformed) {
			t.Errorf("Len %d in a message of 26 bytes: %v", n, err)
		}
	}
}

// Reserved bits are sent as zeros, and nobody looks at them.
func TestSection6_1_2_ReservedBits(t *testing.T) {
	for _, g := range golden {
		raw := unhex(t, g.figures)
		reserved := bytes.Clone(raw)
		reserved[2] |= 0xf8
		switch g.m.MID {
		case Hello, HelloAck:
			reserved[18] = 0xff
		case ModeChange:
			copy(reserved[16:], []byte{0xff, 0xff, 0xff})
			reserved[19] |= 0xf0
		}
		m, err := Parse(reserved, LayoutFigures)
		if err != nil {
			t.Errorf("%s with reserved bits: %v", g.name, err)
			continue
		}
		if got := m.Append(nil, LayoutFigures); !bytes.Equal(got, raw) {
			t.Errorf("%s: encoded again %x, want %x", g.name, got, raw)
		}
	}
}

func TestSection14_2_SolicitedData(t *testing.T) {
	for f := range Flags(8) {
		m := Message{MID: Data, Flags: f}
		if want := f&3 != 0; m.Solicited() != want {
			t.Errorf("Data with %v: solicited %t", f, m.Solicited())
		}
	}
}

func TestParse_refuses(t *testing.T) {
	advert := func(mid MID, n uint32, addr uint64, payload int) Message {
		return Message{MID: mid, Advert: Advert{Len: n, Addr: addr}, Payload: make([]byte, payload)}
	}
	susp := valid(SuspComm, 0)
	good := susp.Append(nil, LayoutFigures)
	change := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	mode := valid(ModeChange, 0)
	reservedMode := mode.Append(nil, LayoutFigures)
	reservedMode[19] = 3 << 1
	cases := map[string][]byte{
		"SuspComm with Constant1":   change(16, 1),
		"SuspComm with Constant2 0": change(23, 0),
		"SuspComm with Constant2 2": change(23, 2),
		"mode 3":                    reservedMode,
	}
	for name, m := range map[string]Message{
		"out-of-band byte in SrcAvail":  {MID: SrcAvail, Flags: OOBPresent, Advert: Advert{Len: 9}, Payload: []byte{1}},
		"out-of-band byte in SendSm":    {MID: SendSm, Flags: OOBPresent},
		"out-of-band byte in no bytes":  {MID: Data, Flags: OOBPresent},
		"SrcAvail of nothing":           advert(SrcAvail, 0, 0, 0),
		"SrcAvail of 2^31+1":            advert(SrcAvail, MaxBytes+1, 0, 0),
		"SinkAvail of nothing":          advert(SinkAvail, 0, 0, 0),
		"SinkAvail of 2^31+1":           advert(SinkAvail, MaxBytes+1, 0, 0),
		"SrcAvail shorter than payload": advert(SrcAvail, 3, 0, 4),
		"SrcAvail past the end":         advert(SrcAvail, 3, 1<<64-2, 0),
		"SinkAvail past the end":        advert(SinkAvail, MaxBytes, 1<<64-MaxBytes+1, 0),
	} {
		cases[name] = m.Append(nil, LayoutFigures)
	}
	for name, b := range cases {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse(b, LayoutFigures); !errors.Is(err, ErrMalformed) {
				t.Error(err)
			}
		})
	}
	for name, m := range map[string]Message{
		"SrcAvail of 2^31":              advert(SrcAvail, MaxBytes, 0, 0),
		"SrcAvail to the last byte":     advert(SrcAvail, 3, 1<<64-3, 3),
		"SinkAvail with longer payload": advert(SinkAvail, 3, 0, 10),
		"OOB_PEND in SendSm":            {MID: SendSm, Flags: OOBPending},
		"REQ_PIPE in DisConn":           {MID: DisConn, Flags: RequestPipelined},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse(m.Append(nil, LayoutFigures), LayoutFigures); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSection8_1_1_CheckSetup(t *testing.T) {
	good := Message{MID: Hello, Bufs: MinBufs, Setup: Setup{MaxAdverts: 1, Major: 1, Minor: 1, RecvBytes: MinBuffer, IRD: 1, ORD: 1}}
	for minor := range uint8(16) {
		m := good
		m.Setup.Minor = minor
		if err := m.CheckSetup(); err != nil {
			t.Errorf("minor version %d: %v", minor, err)
		}
	}
	for name, change := range map[string]func(m *Message){
		"version 0":     func(m *Message) { m.Setup.Major = 0 },
		"version 2":     func(m *Message) { m.Setup.Major = 2 },
		"no adverts":    func(m *Message) { m.Setup.MaxAdverts = 0 },
		"no IRD":        func(m *Message) { m.Setup.IRD = 0 },
		"no ORD":        func(m *Message) { m.Setup.ORD = 0 },
		"small buffers": func(m *Message) { m.Setup.RecvBytes = MinBuffer - 1 },
		"huge buffers":  func(m *Message) { m.Setup.RecvBytes = MaxBytes + 1 },
		"two buffers":   func(m *Message) { m.Bufs = MinBufs - 1 },
		"no buffers":    func(m *Message) { m.Bufs = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			for _, mid := range []MID{Hello, HelloAck} {
				m := good
				m.MID = mid
				change(&m)
				if err := m.CheckSetup(); !errors.Is(err, ErrSetup) {
					t.Errorf("%v: %v", mid, err)
				}
			}
		})
	}
}

func TestStrings(t *testing.T) {
	for v, want := range map[fmt.Stringer]string{
		SrcAvail: "SrcAvail", Data: "Data", MID(0x0f): "MID(0x0f)", LayoutIBTA: "IBTA", Layout(9): "Layout(9)",
		Pipelined: "Pipelined", Mode(7): "Mode(7)", OOBPending | RequestPipelined: "OOB_PEND|REQ_PIPE", Flags(0): "",
	} {
		if got := v.String(); got != want {
			t.Errorf("%#v: %q, want %q", v, got, want)
		}
	}
}

func TestAllocations(t *testing.T) {
	m := golden[4].m
	buf := make([]byte, 0, 100)
	var parsed Message
	var err error
	if n := testing.AllocsPerRun(100, func() {
		b := m.Append(buf, LayoutFigures)
		parsed, err = Parse(b, LayoutFigures)
	}); n != 0 || err != nil || parsed.MID != SrcAvail {
		t.Errorf("%v allocations, %v, %v", n, err, parsed.MID)
	}
}

// FuzzParse: what is accepted is encoded again as it was, but for reserved bits; nothing panics.
func FuzzParse(f *testing.F) {
	for _, g := range golden {
		f.Add(unhex(f, g.figures), false)
		f.Add(unhex(f, g.ibta), true)
	}
	f.Fuzz(func(t *testing.T, b []byte, ibta bool) {
		l := LayoutFigures
		if ibta {
			l = LayoutIBTA
		}
		m, err := Parse(b, l)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatalf("error of another kind: %v", err)
			}
			return
		}
		if m.MID == Hello || m.MID == HelloAck {
			_ = m.CheckSetup()
		}
		again := m.Append(nil, l)
		m2, err := Parse(again, l)
		if err != nil {
			t.Fatalf("%x: encoded again %x: %v", b, again, err)
		}
		if diff := cmp.Diff(m, m2); diff != "" || len(again) != len(b) {
			t.Fatalf("%x: encoded again %x:\n%s", b, again, diff)
		}
		other := LayoutFigures + LayoutIBTA - l
		m3, err := Parse(m.Append(nil, other), other)
		if diff := cmp.Diff(m, m3); diff != "" || err != nil {
			t.Fatalf("%x in layout %v: %v\n%s", b, other, err, diff)
		}
	})
}
