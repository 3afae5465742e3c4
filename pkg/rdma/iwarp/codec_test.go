// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFrame_golden(t *testing.T) {
	p2p := Enhanced{PeerToPeer: true, RTRWrite: true, IRD: 16, ORD: 16}
	tests := []struct {
		name  string
		hex   string
		frame Frame
	}{
		{
			"enhanced Request", "4d504120 49442052 65712046 72616d65 50020004 80108010",
			Frame{CRC: true, Rev: 2, IsEnhanced: true, Enhanced: p2p},
		},
		{
			"enhanced Reply", "4d504120 49442052 65702046 72616d65 50020004 80108010",
			Frame{Reply: true, CRC: true, Rev: 2, IsEnhanced: true, Enhanced: p2p},
		},
		{
			"refusal", "4d504120 49442052 65702046 72616d65 70020004 00100010",
			Frame{Reply: true, CRC: true, Reject: true, Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 16, ORD: 16}},
		},
		{
			"siw's Request", "4d504120 49442052 65712046 72616d65 10020004 00010001",
			Frame{Rev: 2, IsEnhanced: true, Enhanced: Enhanced{IRD: 1, ORD: 1}},
		},
		{
			"all flags, private data", "4d504120 49442052 65702046 72616d65 f0020007 ffffffff 616263",
			Frame{
				Reply: true, Markers: true, CRC: true, Reject: true, Rev: 2, IsEnhanced: true,
				Enhanced:    Enhanced{PeerToPeer: true, RTRSend: true, RTRWrite: true, RTRRead: true, IRD: ReadsUnknown, ORD: ReadsUnknown},
				PrivateData: []byte("abc"),
			},
		},
		{
			"revision 1", "4d504120 49442052 65712046 72616d65 80010002 6869",
			Frame{Markers: true, Rev: 1, PrivateData: []byte("hi")},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := unhex(t, tt.hex)
			got, err := ParseFrame(b)
			if err != nil {
				t.Fatal(err)
			}
			if len(got.PrivateData) == 0 {
				got.PrivateData = nil
			}
			if d := cmp.Diff(tt.frame, got); d != "" {
				t.Errorf("parsed (-want +got):\n%s", d)
			}
			if enc := tt.frame.Append(nil); !bytes.Equal(enc, b) || tt.frame.Len() != len(b) {
				t.Errorf("encoded %x, length %d, want %x", enc, tt.frame.Len(), b)
			}
		})
	}
}

func TestFrame_ignored(t *testing.T) {
	b := unhex(t, "4d504120 49442052 65712046 72616d65 3f010000")
	f, err := ParseFrame(b)
	if err != nil || f.Reject || f.IsEnhanced || f.CRC || f.Markers {
		t.Errorf("R, S of revision 1 and reserved bits in a Request: %+v, %v", f, err)
	}
}

func TestParseFrame_errors(t *testing.T) {
	request := unhex(t, "4d504120 49442052 65712046 72616d65 50020004 80108010")
	edit := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(request)) }
	tests := []struct {
		name string
		b    []byte
		want error
	}{
		{"empty", nil, ErrKey},
		{"cut in the header", request[:19], ErrKey},
		{"key", edit(func(b []byte) []byte { b[15] ^= 1; return b }), ErrKey},
		{"cut in the private data", request[:22], ErrPrivateData},
		{"trailing byte", append(bytes.Clone(request), 0), ErrPrivateData},
		{"513 octets", edit(func(b []byte) []byte { b[18], b[19] = 2, 1; return append(b, make([]byte, 509)...) }), ErrPrivateData},
		{"enhanced, three octets", edit(func(b []byte) []byte { b[19] = 3; return b[:23] }), ErrPrivateData},
		{"512 octets", edit(func(b []byte) []byte { b[18], b[19] = 2, 0; return append(b, make([]byte, 508)...) }), nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := ParseFrame(tt.b); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	if _, err := FrameLen(request, true); !errors.Is(err, ErrKey) {
		t.Errorf("a Request where a Reply is due: %v", err)
	}
}

// castagnoli is for CRCs by another implementation than the one under test.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func TestCRC_vectors(t *testing.T) {
	// RFC 3720 B.4 has these for the same polynomial and order of octets.
	if got := crc32c([]byte("123456789")); got != 0xe3069283 {
		t.Errorf("%#x", got)
	}
	got := binary.LittleEndian.AppendUint32(nil, crc32c(make([]byte, 32)))
	if want := unhex(t, "aa36918a"); !bytes.Equal(got, want) {
		t.Errorf("32 zeros: %x, want %x", got, want)
	}
}

func TestMULPDU(t *testing.T) {
	tests := []struct {
		name    string
		emss    int
		markers bool
		want    int
	}{
		{"Ethernet", 1460, false, 1454},
		{"time stamps", 1448, false, 1442},
		{"odd", 1447, false, 1438},
		{"markers", 1460, true, 1442},
		{"tiny", 88, false, MinULPDU},
		{"tiny, markers", 88, true, MinULPDU},
		{"loopback", 65483, false, 65474},
		{"longer than FPDUs", 1 << 20, false, MaxOwnULPDU},
		{"longer than FPDUs, markers", 1 << 20, true, MaxMarkedULPDU},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := MULPDU(tt.emss, tt.markers)
			if n != tt.want {
				t.Errorf("got %d, want %d", n, tt.want)
			}
			f := Framing{Markers: tt.markers}
			if got := len(f.Append(nil, make([]byte, n))); n > MinULPDU && n < MaxOwnULPDU && got > tt.emss {
				t.Errorf("FPDU of %d bytes does not fit into %d", got, tt.emss)
			}
		})
	}
}

// TestFraming_markersByHand has an FPDU with three markers: before its length, in its
// payload and before its CRC.
func TestFraming_markersByHand(t *testing.T) {
	ulpdu := make([]byte, 1010) // with the length 1012 bytes: two spacings without their markers, less 4
	for i := range ulpdu {
		ulpdu[i] = byte(i)
	}
	f := Framing{CRC: true, Markers: true}
	got := f.Append(nil, ulpdu[:600], ulpdu[600:])

	want := unhex(t, "00000000 03f2")
	want = append(want, ulpdu[:506]...)
	want = append(want, unhex(t, "00000000"[:4]+"01fc")...) // 508 bytes back to the length
	want = append(want, ulpdu[506:]...)
	if len(want) != 1020 {
		t.Fatalf("%d bytes before the CRC", len(want))
	}
	want = binary.LittleEndian.AppendUint32(want, crc32.Checksum(want, castagnoli))
	if !bytes.Equal(got, want) {
		t.Fatalf("got  %x\nwant %x", got, want)
	}
	// The next FPDU begins where a marker is due; its own body is 508 bytes, so that the
	// marker after it stands before the CRC.
	got = f.Append(nil, ulpdu[:506])
	if len(got) != 4+508+4+4 || !bytes.Equal(got[512:516], unhex(t, "000001fc")) {
		t.Errorf("marker before the CRC: % x of %d bytes", got[508:], len(got))
	}
	if crc := binary.LittleEndian.Uint32(got[516:]); crc != crc32.Checksum(got[:516], castagnoli) {
		t.Error("the CRC does not cover the marker before it")
	}
}

func TestFraming_roundTrip(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, markers := range []bool{false, true} {
		for _, crc := range []bool{false, true} {
			tx, rx := Framing{CRC: crc, Markers: markers}, Framing{CRC: crc, Markers: markers}
			var stream []byte
			var want [][]byte
			for range 300 {
				u := make([]byte, rnd.IntN(1500))
				for i := range u {
					u[i] = byte(rnd.Uint32())
				}
				want = append(want, u)
				k := rnd.IntN(len(u) + 1)
				stream = tx.Append(stream, u[:k], u[k:])
			}
			for i := range want {
				for _, short := range []int{0, 1, 5} {
					if _, _, err := rx.Next(stream[:short]); !errors.Is(err, ErrIncomplete) {
						t.Fatalf("%d bytes: %v", short, err)
					}
				}
				u, n, err := rx.Next(stream)
				if err != nil || !bytes.Equal(u, want[i]) {
					t.Fatalf("markers %t, CRC %t, FPDU %d: %v", markers, crc, i, err)
				}
				stream = stream[n:]
			}
			if len(stream) != 0 {
				t.Fatalf("%d bytes left", len(stream))
			}
		}
	}
}

func TestFraming_errors(t *testing.T) {
	u := make([]byte, 1200)
	for _, markers := range []bool{false, true} {
		f := Framing{CRC: true, Markers: markers}
		b := f.Append(nil, u)
		for i := 6; i < len(b); i++ { // a wrong length only makes the FPDU incomplete
			c := bytes.Clone(b)
			c[i] ^= 0x10
			g := Framing{CRC: true, Markers: markers}
			if _, _, err := g.Next(c); !errors.Is(err, CodeCRC) {
				t.Fatalf("markers %t, byte %d flipped: %v", markers, i, err)
			}
		}
	}
	f := Framing{Markers: true}
	b := f.Append(nil, u)
	b[515] ^= 4 // FPDUPTR of the second marker
	if _, _, err := new(Framing{Markers: true}).Next(b); !errors.Is(err, CodeMarker) {
		t.Errorf("wrong marker: %v", err)
	}
}

func TestHeaderParse_errors(t *testing.T) {
	tests := []struct {
		name string
		hex  string
		want Code
	}{
		{"shorter than a tagged header", "c140 00000001 00000000 000000", CodeMarker},
		{"shorter than an untagged header", "4143 00000000 00000000 00000001 000000", CodeMarker},
		{"tagged version", "c240 00000001 00000000 00000000", CodeTaggedVersion},
		{"untagged version", "4043 00000000 00000000 00000001 00000000", CodeUntaggedVersion},
		{"RDMAP version", "4103 00000000 00000000 00000001 00000000", CodeRDMAPVersion},
		{"immediate data", "4148 00000000 00000000 00000001 00000000", CodeOpcode},
		{"atomic", "414a 00000000 00000001 00000001 00000000", CodeOpcode},
		{"untagged WRITE", "4140 00000000 00000000 00000001 00000000", CodeOpcode},
		{"tagged SEND", "c143 00000001 00000000 00000000", CodeOpcode},
		{"SEND in the queue of READs", "4143 00000000 00000001 00000001 00000000", CodeQN},
		{"READ request in the queue of SENDs", "4141 00000000 00000000 00000001 00000000", CodeQN},
		{"Terminate in the queue of SENDs", "4147 00000000 00000000 00000001 00000000", CodeQN},
		{"queue 3", "4143 00000000 00000003 00000001 00000000", CodeQN},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var h Header
			if err := h.Parse(unhex(t, tt.hex)); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	var h Header
	if err := h.Parse(unhex(t, "7d73 01020304 00000000 00000001 00000000")); err != nil || h.Op != OpSend || h.STag != 0x01020304 {
		t.Errorf("reserved bits and octets are not ignored: %+v, %v", h, err)
	}
}

func TestTerminate_layouts(t *testing.T) {
	header := unhex(t, "4143 00000000 00000000 00000001 00000000")
	request := unhex(t, "55667788 00000000 00002000 00000004 11223344 00000000 00001000")
	tests := []struct {
		name string
		hex  string
		want Terminate
	}{
		{"RFC, no buffer", "1202c000 0017" + "4143 00000000 00000000 00000001 00000000", Terminate{Code: CodeNoBuffer, HasLength: true, Length: 23, Header: header}},
		{"siw, no buffer", "21020300 0005" + "4143 00000000 00000000 00000001 00000000", Terminate{Code: CodeNoBuffer, HasLength: true, Length: 5, Header: header, Swapped: true}},
		{"RFC, READ", "0100e000 002e 4143 00000000 00000000 00000001 00000000 55667788 00000000 00002000 00000004 11223344 00000000 00001000", Terminate{HasLength: true, Length: 46, Code: CodeReadSTag, Header: header, Request: request}},
		{"RFC, CRC", "20020000", Terminate{Code: CodeCRC}},
		{"siw, CRC", "02020000", Terminate{Code: CodeCRC, Swapped: true}},
		{"RFC, type 3 of the lower layer", "23020000", Terminate{Code: CodeCRC}},
		{"RFC, version", "02050000", Terminate{Code: CodeRDMAPVersion, Ambiguous: true}},
		{"RFC, operation", "02060000", Terminate{Code: CodeOpcode, Ambiguous: true}},
		{"RFC, right", "01020000", Terminate{Code: CodeAccess}},
		{"either way", "10000000", Terminate{Code: CodeDDPLocal, Ambiguous: true}},
		{"siw, local", "00ff0000", Terminate{Code: 0x00ff}},
		{"same either way", "11010000", Terminate{Code: CodeTaggedBounds}},
		{"flags without headers", "1202e000", Terminate{Code: CodeNoBuffer}},
		{"cut header", "1202c000 0017 4143 0000", Terminate{Code: CodeNoBuffer, HasLength: true, Length: 23}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := unhex(t, tt.hex)
			got, err := ParseTerminate(b)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if enc := got.Append(nil); !got.Swapped && got.Header != nil && !bytes.Equal(enc, b) {
				t.Errorf("encoded %x, want %x", enc, b)
			}
		})
	}
	if _, err := ParseTerminate(make([]byte, 3)); !errors.Is(err, CodeMarker) {
		t.Errorf("three bytes: %v", err)
	}
}

func TestCode_String(t *testing.T) {
	for c, want := range map[Code]string{
		CodeCRC:       "CRC error (2/0/0x02)",
		CodeReadSTag:  "remote protection: invalid STag (0/1/0x00)",
		CodeTooLong:   "untagged buffer: message is too long for it (1/2/0x05)",
		0x00ff:        "local catastrophic error (0/0/0xff)",
		0x1307:        "unknown error (1/3/0x07)",
		CodeRTR:       "no common RTR message (2/0/0x07)",
		CodeStartup:   "invalid MPA Request or Reply (2/0/0x04)",
		CodeOperation: "remote operation: unspecified (0/2/0xff)",

		// These are never sent.
		CodeReadStream:   "remote protection: STag is not for this stream (0/1/0x03)",
		CodeInvalidateID: "remote protection: STag cannot be invalidated (0/1/0x09)",
		CodeProtection:   "remote protection: unspecified (0/1/0xff)",
		CodeGlobal:       "catastrophic error of all streams (0/2/0x08)",
		CodeDDPLocal:     "DDP: local catastrophic error (1/0/0x00)",
		CodeTaggedStream: "tagged buffer: STag is not for this stream (1/1/0x02)",
		CodeTCP:          "TCP connection closed or lost (2/0/0x01)",
		CodeMPALocal:     "MPA: local catastrophic error (2/0/0x05)",
	} {
		if got := c.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
