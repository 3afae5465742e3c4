// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func unhex(tb testing.TB, s string) []byte {
	tb.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func disc(tb testing.TB, s string) Discriminator {
	tb.Helper()
	d, err := NewDiscriminator(s)
	if err != nil {
		tb.Fatal(err)
	}
	return d
}

// golden are whole segments, written down by hand from the figures of §3.1, §3.2 and §3.2.1
// and the table of code points.
var golden = []struct {
	name string
	hex  string
	hdr  Header
	rdma *RDMA
}{
	{
		name: "Send with immediate data",
		hex:  "010b001d 00000000 deadbeef 00000065 00000000 00100000 68656c6c 6f",
		hdr: Header{
			Type: TypeSend, Flags: FlagImmediate | FlagEnd, Length: 29, Immediate: 0xdeadbeef, Message: 101, Posted: 16,
		},
	}, {
		name: "RDMA Write",
		hex:  "0122002e 00000000 00000000 00000066 00000000 00100000 00000000 00001000 11223344 00000006 61626364 6566",
		hdr:  Header{Type: TypeWrite, Flags: FlagEnd, Length: 46, Message: 102, Posted: 16},
		rdma: &RDMA{Addr: 0x1000, Handle: 0x11223344, Length: 6},
	}, {
		name: "NOP that acknowledges 101",
		hex:  "012a0018 00000000 00000000 00000064 00000065 00120000",
		hdr:  Header{Type: TypeNOP, Flags: FlagEnd, Length: 24, Message: 100, Ack: 101, Posted: 18},
	}, {
		name: "NOP that reports an error of 102",
		hex:  "012a0018 00000000 00000000 00000064 00000066 00120104",
		hdr: Header{
			Type: TypeNOP, Flags: FlagEnd, Length: 24, Message: 100, Ack: 102, Posted: 18, Error: ErrorMemory, Cause: CauseBounds,
		},
	}, {
		name: "RDMA Read Request",
		hex:  "01120028 00000000 00000000 00000067 00000000 00100000 01020304 05060708 11223344 00010000",
		hdr:  Header{Type: TypeReadRequest, Flags: FlagEnd, Length: 40, Message: 103, Posted: 16},
		rdma: &RDMA{Addr: 0x0102030405060708, Handle: 0x11223344, Length: 65536},
	}, {
		name: "RDMA Read Response, not the last",
		hex:  "0118002a 0000fff0 00000000 00000067 00000009 00110000 01020304 05060708 11223344 00010000 aabb",
		hdr:  Header{Type: TypeReadResponse, Length: 42, Offset: 0xfff0, Message: 103, Ack: 9, Posted: 17},
		rdma: &RDMA{Addr: 0x0102030405060708, Handle: 0x11223344, Length: 65536},
	}, {
		name: "Send that is given up",
		hex:  "010e0018 00010000 00000000 00000068 00000000 00100000",
		hdr:  Header{Type: TypeSend, Flags: FlagEnd | FlagTransmitError, Length: 24, Offset: 65536, Message: 104, Posted: 16},
	},
}

// goldenConnect are whole messages of connection establishment.
func goldenConnect(tb testing.TB) []struct {
	name string
	hex  string
	msg  connectMessage
} {
	all := Attr{Reliable: true, RDMAWrite: true, RDMARead: true, FlowControl: true, MaxTransfer: 65536, ReadWindow: 8}
	ce := CE{Attr: all, Calling: disc(tb, "web0"), Called: disc(tb, "db1")}
	accept := ce
	accept.Attr = Attr{Reliable: true, Peer: true, MaxTransfer: 4096}
	accept.Security = []byte{1, 2, 3}
	return []struct {
		name string
		hex  string
		msg  connectMessage
	}{
		{
			name: "Connect Request",
			hex: "01320044 00000000 00000000 00000064 00000000 00100000 000f0004 00010000 77656230 00000000 00000000 00000000" +
				"00080003 64623100 00000000 00000000 00000000",
			msg: connectMessage{typ: TypeConnectRequest, first: 100, posted: 16, ce: ce},
		}, {
			name: "Connect Accept with security information",
			hex: "013a0047 00000000 00000000 ffffffff 00000000 00010000 00110004 00001000 77656230 00000000 00000000 00000000" +
				"00000003 64623100 00000000 00000000 00000000 010203",
			msg: connectMessage{typ: TypeConnectAccept, first: 0xffffffff, posted: 1, ce: accept},
		}, {
			name: "Connect Reject",
			hex: "01420044 00000000 00000000 00000000 00000000 00000000 000f0004 00010000 77656230 00000000 00000000 00000000" +
				"00080003 64623100 00000000 00000000 00000000",
			msg: connectMessage{typ: TypeConnectReject, ce: ce},
		}, {
			name: "Connect No Match",
			hex: "014a0044 00000000 00000000 00000000 00000000 00000000 000f0004 00010000 77656230 00000000 00000000 00000000" +
				"00080003 64623100 00000000 00000000 00000000",
			msg: connectMessage{typ: TypeConnectNoMatch, ce: ce},
		},
	}
}

func TestSection3_1_HeaderFields(t *testing.T) {
	for _, g := range golden {
		raw := unhex(t, g.hex)
		h, err := ParseHeader(raw[:HeaderLen])
		if err != nil {
			t.Errorf("%s: %v", g.name, err)
			continue
		}
		if diff := cmp.Diff(g.hdr, h); diff != "" {
			t.Errorf("%s: decoded (-want +got):\n%s", g.name, diff)
		}
		if int(h.Length) != len(raw) {
			t.Errorf("%s: length %d of a segment of %d bytes", g.name, h.Length, len(raw))
		}
		out := g.hdr.Append(nil)
		if g.rdma != nil {
			r, err := ParseRDMA(raw[HeaderLen : HeaderLen+RDMALen])
			if err != nil || r != *g.rdma {
				t.Errorf("%s: RDMA header %+v, %v, want %+v", g.name, r, err, *g.rdma)
			}
			out = g.rdma.Append(out)
		}
		if h.PayloadOffset() != len(out) {
			t.Errorf("%s: payload at %d, want %d", g.name, h.PayloadOffset(), len(out))
		}
		if !bytes.HasPrefix(raw, out) {
			t.Errorf("%s: encoded %x, want the start of %x", g.name, out, raw)
		}
	}
}

// Every type with every set of flags: what does not begin a valid segment is refused.
func TestSection3_1_TypesAndFlags(t *testing.T) {
	for b := range 256 {
		typ, flags := Type(b>>3), Flags(b&7)
		for _, extra := range []int{0, 1, RDMALen, RDMALen + 1, CELen, CELen + MaxSecurity, CELen + MaxSecurity + 1} {
			h := Header{Type: typ, Flags: flags, Length: uint16(HeaderLen + extra)}
			raw := h.Append(nil)
			if raw[1] != byte(b) {
				t.Fatalf("type %v, flags %#x: byte %#x, want %#x", typ, flags, raw[1], b)
			}
			end := flags&FlagEnd != 0
			want := false
			switch typ {
			case TypeSend:
				want = end || extra > 0
			case TypeWrite, TypeReadResponse:
				want = extra > RDMALen || end && extra == RDMALen
			case TypeReadRequest:
				want = end && extra == RDMALen
			case TypeNOP:
				want = end && extra == 0
			case TypeConnectRequest, TypeConnectAccept:
				want = end && extra >= CELen && extra <= CELen+MaxSecurity
			case TypeConnectReject, TypeConnectNoMatch:
				want = end && (extra == 0 || extra >= CELen && extra <= CELen+MaxSecurity)
			}
			got, err := ParseHeader(raw)
			if (err == nil) != want || err != nil && !errors.Is(err, ErrProtocol) {
				t.Errorf("%v, flags %#x, %d bytes behind the header: %v, want valid: %v", typ, flags, extra, err, want)
			}
			if want && got != h {
				t.Errorf("decoded %+v, want %+v", got, h)
			}
		}
	}
}

func TestParseHeader_refuses(t *testing.T) {
	good := golden[0].hdr.Append(nil)
	change := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	for name, b := range map[string][]byte{
		"no bytes":        nil,
		"too short":       good[:HeaderLen-1],
		"too long":        append(bytes.Clone(good), 0),
		"version 0":       change(0, 0),
		"version 2":       change(0, 2),
		"type 0":          change(1, 2),
		"type 10":         change(1, 10<<3|2),
		"type 31":         change(1, 31<<3|2),
		"length 0":        change(3, 0),
		"length 23":       change(3, HeaderLen-1),
		"NOP with data":   (&Header{Type: TypeNOP, Flags: FlagEnd, Length: HeaderLen + 1}).Append(nil),
		"NOP at offset 1": (&Header{Type: TypeNOP, Flags: FlagEnd, Length: HeaderLen, Offset: 1}).Append(nil),
		"Write without RDMA header": (&Header{
			Type: TypeWrite, Flags: FlagEnd, Length: HeaderLen + RDMALen - 1,
		}).Append(nil),
	} {
		if h, err := ParseHeader(b); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %+v, %v, want ErrProtocol", name, h, err)
		}
	}
	if _, err := ParseRDMA(make([]byte, RDMALen-1)); !errors.Is(err, ErrProtocol) {
		t.Errorf("short RDMA header: %v", err)
	}
}

func TestSection3_2_ConnectFields(t *testing.T) {
	for _, g := range goldenConnect(t) {
		raw := unhex(t, g.hex)
		m, err := parseConnect(raw)
		if err != nil {
			t.Errorf("%s: %v", g.name, err)
			continue
		}
		if diff := cmp.Diff(g.msg, m, cmp.AllowUnexported(connectMessage{}, Discriminator{})); diff != "" {
			t.Errorf("%s: decoded (-want +got):\n%s", g.name, diff)
		}
		if out := g.msg.bytes(); !bytes.Equal(out, raw) {
			t.Errorf("%s: encoded\n%x, want\n%x", g.name, out, raw)
		}
	}
}

func TestSection3_2_Discriminators(t *testing.T) {
	for _, s := range []string{"", "a", strings.Repeat("x", MaxDiscriminator)} {
		for _, security := range [][]byte{nil, bytes.Repeat([]byte{7}, MaxSecurity)} {
			in := CE{Calling: disc(t, s), Called: disc(t, "called"), Security: security}
			raw := in.Append(nil)
			// What stands behind the length is not looked at.
			for i := 8 + len(s); i < 24; i++ {
				raw[i] = 0xff
			}
			got, err := ParseCE(raw)
			if diff := cmp.Diff(in, got, cmp.AllowUnexported(Discriminator{})); err != nil || diff != "" {
				t.Errorf("%q: %v (-want +got):\n%s", s, err, diff)
			}
			if got.Calling.String() != s {
				t.Errorf("discriminator %q, want %q", got.Calling, s)
			}
		}
	}
	if _, err := NewDiscriminator(strings.Repeat("x", MaxDiscriminator+1)); err == nil {
		t.Error("discriminator of 17 bytes made")
	}
	if disc(t, "a") == disc(t, "a\x00") {
		t.Error("discriminators of different lengths are equal")
	}
	for _, at := range []int{3, 27} {
		raw := (&CE{}).Append(nil)
		raw[at] = MaxDiscriminator + 1
		if _, err := ParseCE(raw); !errors.Is(err, ErrProtocol) {
			t.Errorf("discriminator length 17 at %d: %v, want ErrProtocol", at, err)
		}
	}
	for _, n := range []int{0, CELen - 1, CELen + MaxSecurity + 1} {
		if _, err := ParseCE(make([]byte, n)); !errors.Is(err, ErrProtocol) {
			t.Errorf("CE header of %d bytes: %v, want ErrProtocol", n, err)
		}
	}
}

func TestParseConnect_refuses(t *testing.T) {
	good := unhex(t, goldenConnect(t)[0].hex)
	for name, b := range map[string][]byte{
		"no bytes":        nil,
		"one byte short":  good[:len(good)-1],
		"one byte more":   append(bytes.Clone(good), 0),
		"data":            unhex(t, golden[0].hex),
		"header alone":    good[:HeaderLen],
		"request without": (&Header{Type: TypeConnectRequest, Flags: FlagEnd, Length: HeaderLen}).Append(nil),
	} {
		if m, err := parseConnect(b); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %+v, %v, want ErrProtocol", name, m, err)
		}
	}
	bare := Header{Type: TypeConnectReject, Flags: FlagEnd, Length: HeaderLen}
	if m, err := parseConnect(bare.Append(nil)); err != nil || m.typ != TypeConnectReject {
		t.Errorf("refusal without CE header: %+v, %v", m, err)
	}
}

// §2.2.1: attributes that do not match refuse the connection, but sizes go down.
func TestSection2_2_1_Agreement(t *testing.T) {
	base := Attr{Reliable: true, RDMAWrite: true, RDMARead: true, FlowControl: true, Peer: true, MaxTransfer: 1 << 20, ReadWindow: 8}
	with := func(f func(*Attr)) Attr { a := base; f(&a); return a }
	for _, c := range []struct {
		name string
		a, b Attr
		want Attr
		err  error
	}{
		{name: "same", a: base, b: base, want: base},
		{
			name: "sizes", a: base, b: with(func(a *Attr) { a.MaxTransfer, a.ReadWindow = 64<<10, 3 }),
			want: with(func(a *Attr) { a.MaxTransfer, a.ReadWindow = 64<<10, 3 }),
		},
		{
			name: "flow control at one side", a: base, b: with(func(a *Attr) { a.FlowControl = false }),
			want: with(func(a *Attr) { a.FlowControl = false }),
		},
		{
			name: "peer-to-peer at one side", a: base, b: with(func(a *Attr) { a.Peer = false }),
			want: with(func(a *Attr) { a.Peer = false }),
		},
		{name: "reliable", a: base, b: with(func(a *Attr) { a.Reliable = false }), err: ErrReliability},
		{name: "write", a: base, b: with(func(a *Attr) { a.RDMAWrite = false }), err: ErrRDMAWrite},
		{name: "read", a: base, b: with(func(a *Attr) { a.RDMARead = false }), err: ErrRDMARead},
		{name: "no transfer", a: base, b: with(func(a *Attr) { a.MaxTransfer = 0 }), err: ErrMaxTransfer},
	} {
		for _, swap := range []bool{false, true} {
			a, b := c.a, c.b
			if swap {
				a, b = b, a
			}
			got, err := agree(a, b)
			if !errors.Is(err, c.err) || got != c.want {
				t.Errorf("%s: %+v, %v, want %+v, %v", c.name, got, err, c.want, c.err)
			}
			if err == nil {
				if err := got.accepted(a); err != nil {
					t.Errorf("%s: what was agreed on is not accepted: %v", c.name, err)
				}
			}
		}
	}
	for name, f := range map[string]func(*Attr){
		"longer transfers":    func(a *Attr) { a.MaxTransfer++ },
		"larger window":       func(a *Attr) { a.ReadWindow++ },
		"flow control":        func(a *Attr) { a.FlowControl = true },
		"peer-to-peer":        func(a *Attr) { a.Peer = true },
		"another reliability": func(a *Attr) { a.Reliable = false },
	} {
		offered := with(func(a *Attr) { a.FlowControl, a.Peer = false, false })
		got := offered
		f(&got)
		if got.accepted(offered) == nil {
			t.Errorf("accept with %s than offered is taken", name)
		}
	}
}

func TestStrings(t *testing.T) {
	for v, want := range map[fmt.Stringer]string{
		TypeSend: "Send", TypeConnectNoMatch: "Connect No Match", Type(0): "Type(0)", Type(31): "Type(31)",
		ErrorMemory: "RDMA memory protection error", ErrorType(9): "ErrorType(9)",
		CauseTransmit: "transmit error", Cause(200): "Cause(200)",
	} {
		if got := v.String(); got != want {
			t.Errorf("%#v: %q, want %q", v, got, want)
		}
	}
}

func FuzzParseHeader(f *testing.F) {
	for _, g := range golden {
		f.Add(unhex(f, g.hex)[:HeaderLen])
	}
	for _, g := range goldenConnect(f) {
		f.Add(unhex(f, g.hex)[:HeaderLen])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHeader(b)
		if err != nil {
			if !errors.Is(err, ErrProtocol) {
				t.Fatalf("error %v is not ErrProtocol", err)
			}
			return
		}
		if int(h.Length) < h.PayloadOffset() {
			t.Fatalf("%v of %d bytes", h.Type, h.Length)
		}
		if out := h.Append(nil); !bytes.Equal(out, b) {
			t.Fatalf("encoded again: %x, was %x", out, b)
		}
	})
}

func FuzzParseConnect(f *testing.F) {
	for _, g := range goldenConnect(f) {
		f.Add(unhex(f, g.hex))
	}
	f.Add((&Header{Type: TypeConnectReject, Flags: FlagEnd, Length: HeaderLen}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseConnect(b)
		if err != nil {
			if !errors.Is(err, ErrProtocol) {
				t.Fatalf("error %v is not ErrProtocol", err)
			}
			return
		}
		again, err := parseConnect(m.bytes())
		if diff := cmp.Diff(m, again, cmp.AllowUnexported(connectMessage{}, Discriminator{})); err != nil || diff != "" {
			t.Fatalf("decoded again: %v (-first +second):\n%s", err, diff)
		}
	})
}
