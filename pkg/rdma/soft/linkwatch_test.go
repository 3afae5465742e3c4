// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"encoding/binary"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A look at all links that fails, as when the socket overruns again meanwhile, is not the last one: the state is
// that of before until another look succeeds.
func TestLinkWatch_looksAgain(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	kernel := os.NewFile(uintptr(fds[1]), "kernel")
	defer func() { _ = kernel.Close() }()
	w := &linkWatch{
		addr: netip.MustParseAddr("192.0.2.1"), file: os.NewFile(uintptr(fds[0]), "netlink"), changed: make(chan struct{}, 1),
		links: map[int32]linkInfo{7: {name: "eth7", mtu: 1500, up: true}},
		addrs: map[addrKey]struct{}{{7, 24, netip.MustParseAddr("192.0.2.1")}: {}},
	}
	s := w.compute()
	w.state.Store(&s)
	if err := w.file.SetReadDeadline(time.Unix(1, 0)); err != nil { // stands for an overrun
		t.Fatal(err)
	}
	if err := kernel.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil { // rather than wait for ever
		t.Fatal(err)
	}
	w.start()
	defer func() { _ = w.close() }()

	asked := func() (typ uint16, seq uint32) {
		t.Helper()
		b := make([]byte, 64)
		if n, err := kernel.Read(b); err != nil || n < unix.NLMSG_HDRLEN {
			t.Fatalf("%d bytes, %v", n, err)
		}
		return binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:])
	}
	say := func(typ uint16, seq uint32, body []byte) {
		t.Helper()
		b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
		b = binary.NativeEndian.AppendUint16(b, typ)
		b = binary.NativeEndian.AppendUint16(b, 0)
		b = binary.NativeEndian.AppendUint32(b, seq)
		b = append(binary.NativeEndian.AppendUint32(b, 0), body...)
		if _, err := kernel.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	_, seq := asked()
	overrun := uint32(unix.ENOBUFS)
	say(unix.NLMSG_ERROR, seq, binary.NativeEndian.AppendUint32(nil, -overrun))
	typ, seq := asked() // after a while
	if typ != unix.RTM_GETLINK || !w.get().Up {
		t.Errorf("asked for %d; the link is up: %t", typ, w.get().Up)
	}
	say(unix.NLMSG_DONE, seq, nil)
	if typ, seq = asked(); typ != unix.RTM_GETADDR {
		t.Errorf("asked for %d", typ)
	}
	say(unix.NLMSG_DONE, seq, nil)
	<-w.changed
	if w.get().Up {
		t.Error("the link is gone, and up")
	}
}

// Packets of an address on loopback leave by another interface, and have to fit that; those to other addresses of loopback
// do not leave.
func TestLinkWatch_loopback(t *testing.T) {
	lo := linkInfo{name: "lo", mtu: 65536, up: true, loopback: true}
	eth := func(mtu int, up bool) linkInfo { return linkInfo{name: "eth", mtu: mtu, up: up} }
	for _, c := range []struct {
		name, addr  string
		others      []linkInfo
		on          int32 // also on this interface
		least, most int
	}{
		{"one interface", "192.0.2.1", []linkInfo{eth(1500, true)}, 0, 1500, 1500},
		{"IPv6", "2001:db8::1", []linkInfo{eth(1500, true)}, 0, 1500, 1500},
		{"several", "192.0.2.1", []linkInfo{eth(9000, true), eth(1450, true), eth(1500, true)}, 0, 1450, 9000},
		{"on an interface, too", "192.0.2.1", []linkInfo{eth(1500, true), eth(9000, true)}, 3, 1500, 9000},
		{"one that is down", "192.0.2.1", []linkInfo{eth(600, false), eth(9000, true)}, 0, 9000, 9000},
		{"nothing but loopback", "192.0.2.1", []linkInfo{eth(1500, false), lo}, 0, 65536, 65536},
		{"loopback address", "127.0.0.1", []linkInfo{eth(1500, true)}, 0, 65536, 0},
		{"loopback address of IPv6", "::1", []linkInfo{eth(1500, true)}, 0, 65536, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			addr := netip.MustParseAddr(c.addr)
			w := &linkWatch{addr: addr, links: map[int32]linkInfo{1: lo}, addrs: map[addrKey]struct{}{{1, uint8(addr.BitLen()), addr}: {}}}
			for i, l := range c.others {
				w.links[int32(i)+2] = l
			}
			if c.on != 0 {
				w.addrs[addrKey{c.on, uint8(addr.BitLen()), addr}] = struct{}{}
			}
			if s := w.compute(); !s.Up || s.NetDev != "lo" || s.MTUBytes != c.least || s.MaxMTUBytes != c.most {
				t.Errorf("%+v, want MTU %d to %d", s, c.least, c.most)
			}
		})
	}
}
