// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"encoding/hex"
	"os"
	"strings"
	"testing"
)

// A capture is a handshake packet of testdata/syns.txt.
type capture struct {
	name string
	want bool
	b    []byte
}

// captures reads the corpus, and fails the test if there is none.
func captures(t testing.TB) []capture {
	t.Helper()
	text, err := os.ReadFile("testdata/syns.txt")
	if err != nil {
		t.Fatal(err)
	}
	var cs []capture
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		f := strings.Fields(line)
		if len(f) != 3 {
			t.Fatalf("testdata/syns.txt: %q has not three fields", line)
		}
		b, err := hex.DecodeString(f[2])
		if err != nil {
			t.Fatalf("testdata/syns.txt: %s: %v", f[0], err)
		}
		cs = append(cs, capture{name: f[0], want: f[1] == "true", b: b})
	}
	if len(cs) == 0 {
		t.Fatal("testdata/syns.txt has no packets")
	}
	return cs
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const optionHex = "fe06e2d4c3d9"

func TestHasOption(t *testing.T) {
	tests := []struct {
		name, options string
		want          bool
	}{
		{name: "empty"},
		{name: "alone", options: optionHex, want: true},
		{name: "as Linux writes it", options: "020405b4 0402 080a9a0b485e00000000 01 030307 0101 fe06e2d4c3d9", want: true},
		{name: "padded by NOPs", options: "01010101" + optionHex + "0101", want: true},
		{name: "behind another kind 254", options: "fe04f989" + optionHex, want: true},
		{name: "behind another kind 254 of our length", options: "fe0600000000" + optionHex, want: true},
		{name: "behind the end of options", options: "00" + optionHex},
		{name: "kind 253", options: "fd06e2d4c3d9"},
		{name: "SMC-D of z/OS", options: "fe06e2d4c3c4"},
		{name: "longer", options: "fe08e2d4c3d90000"},
		{name: "longer first", options: "fe08e2d4c3d90000" + optionHex},
		{name: "shorter", options: "fe04e2d4"},
		{name: "cut", options: "fe06e2d4c3"},
		{name: "kind alone", options: "fe"},
		{name: "length 0", options: "0500" + optionHex},
		{name: "length 1", options: "0501" + optionHex},
		{name: "length beyond the end", options: "05ff" + optionHex},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := HasOption(unhex(t, tt.options)); got != tt.want {
				t.Errorf("HasOption(%s) = %v, want %v", tt.options, got, tt.want)
			}
		})
	}
}

func TestParseSYN_captures(t *testing.T) {
	for _, c := range captures(t) {
		t.Run(c.name, func(t *testing.T) {
			if got, err := ParseSYN(c.b); err != nil || got != c.want {
				t.Errorf("ParseSYN() = %v, %v; want %v", got, err, c.want)
			}
			// No prefix of a packet is a packet.
			for n := range c.b {
				if _, err := ParseSYN(c.b[:n]); err == nil {
					t.Errorf("ParseSYN() of the first %d of %d bytes gives no error", n, len(c.b))
				}
			}
		})
	}
}

const (
	ipv4Hex = "4500003000004000400600000a0000010a000002"
	ipv6Hex = "60000000001c%s40 fd000000000000000000000000000001 fd000000000000000000000000000002"
	tcpHex  = "9c40 0050 00000001 00000000 7002 fffa 0000 0000 fe06e2d4c3d90101"
)

func TestParseSYN(t *testing.T) {
	v6 := func(next string) string { return strings.Replace(ipv6Hex, "%s", next, 1) }
	tests := []struct {
		name, packet string
		want         bool
		wantErr      string
	}{
		{name: "IPv4", packet: ipv4Hex + tcpHex, want: true},
		{name: "IPv4 with options", packet: "46" + ipv4Hex[2:] + "94040000" + tcpHex, want: true},
		{name: "IPv6", packet: v6("06") + tcpHex, want: true},
		{name: "IPv6 with hop-by-hop and destination options", packet: v6("00") + "3c00010400000000" + "0601010400000000" + "0000000000000000" + tcpHex, want: true},
		{name: "IPv6 with authentication", packet: v6("33") + "06020000 00000000 00000000 00000000" + tcpHex, want: true},
		{name: "IPv6 atomic fragment", packet: v6("2c") + "0600000000000001" + tcpHex, want: true},
		{name: "bytes behind the header", packet: ipv4Hex + tcpHex + "fe06", want: true},
		{name: "no TCP options", packet: ipv4Hex + "9c400050000000010000000050 02fffa00000000"},
		{name: "empty", wantErr: "empty"},
		{name: "IP version 5", packet: "55" + ipv4Hex[2:] + tcpHex, wantErr: "IP version 5"},
		{name: "IPv4 header of 16 bytes", packet: "44" + ipv4Hex[2:] + tcpHex, wantErr: "16 bytes"},
		{name: "IPv4 with UDP", packet: ipv4Hex[:18] + "11" + ipv4Hex[20:] + tcpHex, wantErr: "protocol 17"},
		{name: "IPv4 fragment", packet: ipv4Hex[:12] + "0001" + ipv4Hex[16:] + tcpHex, wantErr: "fragment at offset 8"},
		{name: "IPv6 with UDP", packet: v6("11") + tcpHex, wantErr: "next header 17"},
		{name: "IPv6 fragment", packet: v6("2c") + "0600001000000001" + tcpHex, wantErr: "fragment at offset 16"},
		{name: "IPv6 extension beyond the end", packet: v6("00") + "06ff000000000000" + tcpHex, wantErr: "2048 bytes"},
		{name: "IPv6 extensions without end", packet: v6("00") + strings.Repeat("0000010400000000", 64), wantErr: "more than 8"},
		{name: "TCP header of 16 bytes", packet: ipv4Hex + strings.Replace(tcpHex, "7002", "4002", 1), wantErr: "says 16 bytes of 28"},
		{name: "ACK", packet: ipv4Hex + "9c40005000000001000000007010fffa00000000fe06e2d4c3d90101", wantErr: "SYN is not set"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseSYN(unhex(t, tt.packet))
			if tt.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wantErr) {
					t.Errorf("ParseSYN() = %v, %v; want an error with %q", got, err, tt.wantErr)
				}
				return
			}
			if err != nil || got != tt.want {
				t.Errorf("ParseSYN() = %v, %v; want %v", got, err, tt.want)
			}
		})
	}
}

func TestParseSYN_allocatesNothing(t *testing.T) {
	b := captures(t)[0].b
	if got := testing.AllocsPerRun(1000, func() { _, _ = ParseSYN(b) }); got != 0 {
		t.Errorf("ParseSYN allocates %v times, want 0", got)
	}
}

func FuzzParseSYN(f *testing.F) {
	for _, c := range captures(f) {
		f.Add(c.b)
	}
	for _, s := range []string{
		ipv4Hex + tcpHex,
		strings.Replace(ipv6Hex, "%s", "06", 1) + tcpHex,
		strings.Replace(ipv6Hex, "%s", "00", 1) + "0600010400000000" + tcpHex,
	} {
		f.Add(unhex(f, s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		before := string(b)
		got, err := ParseSYN(b)
		if string(b) != before {
			t.Fatal("ParseSYN changed its input")
		}
		if err != nil {
			if got {
				t.Fatalf("ParseSYN() = true with %v", err)
			}
			return
		}
		if got && !strings.Contains(before, "\xfe\x06\xe2\xd4\xc3\xd9") {
			t.Fatalf("ParseSYN(%x) = true without the option", b)
		}
		// What follows the TCP header is none of its business.
		if again, err := ParseSYN(append(b, 0xfe, 0x06)); err != nil || again != got {
			t.Fatalf("ParseSYN() of a longer packet = %v, %v; want %v", again, err, got)
		}
	})
}
