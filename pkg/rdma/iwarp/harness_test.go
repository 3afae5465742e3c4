// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

const (
	allAccess = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead
	guardLen  = 64
)

// region is a registered region of a testMemory. Guard bytes stand before and behind the
// part that is registered.
type region struct {
	addr   uint64
	buf    []byte
	lkey   rdma.LKey
	rkey   rdma.RKey
	access rdma.Access
	dead   bool // rkey
	gone   bool
	all    []byte
}

func (r *region) sge(off, n int) rdma.SGE {
	return rdma.SGE{Addr: r.addr + uint64(off), Length: uint32(n), LKey: r.lkey}
}

func (r *region) at(addr uint64, n uint32) ([]byte, bool) {
	if addr < r.addr || addr-r.addr > uint64(len(r.buf)) || uint64(n) > uint64(len(r.buf))-(addr-r.addr) {
		return nil, false
	}
	o := addr - r.addr
	return r.buf[o : o+uint64(n) : o+uint64(n)], true
}

func (r *region) guards() [2][]byte {
	return [2][]byte{r.all[:guardLen], r.all[len(r.all)-guardLen:]}
}

// testMemory is a table of regions.
type testMemory struct{ regions []*region }

func (m *testMemory) add(n int, acc rdma.Access) *region {
	k := uint32(len(m.regions) + 1)
	r := &region{addr: uint64(k) << 40, lkey: rdma.LKey(k), rkey: rdma.RKey(k<<8 | 7), access: acc, all: make([]byte, n+2*guardLen)}
	for _, guard := range r.guards() {
		copy(guard, bytes.Repeat([]byte{0xee}, guardLen))
	}
	r.buf = r.all[guardLen : guardLen+n : guardLen+n]
	m.regions = append(m.regions, r)
	return r
}

// intact fails if a byte outside the registered part was written.
func (m *testMemory) intact(tb testing.TB) {
	tb.Helper()
	for _, r := range m.regions {
		for i, guard := range r.guards() {
			if !bytes.Equal(guard, bytes.Repeat([]byte{0xee}, guardLen)) {
				tb.Fatalf("region %v written %s its bounds: %x", r.lkey, [2]string{"before", "behind"}[i], guard)
			}
		}
	}
}

func (m *testMemory) Local(s rdma.SGE, write bool) ([]byte, rdma.Status) {
	for _, r := range m.regions {
		if r.lkey == s.LKey && !r.gone && (!write || r.access&rdma.LocalWrite != 0) {
			if b, ok := r.at(s.Addr, s.Length); ok {
				return b, rdma.StatusSuccess
			}
		}
	}
	return nil, rdma.StatusLocalProtect
}

func (m *testMemory) Remote(k rdma.RKey, addr uint64, n uint32, acc rdma.Access) ([]byte, rdma.Status) {
	for _, r := range m.regions {
		if r.rkey != k || r.gone || r.dead {
			continue
		}
		if r.access&acc != acc {
			return nil, rdma.StatusRemoteAccess
		}
		if b, ok := r.at(addr, n); ok {
			return b, rdma.StatusSuccess
		}
		return nil, rdma.StatusRemoteOp
	}
	return nil, rdma.StatusRemoteInvalid
}

func (m *testMemory) Invalidate(k rdma.RKey) bool {
	for _, r := range m.regions {
		if r.rkey == k && !r.gone && !r.dead {
			r.dead = true
			return true
		}
	}
	return false
}

// side is one queue pair, its memory and what it was told.
type side struct {
	tb   testing.TB
	name string
	q    *QP
	mem  *testMemory
	mr   *region // all rights
	wcs  []wq.Completion
	sent []byte // what TCP took and the other side did not read
	cut  bool   // half closed
	bufs [][]byte
	got  [4]wq.Completion
}

const testRegion = 1 << 20

func newSide(tb testing.TB, name string, edit func(*QPConfig)) *side {
	tb.Helper()
	return newSideOf(tb, name, testRegion, edit)
}

// newSideOf is newSide with a region of a size.
func newSideOf(tb testing.TB, name string, size int, edit func(*QPConfig)) *side {
	tb.Helper()
	s := &side{tb: tb, name: name, mem: &testMemory{}}
	s.mr = s.mem.add(size, allAccess)
	c := QPConfig{
		Num: 0x11, MaxSendWR: 32, MaxRecvWR: 32, MaxSGE: 3, MaxInline: 64, Memory: s.mem,
		Rand: rand.New(rand.NewPCG(1, uint64(len(name)))),
	}
	if edit != nil {
		edit(&c)
	}
	q, err := NewQP(c)
	if err != nil {
		tb.Fatal(err)
	}
	s.q = q
	if err := q.Modify(time.Time{}, rdma.QPAttr{State: rdma.QPInit, Access: allAccess}); err != nil {
		tb.Fatal(err)
	}
	return s
}

// feed gives b to the queue pair, as much as its buffers take at a time.
func (s *side) feed(now time.Time, b []byte) error {
	s.tb.Helper()
	for len(b) > 0 {
		n, bufs := 0, s.q.RxBuffers(s.bufs[:0])
		s.bufs = bufs
		for _, p := range bufs {
			k := copy(p, b)
			b = b[k:]
			n += k
		}
		if n == 0 {
			s.tb.Fatalf("%s: no room for %d bytes in %v", s.name, len(b), s.q.Phase())
		}
		if err := s.q.HandleRx(now, n); err != nil {
			return err
		}
	}
	return nil
}

// transmit takes at most limit bytes to be sent.
func (s *side) transmit(now time.Time, limit int) int {
	n := 0
	bufs := s.q.TxBuffers(now, s.bufs[:0])
	s.bufs = bufs
	for _, p := range bufs {
		k := min(len(p), limit-n)
		s.sent = append(s.sent, p[:k]...)
		n += k
	}
	s.q.HandleTx(now, n)
	s.poll()
	return n
}

func (s *side) poll() {
	for {
		n := s.q.PollWC(s.got[:])
		s.wcs = append(s.wcs, s.got[:n]...)
		if n < len(s.got) {
			return
		}
	}
}

func (s *side) send(now time.Time, wrs ...rdma.SendWR) {
	s.tb.Helper()
	if n, err := s.q.PostSend(now, wrs); err != nil || n != len(wrs) {
		s.tb.Fatalf("%s: PostSend = %d, %v", s.name, n, err)
	}
}

func (s *side) recv(wrs ...rdma.RecvWR) {
	s.tb.Helper()
	if n, err := s.q.PostRecv(wrs); err != nil || n != len(wrs) {
		s.tb.Fatalf("%s: PostRecv = %d, %v", s.name, n, err)
	}
}

// takeWCs returns the completions so far, one a line.
func (s *side) takeWCs() string {
	s.poll()
	var b strings.Builder
	for _, c := range s.wcs {
		fmt.Fprintf(&b, "%d %v %v", c.WC.ID, c.WC.Op, c.WC.Status)
		if c.WC.Status == rdma.StatusSuccess {
			fmt.Fprintf(&b, " %d", c.WC.Bytes)
		}
		if c.WC.Solicit {
			b.WriteString(" SE")
		}
		if c.WC.Invalidated {
			fmt.Fprintf(&b, " invalidated %#x", uint32(c.WC.InvKey))
		}
		b.WriteByte('\n')
	}
	s.wcs = s.wcs[:0]
	return b.String()
}

// twoSides are two machines back to back.
type twoSides struct {
	tb   testing.TB
	now  time.Time
	a, b *side // initiator, responder
}

func newTwoSides(tb testing.TB) *twoSides {
	return &twoSides{tb: tb, now: time.Unix(1000, 0), a: newSide(tb, "a", nil), b: newSide(tb, "bb", nil)}
}

// pass moves up to 1 MiB from one side to the other, and the end of its stream, and reports whether there was anything.
func (p *twoSides) pass(from, to *side) bool {
	n := from.transmit(p.now, 1<<20)
	b := from.sent
	from.sent = from.sent[:0]
	if len(b) > 0 {
		_ = to.feed(p.now, b) // the state tells
	}
	to.poll()
	if from.q.TxEnded() && !from.cut {
		from.cut = true
		to.q.HandleEnd(p.now, nil)
		to.poll()
		n++
	}
	return n > 0
}

// runUntilQuiet runs both until nothing moves.
func (p *twoSides) runUntilQuiet() {
	p.tb.Helper()
	for range 100_000 {
		x := p.pass(p.a, p.b)
		y := p.pass(p.b, p.a)
		if !x && !y {
			return
		}
	}
	p.tb.Fatal("both sides never come to rest")
}

// connect runs start-up.
func (p *twoSides) connect(ask, answer Startup) {
	p.tb.Helper()
	answer.Role = Responder
	for _, s := range []struct {
		*side
		Startup
	}{{p.b, answer}, {p.a, ask}} {
		if err := s.q.Start(p.now, s.Startup); err != nil {
			p.tb.Fatal(err)
		}
	}
	p.runUntilQuiet()
	if err := p.b.q.Reply(p.now, Reply{}); err != nil {
		p.tb.Fatal(err)
	}
	p.runUntilQuiet()
	if p.a.q.State() != rdma.QPRTS || p.b.q.State() != rdma.QPRTS {
		p.tb.Fatalf("%v %v and %v %v", p.a.q.State(), p.a.q.Err(), p.b.q.State(), p.b.q.Err())
	}
}

func wantWCs(tb testing.TB, s *side, want ...string) {
	tb.Helper()
	got := strings.TrimSuffix(s.takeWCs(), "\n")
	if got != strings.Join(want, "\n") {
		tb.Fatalf("%s completed\n%s\nwant\n%s", s.name, got, strings.Join(want, "\n"))
	}
}

// wantEnd checks that the queue pair failed, with the Terminate of a code.
func wantEnd(tb testing.TB, s *side, code Code, sent bool) {
	tb.Helper()
	ev, ok := s.q.PollEvent()
	var te *TerminateError
	if !ok || ev.Kind != rdma.EventQPFatal || !errors.As(ev.Err, &te) || te.Terminate.Code != code || te.Sent != sent {
		tb.Fatalf("%s in %v: event %v %v, want Terminate %v, sent %t", s.name, s.q.State(), ok, ev, code, sent)
	}
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = seed + byte(i*7) + byte(i>>8)
	}
}
