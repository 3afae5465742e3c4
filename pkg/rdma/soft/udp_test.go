// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// The kernel's form of an address and ours are the same, also where a port reads
// differently backwards. A link-local one goes out over the interface of the device.
func TestUDPWire_sockaddr(t *testing.T) {
	for _, c := range []struct {
		to     string
		length uint32
		raw    []byte // family, port and what follows, as far as it counts
		scope  uint32
	}{
		{"192.0.2.7:4791", unix.SizeofSockaddrInet4, []byte{0x12, 0xb7, 192, 0, 2, 7}, 0},
		{"192.0.2.7:256", unix.SizeofSockaddrInet4, []byte{1, 0, 192, 0, 2, 7}, 0},
		{"[2001:db8::7]:4791", unix.SizeofSockaddrInet6, []byte{0x12, 0xb7, 0, 0, 0, 0, 0x20, 1, 0x0d, 0xb8}, 0},
		{"[fe80::7]:4791", unix.SizeofSockaddrInet6, []byte{0x12, 0xb7, 0, 0, 0, 0, 0xfe, 0x80}, 9},
	} {
		to := netip.MustParseAddrPort(c.to)
		w := &udpWire{v6: to.Addr().Is6(), scope: 9}
		n := unix.RawSockaddrInet6{Scope_id: 77, Flowinfo: 78} // of the message before
		if got := w.sockaddr(&n, to); got != c.length {
			t.Errorf("%s: %d bytes, want %d", c.to, got, c.length)
		}
		b := unsafe.Slice((*byte)(unsafe.Pointer(&n)), unsafe.Sizeof(n))
		if d := cmp.Diff(c.raw, b[2:2+len(c.raw)]); d != "" {
			t.Errorf("%s: %s", c.to, d)
		}
		if w.v6 && n.Scope_id != c.scope {
			t.Errorf("%s: scope %d, want %d", c.to, n.Scope_id, c.scope)
		}
		if got := (&inSocket{v6: w.v6}).sender(&n); got != to {
			t.Errorf("%s: read as %v", c.to, got)
		}
	}
}

// A call takes as many messages as it has room for, each with its own pieces and with
// nothing of the message that had the place before.
func TestUDPSender_fill(t *testing.T) {
	to := netip.MustParseAddrPort("192.0.2.7:4791")
	msg := func(pieces, segment int) (m Message) {
		m.Peer, m.SegmentBytes = to, segment
		for i := range pieces {
			m.Bufs = append(m.Bufs, make([]byte, i+1))
		}
		return m
	}
	most := len(udpSender{}.iov)
	for _, c := range []struct {
		name string
		msgs []Message
		want int
	}{
		{"one", []Message{msg(2, 0)}, 1},
		{"a batch", make([]Message, txBatch), txBatch},
		{"more than a batch", make([]Message, txBatch+1), txBatch},
		{"all pieces", []Message{msg(most-1, 1000), msg(1, 0)}, 2},
		{"one piece more", []Message{msg(most-1, 1000), msg(2, 0)}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &udpSender{w: &udpWire{}}
			s.fill([]Message{msg(1, 500), msg(1, 500), msg(1, 500)})
			for i := range c.msgs {
				if c.msgs[i].Peer = to; c.msgs[i].Bufs == nil {
					c.msgs[i].Bufs = [][]byte{{byte(i)}}
				}
			}
			if s.fill(c.msgs); s.n != c.want {
				t.Fatalf("%d messages, want %d", s.n, c.want)
			}
			for i, m := range c.msgs[:s.n] {
				h := &s.hdr[i].hdr
				iov := unsafe.Slice(h.Iov, h.Iovlen)
				if len(iov) != len(m.Bufs) {
					t.Fatalf("message %d has %d pieces, want %d", i, len(iov), len(m.Bufs))
				}
				for k, b := range m.Bufs {
					if iov[k].Base != &b[0] || int(iov[k].Len) != len(b) {
						t.Errorf("piece %d of message %d is another one", k, i)
					}
				}
				if (h.Control != nil) != (m.SegmentBytes != 0) || (h.Controllen == cmsgRoom) != (m.SegmentBytes != 0) || h.Control == nil && h.Controllen != 0 {
					t.Errorf("message %d has %d bytes of control", i, h.Controllen)
				}
				if got := int(binary.NativeEndian.Uint16(s.ctl[i][unix.SizeofCmsghdr:])); h.Control != nil && got != m.SegmentBytes {
					t.Errorf("message %d has segments of %d bytes, want %d", i, got, m.SegmentBytes)
				}
			}
		})
	}
}

// loopPort is the port of the wires of openLoop, and of no other run of the tests.
var loopPort = testenv.UDPPort()

// openLoop opens a wire on an address of the loopback interface.
func openLoop(t *testing.T, addr string, plain bool) *udpWire {
	t.Helper()
	w, err := openUDP(Config{
		Addr: netip.MustParseAddr(addr), Port: loopPort, NoSegmentation: plain, SocketBufferBytes: 1 << 16,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		w.in.release()
	})
	return w
}

// Datagrams and runs of them arrive whole and in order, from the port of their flow.
func TestUDPWire(t *testing.T) {
	for name, plain := range map[string]bool{"segments": false, "single": true} {
		t.Run(name, func(t *testing.T) {
			a, b := openLoop(t, "127.91.0.3", plain), openLoop(t, "127.91.0.4", plain)
			if plain && a.MaxSegments() != 1 {
				t.Errorf("%d segments of a wire without", a.MaxSegments())
			}
			to := netip.AddrPortFrom(netip.MustParseAddr("127.91.0.4"), loopPort)
			data := bytes.Repeat([]byte("0123456789"), 250)
			segment := 0
			if a.MaxSegments() > 1 {
				segment = 1000 // 1000, 1000, 500
			}
			for flow := range uint8(flows) {
				msgs := []Message{
					{Peer: to, Flow: flow, Bufs: [][]byte{data[:10], data[10:30]}},
					{Peer: to, Flow: flow, Bufs: [][]byte{data}, SegmentBytes: segment},
				}
				if n, err := a.Send(msgs); n != 2 || err != nil {
					t.Fatalf("%d sent, %v", n, err)
				}
			}
			var got [flows][]byte
			total, looks := 0, 0
			take := func(msgs []Message) {
				for _, m := range msgs {
					total += len(m.Data)
					for flow := range got {
						if m.Peer == netip.AddrPortFrom(netip.MustParseAddr("127.91.0.3"), a.SourcePort(uint8(flow))) {
							got[flow] = append(got[flow], m.Data...)
						}
					}
					if plain && m.SegmentBytes != 0 {
						t.Errorf("a run of %d bytes", m.SegmentBytes)
					}
				}
			}
			want := append(bytes.Clone(data[:30]), data...)
			idle := func() bool {
				if looks++; total >= flows*len(want) || looks > 10_000 {
					_ = b.in.conn.SetReadDeadline(time.Unix(1, 0))
					return false
				}
				return true
			}
			if err := b.Receive(take, idle); err == nil {
				t.Error("Receive ends without an error")
			}
			for flow := range got {
				if !bytes.Equal(got[flow], want) {
					t.Errorf("flow %d: %d bytes that differ, want %d", flow, len(got[flow]), len(want))
				}
			}
		})
	}
}

// A datagram is never cut into fragments: what does not fit is an error for its sender.
func TestUDPWire_noFragments(t *testing.T) {
	w := openLoop(t, "127.91.0.3", true)
	for i, o := range w.outs {
		var mode int
		var err error
		if cerr := o.raw.Control(func(fd uintptr) { mode, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		if mode != unix.IP_PMTUDISC_PROBE {
			t.Errorf("socket %d has mode %d", i, mode)
		}
		if o.port == 0 || o.port == loopPort || i > 0 && o.port == w.outs[0].port {
			t.Errorf("socket %d sends from port %d", i, o.port)
		}
	}
	msgs := []Message{
		{Peer: netip.MustParseAddrPort("127.91.0.3:9"), Bufs: [][]byte{{1}}},
		{Peer: netip.MustParseAddrPort("127.91.0.3:9"), Bufs: [][]byte{make([]byte, 1<<16)}},
	}
	if n, err := w.Send(msgs); n != 1 || !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("%d sent, %v", n, err)
	}
}

// The error of a bind says what it may be.
func TestUDPWire_portInUse(t *testing.T) {
	openLoop(t, "127.91.0.3", true)
	cfg := Config{Addr: netip.MustParseAddr("127.91.0.3"), Port: loopPort, SocketBufferBytes: 1 << 16}
	if w, err := openUDP(cfg); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("opened %v, %v", w, err)
	}
}

// Peers know the ports of sending sockets. What they send there is dropped, and takes no memory.
func TestUDPWire_sendersTakeNothing(t *testing.T) {
	cfg := Config{Addr: netip.MustParseAddr("127.93.0.1"), Port: 14795, SocketBufferBytes: 1 << 20}
	w, err := openUDP(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close() }()
	for f := range uint8(flows) {
		c, err := net.Dial("udp4", netip.AddrPortFrom(cfg.Addr, w.SourcePort(f)).String())
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			if _, err := c.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.Close()
		var queued int
		cerr := w.outs[f].raw.Control(func(fd uintptr) { queued, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
		if cerr != nil || err != nil || queued != 0 {
			t.Errorf("flow %d: %d bytes wait for nobody: %v, %v", f, queued, cerr, err)
		}
	}
}
