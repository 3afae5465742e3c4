// SPDX-License-Identifier: Apache-2.0

package rocev2

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
)

// captured is a RoCEv2 packet of a capture.
type captured struct {
	name  string
	addrs Addresses
	ipID  uint16
	udp   []byte // UDP payload, BTH to ICRC
}

// captures reads all RoCEv2 packets of testdata/rxe. It fails when there are
// none.
func captures(tb testing.TB) []captured {
	tb.Helper()
	files, err := filepath.Glob("testdata/rxe/*.pcap")
	if err != nil {
		tb.Fatal(err)
	}
	var all []captured
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			tb.Fatal(err)
		}
		got := readPcap(tb, filepath.Base(f), b)
		if len(got) == 0 {
			tb.Errorf("%s holds no RoCEv2 packet", f)
		}
		all = append(all, got...)
	}
	if len(all) == 0 {
		tb.Fatal("no captured packet in testdata/rxe")
	}
	return all
}

// readPcap reads a classic little endian pcap file of Ethernet frames.
func readPcap(tb testing.TB, name string, b []byte) []captured {
	tb.Helper()
	if len(b) < 24 || binary.LittleEndian.Uint32(b) != 0xa1b2c3d4 || binary.LittleEndian.Uint32(b[20:]) != 1 {
		tb.Fatalf("%s is not a little endian pcap of Ethernet frames", name)
	}
	var all []captured
	for i, rest := 1, b[24:]; len(rest) >= 16; i++ {
		n := int(binary.LittleEndian.Uint32(rest[8:]))
		frame := rest[16 : 16+n]
		rest = rest[16+n:]
		c, ok := roceOf(frame)
		if !ok {
			continue
		}
		c.name = fmt.Sprintf("%s:%d", name, i)
		all = append(all, c)
	}
	return all
}

func roceOf(f []byte) (c captured, ok bool) {
	ip := f[14:]
	var udp []byte
	switch binary.BigEndian.Uint16(f[12:]) {
	case 0x0800:
		if ip[9] != 17 {
			return c, false
		}
		c.addrs.Src = netip.AddrFrom4([4]byte(ip[12:16]))
		c.addrs.Dst = netip.AddrFrom4([4]byte(ip[16:20]))
		c.ipID = binary.BigEndian.Uint16(ip[4:])
		udp = ip[int(ip[0]&15)*4:]
	case 0x86dd:
		if ip[6] != 17 {
			return c, false
		}
		c.addrs.Src = netip.AddrFrom16([16]byte(ip[8:24]))
		c.addrs.Dst = netip.AddrFrom16([16]byte(ip[24:40]))
		udp = ip[40:]
	default:
		return c, false
	}
	c.addrs.SrcPort = binary.BigEndian.Uint16(udp)
	c.addrs.DstPort = binary.BigEndian.Uint16(udp[2:])
	if c.addrs.DstPort != Port {
		return c, false
	}
	c.udp = udp[8:binary.BigEndian.Uint16(udp[4:])]
	return c, true
}
