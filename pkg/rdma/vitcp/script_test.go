// SPDX-License-Identifier: Apache-2.0

package vitcp

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// The scripts in testdata/data play the peer of one queue pair, segment by segment: each event of its sending and its
// receiving side (§2.2.2.2.3, §3.1) in each of their states.
//
//	start [window=N] [unreliable] [nofc] [credits=N] [mtu=N]   our messages begin with 101, the peer's with 201
//	post ID OP [n=N] [imm=N]          send, write, writeimm, read
//	recv ID [n=N]
//	seg TYPE NUMBER [n=N] [off=N] [more] [imm=N] [ack=N] [credits=N] [error=N] [cause=N] [abort] [addr=N] [key=N] [len=N]
//	hold|release                      TCP takes nothing, or all
//	take N                            held TCP takes N bytes
//	close-region|disconnect|fin|reset
//	wait D
//
// Output is what was sent, completions, events, and the state.
func TestSection3_1_Scripts(t *testing.T) {
	files := 0
	datadriven.Walk(t, "testdata/data", func(t *testing.T, path string) {
		files++
		s := &dataScript{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t, s.d = t, d
			return s.run()
		})
	})
	if files == 0 {
		t.Fatal("no scripts")
	}
}

type dataScript struct {
	t     testing.TB
	d     *datadriven.TestData
	q     *QP
	mem   *testMemory
	mr    *region
	now   time.Time
	held  bool
	ack   uint32
	posts uint16
	tap   *tap
	seen  int
	text  strings.Builder
}

func (s *dataScript) number(key string, value int) int {
	if s.d.HasArg(key) {
		s.d.ScanArgs(s.t, key, &value)
	}
	return value
}

func (s *dataScript) arg(i int) string { return s.d.CmdArgs[i].Key }

func (s *dataScript) id(i int) uint64 {
	var n uint64
	if _, err := fmt.Sscan(s.arg(i), &n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *dataScript) run() string {
	s.text.Reset()
	switch s.d.Cmd {
	case "start":
		s.start()
	case "post":
		s.post()
	case "recv":
		_, err := s.q.PostRecv([]rdma.RecvWR{{ID: s.id(0), SGE: s.mr.sge(1<<19, s.number("n", 100))}})
		s.say(err)
	case "seg":
		s.segment()
	case "hold":
		s.held = true
	case "release":
		s.held = false
	case "take":
		s.transmit(int(s.id(0)))
	case "close-region":
		s.mr.gone = true
		s.q.ForgetMemory(time.Time{})
	case "disconnect":
		s.say(s.q.Disconnect(s.now))
	case "fin":
		s.q.HandleEnd(s.now, nil)
	case "reset":
		s.q.HandleEnd(s.now, errors.New("reset"))
	case "wait":
		dur, err := time.ParseDuration(s.arg(0))
		if err != nil {
			s.t.Fatal(err)
		}
		s.now = s.now.Add(dur)
		s.q.HandleTimeout(s.now)
	default:
		s.t.Fatalf("unknown command %q", s.d.Cmd)
	}
	s.poll()
	if !s.held {
		s.transmit(1 << 30)
	}
	s.poll()
	s.state()
	return s.text.String()
}

func (s *dataScript) say(err error) {
	if err != nil {
		fmt.Fprintf(&s.text, "error: %v\n", err)
	}
}

func (s *dataScript) start() {
	*s = dataScript{t: s.t, d: s.d, mem: &testMemory{}, now: time.Unix(0, 0), ack: 100, tap: newTap(s.t)}
	s.mr = s.mem.add(1<<20, allAccess)
	q, err := NewQP(QPConfig{Num: 1, MaxSendWR: 8, MaxRecvWR: 8, Memory: s.mem})
	if err != nil {
		s.t.Fatal(err)
	}
	s.q = q
	s.say(q.Modify(s.now, rdma.QPAttr{State: rdma.QPInit, Access: allAccess}))
	a := reliable()
	a.Reliable, a.FlowControl = !s.d.HasArg("unreliable"), !s.d.HasArg("nofc")
	a.ReadWindow = uint16(s.number("window", 2))
	a.MaxTransfer = uint32(s.number("mtu", 1<<20))
	s.posts = uint16(s.number("credits", 8))
	s.say(q.Start(s.now, Terms{Attr: a, First: 100, PeerFirst: 200, PeerPosted: s.posts}))
}

func (s *dataScript) post() {
	ops := map[string]rdma.Opcode{"send": rdma.OpSend, "write": rdma.OpWrite, "writeimm": rdma.OpWriteImm, "read": rdma.OpRead}
	w := rdma.SendWR{
		ID: s.id(0), Op: ops[s.arg(1)], Flags: rdma.SendSignaled, SGL: []rdma.SGE{s.mr.sge(0, s.number("n", 10))},
		Imm: uint32(s.number("imm", 0)), RemoteAddr: 0x1000, RKey: 0x22,
	}
	if s.d.HasArg("imm") && w.Op == rdma.OpSend {
		w.Flags |= rdma.SendImm
	}
	_, err := s.q.PostSend(s.now, []rdma.SendWR{w})
	s.say(err)
}

func (s *dataScript) segment() {
	types := map[string]Type{
		"send": TypeSend, "readreq": TypeReadRequest, "readresp": TypeReadResponse, "write": TypeWrite, "nop": TypeNOP, "connect": TypeConnectRequest,
	}
	s.ack = uint32(s.number("ack", int(s.ack)))
	s.posts = uint16(s.number("credits", int(s.posts)))
	n := s.number("n", 0)
	h := Header{
		Type: types[s.arg(0)], Message: uint32(s.id(1)), Offset: uint32(s.number("off", 0)), Immediate: uint32(s.number("imm", 0)),
		Ack: s.ack, Posted: s.posts, Error: ErrorType(s.number("error", 0)), Cause: Cause(s.number("cause", 0)),
	}
	if !s.d.HasArg("more") {
		h.Flags |= FlagEnd
	}
	if s.d.HasArg("imm") {
		h.Flags |= FlagImmediate
	}
	if s.d.HasArg("abort") {
		h.Flags |= FlagTransmitError
	}
	h.Length = uint16(h.PayloadOffset() + n)
	if h.Type.isConnect() {
		h.Length = HeaderLen + CELen
	}
	b := h.Append(nil)
	if h.Type.hasRDMA() {
		addr, key := s.mr.addr, s.mr.rkey
		if h.Type == TypeReadResponse {
			addr, key = 0x1000, 0x22
		}
		b = RDMA{
			Addr: addr + uint64(s.number("addr", 0)), Handle: key + rdma.RKey(s.number("key", 0)), Length: uint32(s.number("len", n)),
		}.Append(b)
	}
	b = append(b, make([]byte, int(h.Length)-len(b))...)
	for len(b) > 0 {
		k := 0
		for _, to := range s.q.RxBuffers(nil) {
			i := copy(to, b)
			b, k = b[i:], k+i
		}
		if k == 0 {
			s.t.Fatal("no room for the peer's bytes")
		}
		_ = s.q.HandleRx(s.now, k)
	}
}

// transmit has TCP take up to n bytes, and says which segments begin in them.
func (s *dataScript) transmit(n int) {
	for n > 0 {
		total := 0
		for _, b := range s.q.TxBuffers(s.now, nil) {
			b = b[:min(len(b), n)]
			s.tap.see(b)
			total += len(b)
			n -= len(b)
		}
		if total == 0 {
			break
		}
		s.q.HandleTx(s.now, total)
	}
	for ; s.seen < len(s.tap.segments); s.seen++ {
		h := &s.tap.segments[s.seen]
		fmt.Fprintf(&s.text, "-> %v %d: %d bytes at %d, flags %d, ack %d, posted %d", h.Type, h.Message, int(h.Length)-h.PayloadOffset(), h.Offset, h.Flags, h.Ack, h.Posted)
		if h.Flags&FlagImmediate != 0 {
			fmt.Fprintf(&s.text, ", immediate %d", h.Immediate)
		}
		if h.Error != ErrorNone {
			fmt.Fprintf(&s.text, ", %v: %v", h.Error, h.Cause)
		}
		s.text.WriteByte('\n')
	}
}

func (s *dataScript) poll() {
	var wcs [16]wq.Completion
	for _, c := range wcs[:s.q.PollWC(wcs[:])] {
		fmt.Fprintf(&s.text, "%d %v: %v, %d bytes", c.WC.ID, c.WC.Op, c.WC.Status, c.WC.Bytes)
		if c.WC.HasImm {
			fmt.Fprintf(&s.text, ", immediate %d", c.WC.Imm)
		}
		s.text.WriteByte('\n')
	}
	for {
		e, ok := s.q.PollEvent()
		if !ok {
			return
		}
		fmt.Fprintf(&s.text, "event %v: %v\n", e.Kind, e.Err)
	}
}

func (s *dataScript) state() {
	ends := [...]string{"", ", FIN", ", close TCP", ", reset TCP"}
	fmt.Fprintf(&s.text, "%v%s", s.q.State(), ends[s.q.End()])
	if at, ok := s.q.NextTimeout(); ok {
		fmt.Fprintf(&s.text, ", timer in %v", at.Sub(s.now))
	}
}
