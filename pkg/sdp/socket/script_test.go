// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// ladder runs the scripts in testdata/scripts: the draft's ladder diagrams, and its races. A is the connecting peer and B the
// accepting one; what programs do and what arrives is input, all that the sockets do is output. Each side counts
// its keys, and its Reads and Writes together.
//
//	hosts [recv=N] [bufs=N] [zcopy=N] [adverts=N] [depth=N] [max-recv=N] [keep] [suspends] [pipelined] [setup] [ends]
//	                            two new sockets, established but for setup; with pipelined A sends in that mode; without
//	                            ends the connection may only end in order
//	alone [...]                 B is a socket, and the script is A
//	A write|read n=BYTES [copied] [urgent] [fill]
//	A cancel-reads|cancel-writes|shutdown|close|abort|lost|no-keys
//	A mode to=buffered|combined|pipelined
//	A resize n=BYTES
//	A suspend port=N
//	A passes [n=N]              the next things that A has sent arrive at B
//	A holds|releases            completions of A wait | come
//	flow                        all that was sent arrives, and what that leads to
//	wait n=MILLISECONDS
//	A shows                     a summary
//	A says KIND [len=N] [key=N] [nd=N] [with=BYTES] [bytes=N] [mode=N] [send] [port=N] [inv=N] [ack=N] [bufs=N] [flags=N]
//	                            alone: a message of the script. It has a key of its own for each advert, and
//	                            acknowledges what has arrived from B.
//	A puts n=BYTES              alone: an RDMA WRITE of the script into B's oldest advert
type ladder struct {
	w      *world
	alone  bool
	held   [2]bool
	modes  [2][2]bsdh.Mode
	states [2]State
	lines  []string

	// Of the script, where it is A.
	next  uint32 // number of its next message
	heard uint32 // of B's last message that arrived
	pos   uint64 // of its stream
}

// names are how scripts call both sides.
var names = [2]string{"A", "B"}

func TestSocket_scripts(t *testing.T) {
	if files, err := filepath.Glob("testdata/scripts/*.txt"); err != nil || len(files) < 16 { // also where one of them is run alone
		t.Fatalf("only %d scripts: %v", len(files), err)
	}
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		l := &ladder{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			l.run(t, d)
			if l.w.err != nil {
				t.Errorf("%s: %v", d.Pos, l.w.err)
			}
			out := strings.Join(l.lines, "\n")
			l.lines = nil
			if out == "" {
				return "ok\n"
			}
			return out + "\n"
		})
	})
}

func (l *ladder) say(format string, args ...any) {
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

func (l *ladder) run(t *testing.T, d *datadriven.TestData) {
	switch d.Cmd {
	case "hosts", "alone":
		l.begin(t, d)
	case "A":
		l.command(t, d, l.w.sides[0])
	case "B":
		l.command(t, d, l.w.sides[1])
	case "flow":
		for l.pass(l.w.sides[0]) || l.pass(l.w.sides[1]) {
		}
	case "wait":
		l.w.now = l.w.now.Add(time.Duration(number(t, d, "n")) * time.Millisecond)
		l.w.expire()
	default:
		d.Fatalf(t, "unknown command %q", d.Cmd)
	}
	l.settle()
}

func number(t *testing.T, d *datadriven.TestData, key string) int {
	n := 0
	d.MaybeScanArgs(t, key, &n)
	return n
}

// begin makes two sockets. Those of scripts advertise what is longer than 1000 bytes, in messages of up to 900.
func (l *ladder) begin(t *testing.T, d *datadriven.TestData) {
	cfg := Config{ZcopyBytes: 1000, RecvBytes: 900, RecvBuffers: 8, MaxAdverts: 4, Keep: d.HasArg("keep") || d.HasArg("suspends"), Suspends: d.HasArg("suspends")}
	d.MaybeScanArgs(t, "recv", &cfg.RecvBytes)
	d.MaybeScanArgs(t, "bufs", &cfg.RecvBuffers)
	d.MaybeScanArgs(t, "zcopy", &cfg.ZcopyBytes)
	d.MaybeScanArgs(t, "adverts", &cfg.MaxAdverts)
	d.MaybeScanArgs(t, "depth", &cfg.SendDepth)
	d.MaybeScanArgs(t, "max-recv", &cfg.MaxRecvBytes)
	other := cfg
	other.SendBytes = cfg.MaxRecvBytes
	*l = ladder{alone: d.Cmd == "alone", modes: [2][2]bsdh.Mode{{bsdh.Combined, bsdh.Combined}, {bsdh.Combined, bsdh.Combined}}}
	cfg.SendBytes = cfg.MaxRecvBytes
	l.w = stillWorld(cfg, other, quiet)
	l.w.does, l.w.gets, l.w.revokes = l.does, l.gets, func(h *host, key rdma.RKey) { l.say("%s's key %d is dead", names[h.side], key) }
	l.w.gone = l.alone || d.HasArg("ends")
	l.w.sides[0].run()
	switch {
	case l.alone:
		l.w.sides[1].out = nil // the script does not look at HelloAck
	case d.HasArg("setup"):
		return
	default:
		for l.pass(l.w.sides[0]) || l.pass(l.w.sides[1]) {
		}
		if d.HasArg("pipelined") {
			l.w.sides[0].s.PreferMode(l.w.now, bsdh.Pipelined)
			l.w.sides[0].run()
			l.pass(l.w.sides[0])
		}
		l.settle()
	}
	l.lines, l.states = nil, [2]State{l.w.sides[0].s.state, l.w.sides[1].s.state}
}

func (l *ladder) command(t *testing.T, d *datadriven.TestData, h *host) {
	now, n := l.w.now, uint32(number(t, d, "n"))
	switch what := d.CmdArgs[0].Key; what {
	case "write":
		h.write(n, !d.HasArg("copied"), d.HasArg("urgent"))
	case "read":
		h.read(n, !d.HasArg("copied"), d.HasArg("fill"))
	case "cancel-reads":
		h.s.CancelReads(now)
	case "cancel-writes":
		h.s.CancelWrites(now)
	case "shutdown":
		h.s.Shutdown(now)
	case "close":
		h.s.Close(now)
	case "abort":
		h.s.Abort(now)
	case "lost":
		h.s.HandleDown(errors.New("lost"))
	case "no-keys":
		h.refuse = true
	case "mode":
		to := ""
		d.ScanArgs(t, "to", &to)
		h.s.PreferMode(now, map[string]bsdh.Mode{"buffered": bsdh.Buffered, "combined": bsdh.Combined, "pipelined": bsdh.Pipelined}[to])
	case "resize":
		l.fails(h.s.ResizePeer(now, n))
	case "suspend":
		l.fails(h.s.Suspend(now, uint16(number(t, d, "port"))))
	case "passes":
		for range max(n, 1) {
			if !l.pass(h) {
				d.Fatalf(t, "nothing is under way")
			}
		}
	case "holds":
		l.held[h.side] = true
	case "releases":
		l.held[h.side] = false
	case "shows":
		l.say("%v", h.s.Snapshot())
	case "says":
		l.tell(t, d)
	case "puts":
		l.put(t, d, n)
	default:
		d.Fatalf(t, "unknown command %q", what)
	}
	h.run()
}

func (l *ladder) fails(err error) {
	if err != nil {
		l.say("error: %v", err)
	}
}

// settle hands completions over that are not held, and writes down what states and modes have changed.
func (l *ladder) settle() {
	for again := true; again; {
		again = false
		for i, h := range l.w.sides {
			again = again || !l.held[i] && h.complete()
		}
	}
	for i, h := range l.w.sides {
		if l.alone && i == 0 {
			continue
		}
		v := h.s.Snapshot()
		if v.SendMode != l.modes[i][0] {
			l.say("%s sends in %v mode", names[i], v.SendMode)
		}
		if v.RecvMode != l.modes[i][1] {
			l.say("%s receives in %v mode", names[i], v.RecvMode)
		}
		if v.State != l.states[i] {
			l.say("%s is in %v", names[i], v.State)
		}
		l.modes[i], l.states[i] = [2]bsdh.Mode{v.SendMode, v.RecvMode}, v.State
	}
}

// pass brings the next thing of a side to the other one.
func (l *ladder) pass(h *host) bool {
	if l.alone && h.side == 1 && len(h.out) > 0 && h.out[0].message != nil {
		m, _ := bsdh.Parse(h.out[0].message, h.cfg.Layout)
		h.out, l.heard = h.out[1:], m.Seq
		l.say("A gets %v %d", m.MID, m.Seq)
		return true
	}
	ok := h.deliver()
	l.settle()
	return ok
}

// does writes down an output of a socket.
func (l *ladder) does(h *host, o *Output) {
	me := names[h.side]
	switch o.Kind {
	case OutHello:
		l.say("%s sends Hello", me)
	case OutSend:
		l.say("%s sends %s%s", me, describe(&o.Message, o.Len), map[bool]string{true: fmt.Sprintf(", invalidates %d", o.Key)}[o.Invalidate])
	case OutRDMAWrite:
		l.say("%s writes %d bytes by RDMA, key %d", me, o.Len, o.Key)
	case OutRDMARead:
		l.say("%s reads %d bytes by RDMA into Read %d at %d, key %d at %d", me, o.Len, o.ID, o.Offset, o.Key, o.Addr&(1<<32-1))
	case OutCopy:
		l.say("%s copies %d bytes into Read %d at %d", me, o.Len, o.ID, o.Offset)
	case OutKeep:
		l.say("%s keeps %d bytes in private memory", me, o.Len)
	case OutRead:
		l.say("%s: Read %d is over with %d bytes%s%s%s", me, o.ID, o.Len, said(o.EOF, ", end of the stream"), said(o.Urgent, ", urgent"), said(o.Canceled, ", canceled"))
	case OutWritten:
		l.say("%s: Write %d is over with %d bytes%s", me, o.ID, o.Len, said(o.Canceled, ", canceled"))
	case OutPost:
		l.say("%s posts receive buffers of %d bytes", me, o.Len)
	case OutEnded:
		l.say("%s has ended: %v", me, o.Err)
	case OutRecycle, OutDrop:
	case OutSuspended:
		l.say("%s changes its connection, by %v", me, o.Message.MID)
	case OutEstablished, OutUrgent, OutPeerDone, OutClose, OutReset:
		l.say("%s: %v", me, o.Kind)
	}
}

func said(yes bool, text string) string {
	if yes {
		return text
	}
	return ""
}

// gets writes down what arrives.
func (l *ladder) gets(h *host, it *item) {
	what := ""
	switch {
	case it.message != nil:
		m, err := bsdh.Parse(it.message, h.cfg.Layout)
		if what = fmt.Sprintf("%v %d", m.MID, m.Seq); err != nil || m.MID == bsdh.HelloAck {
			what = m.MID.String()
		}
	case it.write != nil:
		what = "RDMA WRITE"
	case it.read != nil:
		what = "RDMA READ"
	case it.answer:
		what = "what it reads by RDMA"
	case it.hello != nil:
		what = "Hello"
	case it.reset:
		what = "a reset"
	case it.end:
		what = "the end of the connection"
	}
	l.say("%s gets %s", names[h.side], what)
}

// describe is a message with n bytes of payload.
func describe(m *bsdh.Message, n uint32) string {
	if m.MID == bsdh.HelloAck {
		return "HelloAck"
	}
	s := fmt.Sprintf("%v %d (%d; %d)", m.MID, m.Seq, m.Ack, m.Bufs)
	switch m.MID {
	case bsdh.SrcAvail:
		s += fmt.Sprintf(" %d bytes, key %d", m.Advert.Len, m.Advert.Key)
	case bsdh.SinkAvail:
		s += fmt.Sprintf(" %d bytes, key %d, NonDiscards %d", m.Advert.Len, m.Advert.Key, m.Advert.NonDiscards)
	case bsdh.RdmaRdCompl, bsdh.RdmaWrCompl, bsdh.ChRcvBuf, bsdh.ChRcvBufAck:
		s += fmt.Sprintf(" %d bytes", m.Bytes)
	case bsdh.ModeChange:
		s += fmt.Sprintf(" %v, S=%d", m.Change.Mode, map[bool]int{true: 1}[m.Change.Send])
	case bsdh.SuspComm:
		s += fmt.Sprintf(" port %d", m.Port)
	case bsdh.Hello, bsdh.HelloAck, bsdh.DisConn, bsdh.AbortConn, bsdh.SendSm, bsdh.SrcAvailCancel, bsdh.SinkAvailCancel, bsdh.SinkCancelAck,
		bsdh.SuspCommAck, bsdh.Data:
	}
	if n > 0 {
		s += fmt.Sprintf(" + payload of %d", n)
	}
	if m.Flags != 0 {
		s += fmt.Sprintf(" %v", m.Flags)
	}
	return s
}

// put has the script write into B's oldest advert.
func (l *ladder) put(t *testing.T, d *datadriven.TestData, n uint32) {
	keys := slices.Sorted(maps.Keys(l.w.sides[1].keys))
	if len(keys) == 0 {
		d.Fatalf(t, "B advertises nothing")
	}
	g := l.w.sides[1].keys[keys[0]]
	for i := range n {
		g.read.buf[i] = pattern(0, l.pos)
		l.pos++
	}
	l.say("A writes %d bytes by RDMA, key %d", n, keys[0])
}

// tell gives a message of the script to B.
func (l *ladder) tell(t *testing.T, d *datadriven.TestData) {
	a, b := l.w.sides[0], l.w.sides[1]
	kind := d.CmdArgs[1].Key
	m := bsdh.Message{Seq: l.next, Ack: l.heard, Bufs: 100}
	for mid := range 256 {
		if bsdh.MID(mid).String() == kind {
			m.MID = bsdh.MID(mid)
		}
	}
	m.Bytes, m.Port, m.Flags = uint32(number(t, d, "bytes")), uint16(number(t, d, "port")), bsdh.Flags(number(t, d, "flags"))
	m.Change = bsdh.ModeWord{Mode: bsdh.Mode(number(t, d, "mode")), Send: d.HasArg("send")}
	m.Advert = bsdh.Advert{Len: uint32(number(t, d, "len")), NonDiscards: uint32(number(t, d, "nd"))}
	switch m.MID {
	case bsdh.SrcAvail:
		m.Advert.Key, m.Advert.Addr, _ = a.AdvertiseStream(l.pos, m.Advert.Len)
	case bsdh.SinkAvail:
		r := &testRead{Read: Read{Len: m.Advert.Len}, buf: make([]byte, m.Advert.Len)}
		m.Advert.Key, m.Advert.Addr, _ = a.newKey(grant{right: PeerWrites, read: r, n: m.Advert.Len})
	default:
	}
	d.MaybeScanArgs(t, "key", &m.Advert.Key)
	d.MaybeScanArgs(t, "ack", &m.Ack)
	d.MaybeScanArgs(t, "bufs", &m.Bufs)
	for range number(t, d, "with") {
		m.Payload = append(m.Payload, pattern(0, l.pos))
		l.pos++
	}
	l.next++
	it := item{message: m.Append(nil, bsdh.LayoutFigures)}
	if inv := rdma.RKey(number(t, d, "inv")); inv != 0 {
		it.inv = &inv
	}
	l.say("A sends %s", describe(&m, uint32(len(m.Payload))))
	b.receive(it)
}
