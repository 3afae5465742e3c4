// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
)

// What two programs of perftest 4.5 say to each other with -R: over a first connection, by
// SENDs in turns of equal length, the client first. Between two of them there is a second
// connection, for what is measured.
const (
	versionBytes = 16 // of the text
	keysBytes    = 56
	resultBytes  = 8
	results      = 5 // the client's
)

// A measurement is a run of a program.
type measurement struct {
	program string
	op      rdma.Opcode
	size    int
	reads   int // under way; 0: the program does not read
	n       int
	crc     bool
}

func (m *measurement) command() []string {
	c := []string{m.program, "-d", "siw0", "-R", "-F", "-n", strconv.Itoa(m.n), "-s", strconv.Itoa(m.size)}
	if m.reads > 0 {
		c = append(c, "-o", strconv.Itoa(m.reads))
	}
	return c
}

// testPerftest plays the other ends of perftest's programs.
func (b *bed) testPerftest(t *testing.T) {
	const n = 5 // the least that all take
	for _, m := range []measurement{
		{"ib_send_bw", rdma.OpSend, 1, 0, n, true},
		{"ib_send_bw", rdma.OpSend, 1 << 20, 0, n, false},
		{"ib_write_bw", rdma.OpWrite, 1 << 20, 0, n, true},
		{"ib_write_bw", rdma.OpWrite, 64 << 10, 0, n, false},
		{"ib_read_bw", rdma.OpRead, 100_001, 16, 3 * 16, false},
		{"ib_read_bw", rdma.OpRead, 1 << 20, 4, n, true},
	} {
		t.Run(fmt.Sprintf("%s/%d", m.program, m.size), func(t *testing.T) {
			o := softiwarp.ConnectOptions{NoCRC: !m.crc, ReadsServed: m.reads, ReadsAsked: m.reads}
			if m.reads == 0 {
				o.ReadsServed = 1
			}
			t.Run("server", func(t *testing.T) { b.measured(t, &m, o) })
			t.Run("client", func(t *testing.T) { b.measure(t, &m, o) })
		})
	}
}

// newData makes the peer for what is measured.
func (b *bed) newData(t *testing.T, m *measurement) *peer {
	t.Helper()
	if m.op != rdma.OpSend {
		return b.newPeer(t, 1, 16)
	}
	p := &peer{End: rdmatest.NewEnd(t, b.dev, rdmatest.Options{MRBytes: regionBytes}), bytes: m.size}
	p.Init(t)
	for i := range m.n { // which all go to one place
		p.Recv(t, uint64(i), 0, m.size)
	}
	return p
}

// measured is the server of a program.
func (b *bed) measured(t *testing.T, m *measurement, o softiwarp.ConnectOptions) {
	l := b.listen(t)
	client := b.start(t, append(m.command(), "-p", portOf(l), b.host.Addr().String())...)
	talk, data := b.newPeer(t, 2, keysBytes), b.newData(t, m)
	accept(t, l, talk, o)
	own := data.keys(m)
	turns := 4 // version, two sizes of memory, MTU
	if m.op == rdma.OpSend {
		turns += 2 + 4 + 1
	} else {
		turns += 2 + 3 + 1 + results + 1
	}
	for i := range turns {
		in := talk.receive(t)
		switch {
		case len(in) == keysBytes:
			talk.send(t, own)
		default:
			talk.send(t, in)
		}
		if i == 4 { // the first keys say that the second connection comes
			accept(t, l, data, o)
		}
		if m.op == rdma.OpSend && i == turns-2 { // all have receives
			for _, w := range rdmatest.Await(t, data.RecvCQ, m.n) {
				if w.Status != rdma.StatusSuccess || int(w.Bytes) != m.size {
					t.Errorf("a receive ends with %v, %d bytes; want %d", w.Status, w.Bytes, m.size)
				}
			}
		}
	}
	out := client.done(t)
	if !regexp.MustCompile(fmt.Sprintf(`(?m)^ *%d +%d +\d`, m.size, m.n)).MatchString(out) {
		t.Errorf("the client did not measure %d messages of %d bytes:\n%s", m.n, m.size, out)
	}
}

// keys is what a program tells of its memory.
func (p *peer) keys(m *measurement) []byte {
	b := make([]byte, keysBytes)
	binary.BigEndian.PutUint32(b[4:], uint32(m.reads))
	binary.BigEndian.PutUint32(b[8:], uint32(p.QP.Num()))
	binary.BigEndian.PutUint32(b[16:], uint32(p.MR.RKey()))
	binary.BigEndian.PutUint64(b[24:], p.MR.Addr()+bulk/2)
	return b
}

// measure is the client of a program.
func (b *bed) measure(t *testing.T, m *measurement, o softiwarp.ConnectOptions) {
	server, at := b.serve(t, m.command()...)
	talk, data := b.newPeer(t, 2, keysBytes), b.newPeer(t, 1, 16)
	b.dial(t, talk, at, o)
	turn := func(out []byte) []byte {
		t.Helper()
		talk.send(t, out)
		in := talk.receive(t)
		if len(in) != len(out) {
			t.Fatalf("%d bytes for %d", len(in), len(out))
		}
		return in
	}
	version := make([]byte, versionBytes)
	copy(version, "6.06")
	turn(version)
	turn(binary.BigEndian.AppendUint32(nil, 4096)) // its small messages walk through these
	turn(binary.BigEndian.AppendUint32(nil, 64))   // a cache line
	turn([]byte{'5', 0})                           // the code of the path MTU
	own := data.keys(m)
	turn(own)
	b.dialSoon(t, data, at, o)
	turn(own)
	theirs := turn(own)
	memory := remote{binary.BigEndian.Uint64(theirs[24:]), rdma.RKey(binary.BigEndian.Uint32(theirs[16:]))}
	more := 2
	if m.op == rdma.OpSend {
		more = 3
	}
	for range more {
		turn(own)
	}
	for i := range m.n {
		data.Send(t, rdma.SendWR{
			ID: uint64(i), Op: m.op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{data.SGE(bulk/2, m.size)}, RemoteAddr: memory.addr, RKey: memory.key,
		})
	}
	for i := range m.n {
		rdmatest.AwaitOne(t, data.SendCQ, uint64(i), rdma.StatusSuccess)
	}
	if m.op != rdma.OpSend {
		turn(own)
		for i := range results {
			v := [results]int{m.size, m.n}[i]
			turn(binary.BigEndian.AppendUint64(nil, uint64(v)))
		}
	}
	turn(own)
	talk.disconnected(t) // it goes first: siw has its last SEND fail if we do
	server.done(t)
}

// dialSoon dials a server that is about to listen.
func (b *bed) dialSoon(t *testing.T, p *peer, at netip.AddrPort, o softiwarp.ConnectOptions) {
	t.Helper()
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) { // polls whether it listens
		err := b.tryDial(t, p, at, o)
		var e *softiwarp.ConnectError
		switch {
		case err == nil:
			return
		case !errors.As(err, &e) || e.Reason != softiwarp.Refused || time.Since(began) > caseTimeout:
			t.Fatal(err)
		}
	}
}
