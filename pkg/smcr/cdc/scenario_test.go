// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// Scenarios are ladder diagrams in testdata/scenarios, as in RFC 7609 §4.7:
// hosts A and B, one connection, RMBEs with eye catchers (cursors start and
// wrap at 4). What the applications do is input, what travels is output.
//
//	hosts rmbe=BYTES [send-buffer=BYTES] [at=WRAP:CURSOR]
//	                     a connection; the stream from A to B stands at the
//	                     cursor, all consumed
//	A send n=BYTES [urgent]     the last byte is urgent
//	A recv [n=BYTES]     all there is without n=
//	A shutdown|close|abort
//	A timeout            the timer of a closing state: the RMBE is given up
//	A replaced           §4.4.2: the peer gave its RMBE to another connection
//	A ask                R
//	flow                 both hosts send all they have, and it arrives
//	A posts              A sends all it has, nothing arrives yet
//	A link-lost [arrived=N]     of what A has posted N messages, with their
//	                     writes, have arrived, and none was acknowledged; the
//	                     link of A's direction changes
//	A is-asked-for n=N   a validation message for message N reaches A
//	info                 states and windows
//
// A line of the ladder has the time step, what A knows of B's consumer cursor,
// the transfer, and what B knows of A's producer cursor.
func TestSection4_7_Scenarios(t *testing.T) {
	files := 0
	datadriven.Walk(t, "testdata/scenarios", func(t *testing.T, path string) {
		files++
		l := &ladder{t: t}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			l.t, l.lines = t, nil
			l.run(d)
			return strings.Join(l.lines, "\n")
		})
	})
	if files == 0 {
		t.Fatal("no scenarios")
	}
}

// ladder is the two hosts.
type ladder struct {
	t     testing.TB
	a, b  *end
	step  int
	cons  cdc.Cursor // as A was told
	prod  cdc.Cursor // as B was told
	flags cdc.Flags  // as B was told
	lines []string
	moved func(*end) // called after each step of a host; nil: nothing is
}

func (l *ladder) printf(format string, args ...any) {
	l.lines = append(l.lines, strings.TrimRight(fmt.Sprintf(format, args...), " "))
}

// other returns the peer of a host.
func (l *ladder) other(e *end) *end {
	if e == l.a {
		return l.b
	}
	return l.a
}

func (l *ladder) run(d *datadriven.TestData) {
	if l.moved != nil && l.a != nil {
		l.moved(l.a)
		l.moved(l.b)
	}
	switch d.Cmd {
	case "hosts":
		l.hosts(d)
	case "flow":
		for l.a.c.Pending() || l.b.c.Pending() || len(l.a.wire)+len(l.b.wire) > 0 {
			for _, e := range []*end{l.a, l.b} {
				l.post(e)
				l.arrive(e, len(e.wire), true)
			}
		}
	case "info":
		l.info()
	case "A":
		l.host(l.a, d)
	case "B":
		l.host(l.b, d)
	default:
		l.t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
}

func (l *ladder) hosts(d *datadriven.TestData) {
	var rmbe, buffer uint32 = 10000, 20000
	at := "0:4"
	d.MaybeScanArgs(l.t, "rmbe", &rmbe)
	d.MaybeScanArgs(l.t, "send-buffer", &buffer)
	d.MaybeScanArgs(l.t, "at", &at)
	newEnd := func(name string, key byte) *end {
		e := &end{name: name, key: key, sendRing: cdc.Ring{Size: buffer}, rmbeRing: cdc.Ring{Origin: cdc.OriginRFC, Size: rmbe}}
		e.send, e.rmbe = make([]byte, buffer), make([]byte, rmbe)
		e.c = cdc.NewConn(cdc.Config{Local: e.rmbeRing, SendBuffer: buffer})
		return e
	}
	l.a, l.b = newEnd("A", 1), newEnd("B", 2)
	l.a.c.Activate(l.b.rmbeRing, 1)
	l.b.c.Activate(l.a.rmbeRing, 2)
	l.cons, l.prod, l.flags = l.b.rmbeRing.Start(), l.b.rmbeRing.Start(), 0

	wrap, cursor, _ := strings.Cut(at, ":")
	w, err := strconv.ParseUint(wrap, 10, 16)
	if err != nil {
		l.t.Fatal(err)
	}
	n, err := strconv.ParseUint(cursor, 10, 32)
	if err != nil {
		l.t.Fatal(err)
	}
	for pos := w*uint64(l.b.rmbeRing.Capacity()) + n - uint64(cdc.OriginRFC); l.b.consumed < pos; {
		l.a.write(min(pos-l.a.produced, 1000))
		for range 2 {
			for _, e := range []*end{l.a, l.b} {
				l.post(e)
				l.arrive(e, len(e.wire), true)
			}
			l.b.read(l.t, 1000, l.a)
		}
	}
	if l.b.c.Announced() != l.b.consumed { // the last cursor was not worth a message
		l.a.c.RequestUpdate()
	}
	l.run(&datadriven.TestData{Cmd: "flow"})
	l.cons, l.prod, l.flags = l.b.rmbeRing.Cursor(l.b.consumed), l.b.rmbeRing.Cursor(l.a.produced), 0
	l.step, l.lines = 0, nil
	l.printf("      Host A knows                                    Host B knows")
	l.printf("time  consumer wrap                                   producer wrap  flags")
	l.row("")
}

// row is one line of the diagram.
func (l *ladder) row(what string) {
	var names []string
	for _, f := range []struct {
		on   bool
		name string
	}{
		{l.flags.WriterBlocked(), "WrtBlk"},
		{l.flags.UrgentPending(), "UrgP"},
		{l.flags.UrgentPresent(), "UrgA"},
		{l.flags.CursorUpdateRequested(), "Req"},
	} {
		if f.on {
			names = append(names, f.name)
		}
	}
	l.printf("%4d  %8d %4d  %-32s  %8d %4d  %s", l.step, l.cons.Count, l.cons.Wrap, what, l.prod.Count, l.prod.Wrap, strings.Join(names, " "))
	l.step++
}

// arrow draws a transfer.
func (l *ladder) arrow(from *end, head, what string) {
	if from == l.a {
		l.row("--" + head + "> " + what)
	} else {
		l.row("<" + head + "-- " + what)
	}
}

func (l *ladder) post(e *end) {
	for e.c.Pending() {
		tr, ev := e.c.Next()
		e.wire = append(e.wire, tr)
		l.transition(e, ev)
	}
}

// arrive lets the first n transmissions of a host arrive.
func (l *ladder) arrive(e *end, n int, acknowledged bool) {
	peer := l.other(e)
	for _, tr := range e.wire[:n] {
		e.place(l.t, peer, tr)
		for _, s := range e.c.WriteSpans(tr) {
			if s.Len > 0 {
				l.arrow(e, "--", fmt.Sprintf("RDMA-WR (%d:%d)", s.Offset, s.Offset+s.Len-1))
			}
		}
		if tr.Validation {
			l.deliver(e, tr.Message, fmt.Sprintf("CDC validation %d F", tr.Message.Seq))
		} else {
			if e == l.a {
				l.prod, l.flags = tr.Message.Prod, tr.Message.Flags
			} else {
				l.cons = tr.Message.Cons
			}
			what := fmt.Sprintf("CDC %d", tr.Message.Seq)
			if end := tr.Message.Flags & 0xff; end != 0 {
				what += " " + end.String()
			}
			l.deliver(e, tr.Message, what)
		}
		if acknowledged {
			l.transition(e, e.c.HandleSent())
		}
	}
	e.wire = e.wire[n:]
}

func (l *ladder) deliver(e *end, m cdc.Message, what string) {
	l.arrow(e, "..", what)
	peer := l.other(e)
	ev, err := peer.c.HandleMessage(m)
	if err != nil {
		l.printf("%s: %v", peer.name, err)
	}
	l.transition(peer, ev&^(cdc.Readable|cdc.Writable))
}

// transition prints a change of state and the events that the application
// sees.
func (l *ladder) transition(e *end, ev cdc.Events) {
	if l.moved != nil {
		l.moved(e)
	}
	ev &^= cdc.Writable
	now := e.c.State()
	if now != e.state && e.state != cdc.Closed {
		l.printf("%s: %v -> %v", e.name, e.state, now)
	}
	e.state = now
	if ev != 0 {
		l.printf("%s is told: %v", e.name, ev)
	}
	if ev&cdc.PeerUrgent != 0 && !e.c.PeerUrgentPending() {
		l.printf("%s: the urgent byte is at %d", e.name, e.rmbeRing.Offset(e.c.PeerUrgent()-1))
	}
}

func (l *ladder) host(e *end, d *datadriven.TestData) {
	n := uint64(1 << 30)
	d.MaybeScanArgs(l.t, "n", &n)
	if e.state == cdc.Closed {
		e.state = e.c.State()
	}
	switch d.CmdArgs[0].Key {
	case "send":
		if d.HasArg("urgent") {
			e.c.Urgent(e.produced + n)
		}
		before := e.produced
		e.write(n)
		if e.produced-before != n {
			l.printf("the send buffer takes %d bytes", e.produced-before)
		}
	case "recv":
		before := e.consumed
		e.read(l.t, n, l.other(e))
		l.printf("%d bytes", e.consumed-before)
	case "shutdown":
		e.c.Shutdown()
	case "close":
		l.transition(e, e.c.Close())
	case "abort":
		l.transition(e, e.c.Abort())
	case "timeout", "replaced":
		l.transition(e, e.c.Fail())
	case "ask":
		e.c.RequestUpdate()
	case "posts":
		posted := len(e.wire)
		l.post(e)
		for _, tr := range e.wire[posted:] {
			l.printf("%s: %d bytes, %v", e.name, tr.Len, tr.Message)
		}
	case "link-lost":
		arrived := 0
		d.MaybeScanArgs(l.t, "arrived", &arrived)
		l.arrive(e, arrived, false)
		e.wire = nil
		l.transition(e, e.c.Failover())
	case "is-asked-for":
		m := cdc.Message{Seq: uint16(n), Token: 1, Flags: cdc.Flags(0).WithFailoverValidation()}
		l.deliver(l.other(e), m, fmt.Sprintf("CDC validation %d F", n))
	default:
		l.t.Fatalf("%s: unknown command %q", d.Pos, d.CmdArgs[0].Key)
	}
}

func (l *ladder) info() {
	for _, e := range []*end{l.a, l.b} {
		s := fmt.Sprintf("%s: %v, window %d, unread %d", e.name, e.c.State(), e.c.Window(), e.c.PeerProduced()-e.consumed)
		if e.c.PeerReleased() {
			s += ", peer released our RMBE"
		}
		l.printf("%s", s)
	}
}
