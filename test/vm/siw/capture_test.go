// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// testCapture has tshark decode all that was on the wire. It understands no frame that is not
// where it is expected in the stream, as one that overtook another; so the frames are cut out
// of the streams first, and each is a packet of its own.
func (b *bed) testCapture(t *testing.T, file string) {
	w := newStreams()
	if err := w.read(file); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d connections, %d start-up frames, %d FPDUs", w.connections, w.starts, w.fpdus)
	for addrs, s := range w.all {
		for i, h := range s.halves {
			if n := len(h.rest); !s.other && (n > 0 || len(h.later) > 0) {
				t.Errorf("%d bytes of %v are no whole frame, and %d packets behind them were not looked at", n, addrs[i], len(h.later))
			}
		}
	}
	clean := filepath.Join(t.TempDir(), "frames.pcap")
	if err := os.WriteFile(clean, w.pcap, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := dissect(t, clean)
	if err != nil {
		t.Fatal(err)
	}
	if n := got["Request frame header"] + got["Reply frame header"]; n != w.starts {
		t.Errorf("tshark sees %d start-up frames, want %d", n, w.starts)
	}
	if n := got["FPDU"]; n != w.fpdus {
		t.Errorf("tshark sees %d FPDUs, want %d", n, w.fpdus)
	}
	if n := got["Malformed"]; n > 0 {
		t.Errorf("%d frames are malformed to tshark", n)
	}
	if n := got["Bad CRC32"]; n != b.badCRCs {
		t.Errorf("tshark finds %d bad CRCs, want the %d that were spoilt", n, b.badCRCs)
	}
	for _, want := range []string{"Write", "Read Request", "Read Response", "Send", "Terminate"} {
		if got["OpCode: "+want] == 0 {
			t.Errorf("there was no %s", want)
		}
	}
	if got["Good CRC32"] == 0 || got["Good CRC32"] == got["FPDU"] {
		t.Errorf("%d of %d FPDUs have a CRC, want some with and some without", got["Good CRC32"], got["FPDU"])
	}
	t.Logf("tshark: %v", got)
}

// guesses are the protocols that tshark takes a stream of TCP, or a message of RDMA, for by its
// looks, but for iWARP.
func guesses(t *testing.T) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "tshark", "-G", "heuristic-decodes").Output()
	if err != nil {
		t.Fatalf("ask tshark for its guesses: %v", err)
	}
	var names []string
	for line := range strings.Lines(string(out)) {
		f := strings.Split(line, "\t")
		if len(f) > 1 && (f[0] == "tcp" || f[0] == "iwarp_ddp_rdmap") && f[1] != "iwarp_mpa" {
			names = append(names, f[1])
		}
	}
	return names
}

// dissect counts what tshark says about frames. It may not guess that some are something else.
func dissect(t *testing.T, file string) (map[string]int, error) {
	t.Helper()
	args := []string{"-n", "-r", file, "-O", "iwarp_mpa,iwarp_ddp_rdmap"}
	for _, p := range guesses(t) {
		args = append(args, "--disable-protocol", p)
	}
	cmd := exec.CommandContext(t.Context(), "tshark", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	got := map[string]int{}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		for _, what := range []string{"Malformed", "Good CRC32", "Bad CRC32"} {
			if strings.Contains(line, what) {
				got[what]++
			}
		}
		switch _, opcode, found := strings.Cut(line, "OpCode: "); {
		case found:
			opcode, _, _ = strings.Cut(opcode, " (")
			got["OpCode: "+opcode]++
		case line == "FPDU", line == "Request frame header", line == "Reply frame header":
			got[line]++
		}
	}
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("tshark: %w: %s", err, stderr.String())
	}
	return got, nil
}

// streams are the connections of a capture, taken apart.
type streams struct {
	all  map[[2]netip.AddrPort]*tcpStream // by the addresses of who opened it and of the other
	pcap []byte                           // the frames, each in a packet

	connections, starts, fpdus int
}

// A tcpStream is a connection. What is not iWARP is passed over.
type tcpStream struct {
	number int
	first  uint32  // the number of its SYN
	halves [2]half // of who opened it, and of the other
	other  bool    // it is not iWARP
}

// A half is what one side sends.
type half struct {
	begun bool
	next  uint32            // the number of the first byte that was not seen
	later map[uint32][]byte // what came before its turn
	rest  []byte            // the beginning of a frame
	size  func([]byte) int
	sent  uint32 // in the packets that we write
}

func newStreams() *streams {
	w := &streams{all: map[[2]netip.AddrPort]*tcpStream{}}
	w.pcap = binary.LittleEndian.AppendUint32(nil, pcapMagic)
	w.pcap = append(w.pcap, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, rawIP, 0, 0, 0)
	return w
}

// Of the format of captures: its first bytes, the lengths of its headers, and link types.
const (
	pcapMagic            = 0xa1b2c3d4
	pcapHead, packetHead = 24, 16
	rawIP                = 101

	etherHead, ipHead, tcpHead = 14, 20, 20
	tcpSYN, tcpACK             = 2, 16
)

// read takes the packets of a capture.
func (w *streams) read(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	r := bufio.NewReader(f)
	head := make([]byte, pcapHead)
	if _, err := io.ReadFull(r, head); err != nil || binary.LittleEndian.Uint32(head) != pcapMagic {
		return fmt.Errorf("%s does not begin as a capture: %x, %w", file, head, err)
	}
	for {
		if _, err := io.ReadFull(r, head[:packetHead]); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		packet := make([]byte, binary.LittleEndian.Uint32(head[8:]))
		if _, err := io.ReadFull(r, packet); err != nil {
			return err
		}
		w.packet(packet)
	}
}

// packet takes a packet of TCP over IPv4, and passes over others.
func (w *streams) packet(b []byte) {
	if len(b) < etherHead+ipHead+tcpHead || b[12] != 8 || b[13] != 0 || b[etherHead]>>4 != 4 || b[etherHead+9] != 6 {
		return
	}
	ip := b[etherHead:]
	ip = ip[:binary.BigEndian.Uint16(ip[2:])] // without what fills a short frame
	tcp := ip[int(ip[0]&15)*4:]
	addr := func(ip, port []byte) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip)), binary.BigEndian.Uint16(port))
	}
	from, to := addr(ip[12:16], tcp[:2]), addr(ip[16:20], tcp[2:4])
	seq, flags, payload := binary.BigEndian.Uint32(tcp[4:]), tcp[13], tcp[int(tcp[12]>>4)*4:]
	if old := w.all[[2]netip.AddrPort{from, to}]; flags&(tcpSYN|tcpACK) == tcpSYN && (old == nil || old.first != seq) {
		w.all[[2]netip.AddrPort{from, to}] = &tcpStream{number: w.connections, first: seq}
		w.connections++
	}
	s, side := w.all[[2]netip.AddrPort{from, to}], 0
	if s == nil {
		s, side = w.all[[2]netip.AddrPort{to, from}], 1
	}
	if s == nil { // it began before the capture
		return
	}
	h := &s.halves[side]
	if flags&tcpSYN != 0 && !h.begun {
		*h = half{begun: true, next: seq + 1, later: map[uint32][]byte{}, size: startSize}
	}
	if h.begun {
		h.add(seq, payload)
	}
	for n := 1; n > 0 && !s.other; {
		n = w.cut(s, side)
	}
}

// add puts bytes of a half in order.
func (h *half) add(seq uint32, payload []byte) {
	if len(payload) == 0 {
		return
	}
	if old := h.later[seq]; len(old) < len(payload) {
		h.later[seq] = payload
	}
	for found := true; found; {
		found = false
		for at, p := range h.later {
			behind := int(int32(h.next - at)) // of p
			if behind < 0 {
				continue
			}
			delete(h.later, at)
			if behind < len(p) {
				h.rest = append(h.rest, p[behind:]...)
				h.next += uint32(len(p) - behind)
				found = true
			}
		}
	}
}

// cut writes the next frame of a half, if it is whole, and returns its size.
func (w *streams) cut(s *tcpStream, side int) int {
	h := &s.halves[side]
	if h.size == nil { // what it belongs to began before
		return 0
	}
	if h.sent == 0 && len(h.rest) >= keyBytes {
		if key := string(h.rest[:keyBytes]); key != requestKey && key != replyKey {
			s.other = true
			return 0
		}
	}
	n := h.size(h.rest)
	if n == 0 {
		return 0
	}
	frame := h.rest[:n]
	if h.sent == 0 {
		w.starts++
		h.size = fpduSize
	} else {
		w.fpdus++
	}
	w.put(s.number, side, h.sent, s.halves[1-side].sent, frame)
	h.sent += uint32(n)
	h.rest = slices.Clone(h.rest[n:])
	return n
}

// put writes a packet.
func (w *streams) put(stream, side int, seq, ack uint32, payload []byte) {
	ports := [2]uint16{uint16(10_000 + stream), 4000}
	length := ipHead + tcpHead + len(payload)
	for _, v := range []int{0, 0, length, length} {
		w.pcap = binary.LittleEndian.AppendUint32(w.pcap, uint32(v))
	}
	w.pcap = append(w.pcap, 0x45, 0)
	w.pcap = binary.BigEndian.AppendUint16(w.pcap, uint16(length))
	w.pcap = append(w.pcap, 0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, byte(1+side), 192, 0, 2, byte(2-side))
	w.pcap = binary.BigEndian.AppendUint16(w.pcap, ports[side])
	w.pcap = binary.BigEndian.AppendUint16(w.pcap, ports[1-side])
	w.pcap = binary.BigEndian.AppendUint32(w.pcap, 1+seq)
	w.pcap = binary.BigEndian.AppendUint32(w.pcap, 1+ack)
	w.pcap = append(w.pcap, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0)
	w.pcap = append(w.pcap, payload...)
}
