// SPDX-License-Identifier: Apache-2.0

package synqueue

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"testing"
)

// linuxOptions are those of a SYN of Linux: MSS, SACK permitted, timestamps, NOP,
// window scale.
const linuxOptions = "020405b4" + "0402" + "080a00112233" + "00000000" + "01" + "030307"

// packet makes a SYN.
func packet(t testing.TB, src, dst netip.AddrPort, options, data string) []byte {
	t.Helper()
	o, err := hex.DecodeString(options)
	if err != nil {
		t.Fatal(err)
	}
	for len(o)%4 != 0 {
		o = append(o, 0)
	}
	var b []byte
	size := tcpHeader + len(o) + len(data)
	if src.Addr().Is4() {
		b = append(b, 0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, protocolTCP, 0, 0)
		binary.BigEndian.PutUint16(b[2:], uint16(ipv4Header+size))
	} else {
		b = append(b, 0x60, 0, 0, 0, 0, 0, protocolTCP, 64)
		binary.BigEndian.PutUint16(b[4:], uint16(size))
	}
	b = append(append(b, src.Addr().AsSlice()...), dst.Addr().AsSlice()...)
	b = binary.BigEndian.AppendUint16(b, src.Port())
	b = binary.BigEndian.AppendUint16(b, dst.Port())
	b = binary.BigEndian.AppendUint32(b, 0xdeadbeef)
	b = append(b, 0, 0, 0, 0, byte(5+len(o)/4)<<4, flagSYN, 0xfa, 0xf0, 0, 0, 0, 0)
	b = append(append(b, o...), data...)
	return b
}

func ends(v6 bool) (src, dst netip.AddrPort) {
	if v6 {
		return netip.MustParseAddrPort("[fd00::1]:40000"), netip.MustParseAddrPort("[fd00::2]:80")
	}
	return netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.0.0.2:80")
}

func eachFamily(t *testing.T, f func(t *testing.T, src, dst netip.AddrPort)) {
	for name, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) {
			src, dst := ends(v6)
			f(t, src, dst)
		})
	}
}

func TestParseSYN(t *testing.T) {
	eachFamily(t, func(t *testing.T, src, dst netip.AddrPort) {
		for name, options := range map[string]string{"no options": "", "Linux": linuxOptions, "unreadable": "02ff"} {
			t.Run(name, func(t *testing.T) {
				s, err := ParseSYN(packet(t, src, dst, options, "data"))
				if want := (SYN{Conn: Conn{src, dst}, Seq: 0xdeadbeef}); err != nil || s != want {
					t.Errorf("got %+v, %v, want %+v", s, err, want)
				}
			})
		}
	})
}

func TestParseSYN_refuses(t *testing.T) {
	eachFamily(t, func(t *testing.T, src, dst netip.AddrPort) {
		tcp := ipv6Header
		if src.Addr().Is4() {
			tcp = ipv4Header
		}
		for name, change := range map[string]func(b []byte) []byte{
			"nothing":           func(b []byte) []byte { return nil },
			"another version":   func(b []byte) []byte { b[0] = 0x55; return b },
			"cut IP header":     func(b []byte) []byte { return b[:tcp-1] },
			"cut TCP header":    func(b []byte) []byte { return b[:tcp+tcpHeader-1] },
			"cut options":       func(b []byte) []byte { return b[:len(b)-1] },
			"SYN-ACK":           func(b []byte) []byte { b[tcp+13] |= flagACK; return b },
			"with RST":          func(b []byte) []byte { b[tcp+13] |= flagRST; return b },
			"with FIN":          func(b []byte) []byte { b[tcp+13] |= flagFIN; return b },
			"no SYN":            func(b []byte) []byte { b[tcp+13] = 0; return b },
			"short data offset": func(b []byte) []byte { b[tcp+12] = 4 << 4; return b },
			"options behind the packet": func(b []byte) []byte {
				if src.Addr().Is4() {
					binary.BigEndian.PutUint16(b[2:], uint16(tcp+tcpHeader))
				} else {
					binary.BigEndian.PutUint16(b[4:], tcpHeader)
				}
				return b
			},
			"another protocol": func(b []byte) []byte {
				if src.Addr().Is4() {
					b[9] = 17
				} else {
					b[6] = 17
				}
				return b
			},
			"fragment": func(b []byte) []byte {
				if src.Addr().Is4() {
					b[6] = 0x20
				} else {
					b[6] = 44
				}
				return b
			},
			"endless extension headers": func(b []byte) []byte {
				if src.Addr().Is4() {
					b[0] = 0x44 // a header of 16 bytes
					return b
				}
				b[6] = nextDestination
				copy(b[tcp:], make([]byte, 40)) // hop by hop, again and again
				return b
			},
		} {
			t.Run(name, func(t *testing.T) {
				if s, err := ParseSYN(change(packet(t, src, dst, linuxOptions, ""))); !errors.Is(err, ErrNotSYN) {
					t.Errorf("got %+v, %v, want ErrNotSYN", s, err)
				}
			})
		}
	})
}

// TestParseSYN_extensionHeaders: a destination option before TCP, as of a program that
// asked for one.
func TestParseSYN_extensionHeaders(t *testing.T) {
	src, dst := ends(true)
	b := packet(t, src, dst, linuxOptions, "")
	b = append(b[:ipv6Header:ipv6Header], append([]byte{protocolTCP, 0, 1, 4, 0, 0, 0, 0}, b[ipv6Header:]...)...)
	b[6] = nextDestination
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-ipv6Header))
	s, err := ParseSYN(b)
	if err != nil || s.Dst != dst {
		t.Fatalf("got %+v, %v, want destination %v", s, err, dst)
	}
}

func TestParseSYN_allocatesNothing(t *testing.T) {
	src, dst := ends(true)
	b := packet(t, src, dst, linuxOptions, "")
	n := testing.AllocsPerRun(100, func() {
		if _, err := ParseSYN(b); err != nil {
			t.Fatal(err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations per packet", n)
	}
}

func FuzzParseSYN(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		src, dst := ends(v6)
		for _, options := range []string{"", linuxOptions, linuxOptions + "fe06e2d4c3d9", "02ff", "1312"} {
			f.Add(packet(f, src, dst, options, "data"))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSYN(b)
		if err != nil {
			return
		}
		if !bytes.Contains(b, s.Src.Addr().AsSlice()) || !bytes.Contains(b, binary.BigEndian.AppendUint32(nil, s.Seq)) {
			t.Fatalf("%x became %+v", b, s)
		}
	})
}
