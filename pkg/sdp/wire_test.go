// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// wirePort is the UDP port of the devices whose packets are looked at.
var wirePort = testenv.UDPPort()

// loopbackSniffer records what the loopback interface carries.
type loopbackSniffer struct{ fd int }

func newLoopbackSniffer(t *testing.T) *loopbackSniffer {
	t.Helper()
	all := int(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP)))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: 1}); err != nil {
		t.Fatal(err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 200_000}); err != nil {
		t.Fatal(err)
	}
	return &loopbackSniffer{fd}
}

// frames returns the frames to a UDP port that were recorded, until nothing comes any more. Loopback has each twice.
func (s *loopbackSniffer) frames(t *testing.T, port uint16) (all [][]byte) {
	t.Helper()
	for b := make([]byte, 1<<16); ; {
		n, from, err := unix.Recvfrom(s.fd, b, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return all
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			t.Fatal(err)
		}
		const udpAt = 34
		if ll, ok := from.(*unix.SockaddrLinklayer); !ok || ll.Pkttype == unix.PACKET_OUTGOING || n < udpAt+8 || b[ipAt+9] != unix.IPPROTO_UDP {
			continue
		}
		if binary.BigEndian.Uint16(b[udpAt+2:]) == port {
			all = append(all, bytes.Clone(b[:n]))
		}
	}
}

// What frames of IPv4 over UDP have in front of a packet of RoCE, and that of its headers.
const (
	beforeBTH = 42
	bthLen    = 12
	ipAt      = 14
)

// sentMessage returns the message in a frame, if there is one.
func sentMessage(f []byte) ([]byte, bool) {
	bth := f[beforeBTH:]
	at := bthLen
	switch rocev2.OpCode(bth[0]) {
	case rocev2.SendOnly:
	case rocev2.SendOnlyInv:
		at += 4
	default:
		return nil, false
	}
	return bth[at : len(bth)-rocev2.ICRCLen-int(bth[1]>>4&3)], true
}

// In the IBTA layout tshark's dissector of InfiniBand's SDP reads the messages that run over RoCE: each field of the header that
// all of them have says what we say it does. It has to be told that they are SDP, since our profile has none of the messages by
// which InfiniBand makes connections and from which it would learn that.
func TestWire_tshark(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.Tshark)
	open := func(tb testing.TB, addr string) rdma.Device {
		tb.Helper()
		d, err := soft.Open(soft.Config{Name: "wire-" + addr, Addr: netip.MustParseAddr(addr), Port: wirePort, MTU: rdma.MTU4096, NoSegmentation: true})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() {
			if err := d.Close(); err != nil {
				tb.Error(err)
			}
		})
		return d
	}
	p := newPair(t, open, func(c *sdp.Config) {
		c.Layout, c.RecvBuffers, c.RecvBufferSize, c.MaxRecvBufferSize, c.ZcopySize = bsdh.LayoutIBTA, 6, 2000, 3000, 4000
	})
	s := newLoopbackSniffer(t)
	talk(t, p)
	frames := s.frames(t, wirePort)
	var sent [][]byte // those with a message
	for _, f := range frames {
		if _, ok := sentMessage(f); ok {
			sent = append(sent, f)
		}
	}
	shown := dissectSDP(t, sent)
	if len(shown) != len(sent) {
		t.Fatalf("tshark shows %d of %d messages", len(shown), len(sent))
	}
	kinds := map[bsdh.MID]int{}
	for i, f := range sent {
		b, _ := sentMessage(f)
		m, err := bsdh.Parse(b, bsdh.LayoutIBTA)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		kinds[m.MID]++
		want := fmt.Sprintf("0x%02x\t0x%02x\t%d\t%d\t0x%08x\t0x%08x\t", uint8(m.MID), uint8(m.Flags), m.Bufs, len(b), m.Seq, m.Ack)
		fields, malformed, _ := strings.Cut(shown[i], "[")
		// tshark 4.0 misses the payload in a Data that has none, which the draft and IBTA allow.
		if empty := m.MID == bsdh.Data && len(m.Payload) == 0; fields != want || malformed != "" && !empty {
			t.Errorf("%v: tshark shows %q, want %q", m.MID, shown[i], want)
		}
	}
	for _, k := range []bsdh.MID{
		bsdh.HelloAck, bsdh.Data, bsdh.SrcAvail, bsdh.SinkAvail, bsdh.RdmaRdCompl, bsdh.RdmaWrCompl, bsdh.SendSm, bsdh.ModeChange, bsdh.ChRcvBuf,
		bsdh.ChRcvBufAck, bsdh.DisConn,
	} {
		if kinds[k] == 0 {
			t.Errorf("no %v among the messages: %v", k, kinds)
		}
	}
}

// talk has two peers use each kind of message that programs lead to.
func talk(t *testing.T, p *pair) {
	t.Helper()
	const size = 16 << 10
	a, b := p.dial(t)
	out, in := newBuffer(t, p.client, size), newBuffer(t, p.server, size)
	must := func(_ int, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(0, a.ResizePeer(3000))
	must(a.WriteUrgent([]byte("hello!")))
	must(io.ReadFull(b, make([]byte, 5)))
	moves := func(read func() (int, error)) {
		t.Helper()
		x, err := a.StartWrite(out, 0, size)
		must(0, err)
		must(read())
		must(x.Wait())
	}
	direct := func() (int, error) { return b.ReadBuffer(in, 0, size, true) }
	for range 3 {
		moves(direct) // SrcAvail, RdmaRdCompl; and Pipelined mode
	}
	x, err := b.StartRead(in, 0, size, false) // SinkAvail, RdmaWrCompl
	must(0, err)
	must(b.Write([]byte{1})) // behind it
	must(io.ReadFull(a, make([]byte, 1)))
	must(a.WriteBuffer(out, 0, size))
	must(x.Wait())
	moves(func() (int, error) { return io.ReadFull(b, make([]byte, size)) }) // SendSm, and Data
	must(0, errors.Join(a.CloseWrite(), b.CloseWrite()))
	must(0, errors.Join(a.Close(), b.Close()))
}

// dissectSDP has tshark look at frames, and returns what it says of each.
func dissectSDP(t *testing.T, frames [][]byte) []string {
	t.Helper()
	pcap := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	pcap = append(pcap, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0)
	for i, f := range frames {
		for _, v := range []int{0, i, len(f), len(f)} {
			pcap = binary.LittleEndian.AppendUint32(pcap, uint32(v))
		}
		pcap = append(pcap, f...)
	}
	file := filepath.Join(t.TempDir(), "sdp.pcap")
	if err := os.WriteFile(file, pcap, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{
		"-n", "-r", file, "-d", fmt.Sprintf("udp.port==%d,infiniband", wirePort), "-d", "infiniband,infiniband_sdp",
		"-o", "infiniband.try_heuristic_first:FALSE", "-T", "fields",
	}
	for _, field := range []string{"mid", "flags", "bufs", "len", "mseq", "mseqack"} {
		args = append(args, "-e", "infiniband_sdp.bsdh."+field)
	}
	out, err := exec.Command("tshark", append(args, "-e", "_ws.malformed")...).Output()
	if err != nil {
		t.Fatalf("tshark: %v", err)
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
}
