// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// sniffer records the frames of an interface.
type sniffer struct{ fd int }

// frame is a frame as an interface gets it: with a segment size it is a train
// of UDP segments for the interface to cut.
type frame struct {
	data    []byte
	segment int
}

// vnetHeaderBytes is the length of struct virtio_net_hdr, which precedes the
// frames and has the segment size at byte 4.
const vnetHeaderBytes = 10

func newSniffer(t *testing.T, ns, dev string) *sniffer {
	t.Helper()
	s := &sniffer{-1}
	inNS(t, ns, func() {
		all := int(binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL}))
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
		if err != nil {
			t.Errorf("open packet socket: %v", err)
			return
		}
		s.fd = fd
		req, err := unix.NewIfreq(dev)
		if err == nil {
			err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, req)
		}
		if err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: int(req.Uint32())})
		}
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1)
		}
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
		_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000})
		if err != nil {
			t.Errorf("bind packet socket: %v", err)
		}
	})
	t.Cleanup(func() { _ = unix.Close(s.fd) })
	return s
}

// frames returns what was recorded, until nothing comes any more.
func (s *sniffer) frames(t *testing.T) (all []frame) {
	t.Helper()
	buf := make([]byte, 1<<17)
	for {
		n, _, err := unix.Recvfrom(s.fd, buf, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return all
		case errors.Is(err, unix.EINTR):
		case err != nil:
			t.Fatalf("read frames: %v", err)
		default:
			all = append(all, frame{
				data:    bytes.Clone(buf[vnetHeaderBytes:n]),
				segment: int(binary.NativeEndian.Uint16(buf[4:])),
			})
		}
	}
}

// rocePacket is a RoCEv2 packet found in a frame.
type rocePacket struct {
	flow    rocev2.Addresses
	id      uint16
	df      bool
	payload []byte
}

func parseFrame(f []byte) (p rocePacket, ok bool) {
	if len(f) < 14+20 {
		return p, false
	}
	ip, udp := f[14:], []byte(nil)
	switch binary.BigEndian.Uint16(f[12:]) {
	case unix.ETH_P_IP:
		if ip[9] != unix.IPPROTO_UDP {
			return p, false
		}
		p.id, p.df = binary.BigEndian.Uint16(ip[4:]), ip[6] == 0x40
		p.flow.Src, p.flow.Dst = netip.AddrFrom4([4]byte(ip[12:])), netip.AddrFrom4([4]byte(ip[16:]))
		udp = ip[20:binary.BigEndian.Uint16(ip[2:])]
	case unix.ETH_P_IPV6:
		if len(ip) < 48 || ip[6] != unix.IPPROTO_UDP {
			return p, false
		}
		p.flow.Src, p.flow.Dst = netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
		udp = ip[40 : 40+binary.BigEndian.Uint16(ip[4:])]
	default:
		return p, false
	}
	p.flow.SrcPort, p.flow.DstPort = binary.BigEndian.Uint16(udp), binary.BigEndian.Uint16(udp[2:])
	p.payload = udp[8:]
	return p, p.flow.DstPort == rocev2.Port
}

// strictICRC is the check with the identification that the frame has, without
// the leniency that a receiver behind a socket needs.
func strictICRC(p rocePacket, id uint16, b []byte) bool {
	var pkt rocev2.Packet
	if pkt.Parse(b) != nil {
		return false
	}
	h := pkt.BTH.OpCode.HeaderLen()
	c := rocev2.NewICRC(p.flow)
	sum := c.Sum(id, b[:h], [][]byte{b[h : len(b)-rocev2.ICRCLen]}, 0)
	return sum == binary.LittleEndian.Uint32(b[len(b)-rocev2.ICRCLen:])
}

// traffic makes one of every kind of packet and a few losses' worth of NAKs.
func traffic(t *testing.T, x, y *rdmatest.End) {
	t.Helper()
	for i := range x.MR.Bytes() {
		x.MR.Bytes()[i] = byte(i)
	}
	for _, n := range []int{1, 44, 1023, 5000, 200_001} {
		y.Recv(t, 1, 300_000, n)
		y.Recv(t, 2, 0, 0)
		for i, op := range []rdma.Opcode{rdma.OpSend, rdma.OpWrite, rdma.OpWriteImm, rdma.OpRead} {
			w := x.Write(uint64(i), y, 3, n)
			w.Op, w.Imm = op, 77
			if op == rdma.OpSend {
				w.Flags |= rdma.SendSolicited
			}
			x.Send(t, w)
		}
		rdmatest.Await(t, x.SendCQ, 4)
		rdmatest.Await(t, y.RecvCQ, 2)
	}
	// An RNR NAK, and an access error at the end.
	x.Send(t, rdma.SendWR{ID: 9, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 10)}})
	for deadline := time.Now().Add(10 * time.Second); ; runtime.Gosched() {
		if s, _ := y.Dev.(*soft.Device).QPStats(y.QP.Num()); s.RNRSent > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no RNR NAK was sent")
		}
	}
	y.Recv(t, 1, 0, 10)
	rdmatest.AwaitOne(t, x.SendCQ, 9, rdma.StatusSuccess)
	w := x.Write(10, y, 0, 10)
	w.RKey ^= 1 << 20
	x.Send(t, w)
	rdmatest.AwaitOne(t, x.SendCQ, 10, rdma.StatusRemoteAccess)
}

// TestWire looks at the frames: the ICRC of every packet is right for the IP
// header it has, and tshark finds nothing malformed.
func TestWire(t *testing.T) {
	for _, c := range []struct {
		name      string
		v6        bool
		plain     bool // no UDP_SEGMENT
		noOffload bool // segments are cut before the interface
	}{
		{name: "IPv4 single packets", plain: true},
		{name: "IPv4 segments cut by the stack", noOffload: true},
		{name: "IPv4 segments left whole"},
		{name: "IPv6 single packets", v6: true, plain: true},
		{name: "IPv6 segments cut by the stack", v6: true, noOffload: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := newVethPair(t, 1500)
			if c.noOffload {
				testenv.Need(t, testenv.Program("ethtool"))
				for ns, dev := range map[string]string{v.a: "v0", v.b: "v1"} {
					ip(t, "netns", "exec", ns, "ethtool", "-K", dev, "tx-udp-segmentation", "off")
				}
			}
			at := [2]netip.Addr{v.a4, v.b4}
			if c.v6 {
				at = [2]netip.Addr{v.a6, v.b6}
			}
			a := active(t, v.a, soft.Config{Addr: at[0], NoSegmentation: c.plain})
			b := active(t, v.b, soft.Config{Addr: at[1], NoSegmentation: c.plain})
			s := newSniffer(t, v.b, "v1")
			x, y := rdmatest.Pair(t, a, b, rdmatest.Options{MinRNRTimer: 16})
			traffic(t, x, y)

			frames := s.frames(t)
			packets, trains, ids := 0, 0, make(map[uint16]int)
			var cut [][]byte // frames that hold one packet
			for _, f := range frames {
				p, ok := parseFrame(f.data)
				if !ok {
					continue
				}
				if !c.v6 && !p.df {
					t.Fatal("a packet without DF")
				}
				if f.segment == 0 {
					packets++
					ids[p.id]++
					cut = append(cut, f.data)
					if !strictICRC(p, p.id, p.payload) {
						t.Fatalf("packet %d with ID %d: wrong ICRC: % x", packets, p.id, p.payload[:12])
					}
					continue
				}
				if c.plain || c.noOffload {
					t.Fatalf("a train of %d bytes", len(p.payload))
				}
				trains++
				for i := uint16(0); len(p.payload) > 0; i++ {
					n := min(f.segment, len(p.payload))
					packets++
					if !strictICRC(p, p.id+i, p.payload[:n]) {
						t.Fatalf("segment %d of a train with ID %d: wrong ICRC", i, p.id)
					}
					p.payload = p.payload[n:]
				}
			}
			if packets < 500 {
				t.Errorf("only %d RoCE packets in %d frames", packets, len(frames))
			}
			if !c.plain && !c.noOffload && trains == 0 {
				t.Error("no trains of segments")
			}
			if c.plain && len(ids) != 1 {
				t.Errorf("identifications of single packets: %v, want only 0", ids)
			}
			if c.noOffload && !c.v6 && len(ids) < 20 {
				t.Errorf("identifications of segments: %v", ids)
			}
			if c.plain || c.noOffload {
				dissect(t, cut)
			}
			for _, d := range []*soft.Device{a, b} {
				if s := d.Stats(); s.RxBadICRC+s.RxMalformed+s.RxUnknownQP+s.RxWrongSource != 0 {
					t.Errorf("%s: %+v", d.Name(), s)
				}
			}
		})
	}
}

// TestDevice_ignoresRouteMTU: a router, or somebody who forged its message, says that packets are too large, for which
// the kernel keeps a smaller MTU with the route. Like an RNIC, a device goes by the interface.
func TestDevice_ignoresRouteMTU(t *testing.T) {
	v := newVethPair(t, 9000)
	ip(t, "-n", v.a, "route", "replace", "10.91.0.0/24", "dev", "v0", "mtu", "600")
	ip(t, "-n", v.a, "-6", "route", "add", v.b6.String(), "dev", "v0", "mtu", "1280")
	for name, at := range map[string][2]netip.Addr{"IPv4": {v.a4, v.b4}, "IPv6": {v.a6, v.b6}} {
		for sends, plain := range map[string]bool{"segments": false, "single packets": true} {
			t.Run(name+" "+sends, func(t *testing.T) {
				a := active(t, v.a, soft.Config{Addr: at[0], NoSegmentation: plain})
				b := active(t, v.b, soft.Config{Addr: at[1], NoSegmentation: plain})
				x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
				for i, n := range []int{4096, 300_000} {
					x.Send(t, x.Write(uint64(i), y, 0, n))
					rdmatest.AwaitOne(t, x.SendCQ, uint64(i), rdma.StatusSuccess)
				}
				if s := a.Stats(); s.TxErrors != 0 {
					t.Errorf("%+v", s)
				}
			})
		}
	}
}

// TestDevice_tellsTooLarge: somebody lowers the MTU of an interface, and full packets of queue pairs that are connected do
// not fit any more. The device says so.
func TestDevice_tellsTooLarge(t *testing.T) {
	v := newVethPair(t, 9000)
	for name, at := range map[string][2]netip.Addr{"IPv4": {v.a4, v.b4}, "IPv6": {v.a6, v.b6}} {
		for sends, n := range map[string]int{"segments": 300_000, "a packet": 4096} {
			t.Run(name+" "+sends, func(t *testing.T) {
				told := make(chan soft.TooLarge, 9)
				a := active(t, v.a, soft.Config{Addr: at[0], TooLarge: func(p soft.TooLarge) { told <- p }})
				b := active(t, v.b, soft.Config{Addr: at[1]})
				awaitMTU(t, a, rdma.MTU4096)
				x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
				x.Send(t, x.Write(1, y, 0, 44)) // the way is known: another error might be the first
				rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
				ip(t, "-n", v.a, "link", "set", "v0", "mtu", "1500")
				defer ip(t, "-n", v.a, "link", "set", "v0", "mtu", "9000")
				x.Send(t, x.Write(2, y, 0, n))
				select {
				case p := <-told:
					if p.Peer != at[1] || p.PacketBytes < 4096+12+rocev2.ICRCLen+28 || p.PacketBytes > 4200 {
						t.Errorf("%+v", p)
					}
				case <-time.After(10 * time.Second):
					t.Errorf("nothing was said, %+v", a.Stats())
				}
			})
		}
	}
}

// dissect has tshark look at frames.
func dissect(t *testing.T, frames [][]byte) {
	t.Helper()
	testenv.Need(t, testenv.Tshark)
	pcap := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	pcap = append(pcap, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0)
	for i, f := range frames {
		for _, v := range []int{0, i, len(f), len(f)} {
			pcap = binary.LittleEndian.AppendUint32(pcap, uint32(v))
		}
		pcap = append(pcap, f...)
	}
	file := filepath.Join(t.TempDir(), "soft.pcap")
	if err := os.WriteFile(file, pcap, 0o600); err != nil {
		t.Fatal(err)
	}
	// The payload is not what guesses at upper protocols take it for.
	out, err := exec.Command("tshark", "-n", "-r", file, "-T", "fields", "--disable-protocol", "rpcordma",
		"--disable-protocol", "smb_direct", "--disable-protocol", "iser", "--disable-protocol", "nvme-rdma", "-e", "frame.protocols",
		"-e", "infiniband.bth.opcode", "-e", "_ws.malformed", "-e", "_ws.expert.severity").Output()
	if err != nil {
		t.Fatalf("tshark: %v", err)
	}
	seen := make(map[string]int)
	lines := strings.Split(strings.TrimRight(string(out), "\n"), "\n")
	for i, l := range lines {
		f := strings.Split(l, "\t")
		const errorSeverity = "8388608"
		if len(f) != 4 || !strings.Contains(f[0], "infiniband") || f[2] != "" || strings.Contains(f[3], errorSeverity) {
			t.Fatalf("tshark on packet %d: %q", i+1, l)
		}
		seen[f[1]]++
	}
	if len(lines) != len(frames) {
		t.Errorf("tshark shows %d of %d packets", len(lines), len(frames))
	}
	for _, op := range []rocev2.OpCode{
		rocev2.SendFirst, rocev2.SendMiddle, rocev2.SendLast, rocev2.SendOnly, rocev2.WriteFirst, rocev2.WriteMiddle,
		rocev2.WriteOnly, rocev2.WriteLastImm, rocev2.WriteOnlyImm, rocev2.ReadRequest,
		rocev2.ReadRespFirst, rocev2.ReadRespMiddle, rocev2.ReadRespLast, rocev2.ReadRespOnly, rocev2.Acknowledge,
	} {
		if seen[fmt.Sprint(uint8(op))] == 0 {
			t.Errorf("no %v among the packets", op)
		}
	}
}

// TestDevice_takesPacketsWithoutUDPChecksum: over IPv6 too, where it is what NICs
// and rxe send and not what a socket takes without being asked.
func TestDevice_takesPacketsWithoutUDPChecksum(t *testing.T) {
	for _, c := range []struct {
		name             string
		addr             netip.Addr
		level, sendsNone int
	}{
		{"IPv4", loopA, unix.SOL_SOCKET, unix.SO_NO_CHECK},
		{"IPv6", netip.IPv6Loopback(), unix.SOL_UDP, unix.UDP_NO_CHECK6_TX},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := openUDP(t, soft.Config{Addr: c.addr, Port: testPort})
			conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.addr, testPort)))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			raw, err := conn.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var optErr error
			if err := raw.Control(func(fd uintptr) { optErr = unix.SetsockoptInt(int(fd), c.level, c.sendsNone, 1) }); err != nil || optErr != nil {
				t.Fatal(err, optErr)
			}
			if _, err := conn.Write([]byte("a packet of 20 bytes")); err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(10 * time.Second); d.Stats().RxPackets == 0; time.Sleep(time.Millisecond) { // polls the counter
				if time.Now().After(end) {
					t.Fatal("the packet did not arrive")
				}
			}
		})
	}
}
