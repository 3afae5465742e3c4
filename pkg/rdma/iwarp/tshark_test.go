// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// TestWire_tshark has another implementation look at what both sides send: start-up, every
// message and a Terminate.
func TestWire_tshark(t *testing.T) {
	testenv.Need(t, testenv.Tshark)
	var w wireFile
	p := newTwoSides(t)
	p.b.recv(rdma.RecvWR{ID: 1, SGE: p.b.mr.sge(0, 4000)}, rdma.RecvWR{ID: 2, SGE: p.b.mr.sge(0, 100)})
	for i, s := range []*side{p.b, p.a} {
		if err := s.q.Start(p.now, Startup{Role: Role(1 - i), PeerToPeer: s == p.a, PrivateData: []byte("some private data")[:17*i]}); err != nil {
			t.Fatal(err)
		}
	}
	runUntilQuiet := func() {
		for moved := true; moved; {
			moved = false
			for _, d := range [][2]*side{{p.a, p.b}, {p.b, p.a}} {
				d[0].transmit(p.now, 1<<20)
				if len(d[0].sent) > 0 {
					moved = true
					w.segment(d[0] == p.a, d[0].sent)
					_ = d[1].feed(p.now, d[0].sent) // a Terminate is an error
					d[0].sent = d[0].sent[:0]
				}
			}
		}
	}
	runUntilQuiet()
	if err := p.b.q.Reply(p.now, Reply{PrivateData: []byte("hello")}); err != nil {
		t.Fatal(err)
	}
	runUntilQuiet()
	key := p.b.mem.add(64, allAccess).rkey
	p.a.send(
		p.now,
		rdma.SendWR{Op: rdma.OpWrite, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 3001)}},
		rdma.SendWR{Op: rdma.OpRead, RKey: p.b.mr.rkey, RemoteAddr: p.b.mr.addr, SGL: []rdma.SGE{p.a.mr.sge(0, 2003)}},
		rdma.SendWR{Flags: rdma.SendSolicited, SGL: []rdma.SGE{p.a.mr.sge(0, 2002)}},
		rdma.SendWR{Flags: rdma.SendInvalidate, InvKey: key, SGL: []rdma.SGE{p.a.mr.sge(0, 7)}},
	)
	runUntilQuiet()
	p.a.send(p.now, rdma.SendWR{Op: rdma.OpRead, RKey: key, SGL: []rdma.SGE{p.a.mr.sge(0, 1)}})
	runUntilQuiet()

	out := w.dissect(t)
	for _, want := range []string{
		"Request frame header", "Reply frame header", "OpCode: Write", "OpCode: Read Request", "OpCode: Read Response", "OpCode: Send with SE", "OpCode: Send with Invalidate", "OpCode: Terminate", "Invalid STag",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in what tshark says", want)
		}
	}
	if good, fpdus := strings.Count(out, "Good CRC32"), int(p.a.q.Stats().TxFPDUs+p.b.q.Stats().TxFPDUs)-2; good != fpdus {
		t.Errorf("tshark finds %d good CRCs in %d FPDUs", good, fpdus)
	}
	if strings.Contains(out, "Malformed") || strings.Contains(out, "Bad CRC") {
		t.Errorf("tshark finds something malformed:\n%s", out)
	}
}

// wireFile is a capture of one TCP connection.
type wireFile struct {
	pcap []byte
	seq  [2]uint32
	n    int
}

// segment adds a TCP segment. FPDUs of ours are whole in what one write takes.
func (w *wireFile) segment(fromA bool, payload []byte) {
	if w.pcap == nil {
		w.pcap = binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
		w.pcap = append(w.pcap, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 101, 0, 0, 0) // raw IP
	}
	from, to := 0, 1
	if !fromA {
		from, to = 1, 0
	}
	ports := [2]uint16{40000, 4000}
	ip := []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, byte(1 + from), 192, 0, 2, byte(1 + to)}
	binary.BigEndian.PutUint16(ip[2:], uint16(40+len(payload)))
	tcp := binary.BigEndian.AppendUint16(nil, ports[from])
	tcp = binary.BigEndian.AppendUint16(tcp, ports[to])
	tcp = binary.BigEndian.AppendUint32(tcp, 1+w.seq[from])
	tcp = binary.BigEndian.AppendUint32(tcp, 1+w.seq[to])
	tcp = append(tcp, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0)
	w.seq[from] += uint32(len(payload))
	for _, v := range []int{0, w.n, 40 + len(payload), 40 + len(payload)} {
		w.pcap = binary.LittleEndian.AppendUint32(w.pcap, uint32(v))
	}
	w.n++
	w.pcap = append(append(append(w.pcap, ip...), tcp...), payload...)
}

func (w *wireFile) dissect(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "iwarp.pcap")
	if err := os.WriteFile(file, w.pcap, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("tshark", "-n", "-V", "-r", file, "--disable-protocol", "rpcordma").Output()
	if err != nil {
		t.Fatalf("tshark: %v", err)
	}
	return string(out)
}
