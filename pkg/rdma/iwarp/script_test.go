// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// ladder runs the scripts in testdata/scripts: A is the initiator and B the responder of
// one stream. What programs do is input; what travels, completes and changes is output.
//
//	hosts
//	A start [rev=N] [p2p] [nocrc] [ird=N ord=N] [exact] [pd=TEXT] [timeout]
//	B reply [reject] [pd=TEXT]
//	A recv id=N n=BYTES
//	A send|write|read id=N n=BYTES [at=OFFSET] [solicited] [inv] [key=N]
//	flow [bytes=N]        both send all they have, in pieces of N bytes
//	A sends bytes=N       A sends N bytes, which arrive
//	A disconnect|error|reset|forget
//	A raw hex             A sends these bytes, whatever its queue pair says
//	A lost                TCP's connection is lost
//	A timeout             the next timer of A
type ladder struct {
	*twoSides
	seen  map[*side]*watched
	lines []string
}

// watched is what is known of a side, and the part of its stream that is not decoded.
type watched struct {
	phase  Phase
	state  rdma.QPState
	stream []byte
	greet  bool
}

func TestQP_scripts(t *testing.T) {
	files := 0
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, path string) {
		files++
		l := &ladder{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			l.run(t, d)
			out := strings.Join(l.lines, "\n")
			l.lines = nil
			if out == "" {
				return "ok\n"
			}
			return out + "\n"
		})
	})
	if files < 4 {
		t.Errorf("only %d scripts", files)
	}
}

func (l *ladder) run(t *testing.T, d *datadriven.TestData) {
	switch d.Cmd {
	case "hosts":
		l.twoSides = newTwoSides(t)
		l.seen = map[*side]*watched{l.a: {state: rdma.QPInit}, l.b: {state: rdma.QPInit}}
	case "flow":
		n := 1 << 20
		d.MaybeScanArgs(t, "bytes", &n)
		for l.pass(l.a, l.b, n) || l.pass(l.b, l.a, n) {
		}
	case "A":
		l.command(t, d, l.a, l.b)
	case "B":
		l.command(t, d, l.b, l.a)
	default:
		d.Fatalf(t, "unknown command %q", d.Cmd)
	}
	l.look()
}

func (l *ladder) command(t *testing.T, d *datadriven.TestData, s, peer *side) {
	var id, n, at, key int
	d.MaybeScanArgs(t, "id", &id)
	d.MaybeScanArgs(t, "n", &n)
	d.MaybeScanArgs(t, "at", &at)
	var err error
	switch what := d.CmdArgs[0].Key; what {
	case "start":
		err = s.q.Start(l.now, l.startup(t, d, s))
	case "reply":
		r := Reply{Reject: d.HasArg("reject")}
		pd := ""
		d.MaybeScanArgs(t, "pd", &pd)
		r.PrivateData = []byte(pd)
		err = s.q.Reply(l.now, r)
	case "recv":
		_, err = s.q.PostRecv([]rdma.RecvWR{{ID: uint64(id), SGE: s.mr.sge(0, n)}})
	case "send", "write", "read":
		op := map[string]rdma.Opcode{"send": rdma.OpSend, "write": rdma.OpWrite, "read": rdma.OpRead}[what]
		key = int(peer.mr.rkey)
		d.MaybeScanArgs(t, "key", &key)
		w := rdma.SendWR{ID: uint64(id), Op: op, Flags: rdma.SendSignaled, SGL: []rdma.SGE{s.mr.sge(0, n)}, RKey: rdma.RKey(key), RemoteAddr: peer.mr.addr + uint64(at), InvKey: peer.mr.rkey}
		if d.HasArg("solicited") {
			w.Flags |= rdma.SendSolicited
		}
		if d.HasArg("inv") {
			w.Flags |= rdma.SendInvalidate
		}
		_, err = s.q.PostSend(l.now, []rdma.SendWR{w})
	case "sends":
		var bytes int
		d.ScanArgs(t, "bytes", &bytes)
		l.pass(s, peer, bytes)
	case "disconnect":
		err = s.q.Disconnect(l.now)
	case "error":
		err = s.q.Modify(l.now, rdma.QPAttr{State: rdma.QPError})
	case "reset":
		err = s.q.Modify(l.now, rdma.QPAttr{State: rdma.QPReset})
	case "forget":
		s.mr.gone = true
		s.q.ForgetMemory(l.now)
	case "raw":
		l.seen[s].stream = append(l.seen[s].stream, unhex(t, d.Input)...)
		err = peer.feed(l.now, unhex(t, d.Input))
	case "lost":
		s.q.HandleEnd(l.now, errors.New("connection reset"))
	case "timeout":
		at, ok := s.q.NextTimeout()
		if !ok {
			d.Fatalf(t, "no timer runs")
		}
		l.lines = append(l.lines, fmt.Sprintf("%s waits %v", name(l, s), at.Sub(l.now)))
		l.now = at
		s.q.HandleTimeout(at)
	default:
		d.Fatalf(t, "unknown command %q", what)
	}
	if err != nil {
		l.lines = append(l.lines, "error: "+err.Error())
	}
}

func (l *ladder) startup(t *testing.T, d *datadriven.TestData, s *side) Startup {
	st := Startup{PeerToPeer: d.HasArg("p2p"), NoCRC: d.HasArg("nocrc"), Exact: d.HasArg("exact")}
	if s == l.b {
		st.Role = Responder
	}
	if d.HasArg("timeout") {
		st.Timeout = 5 * time.Second
	}
	var rev int
	pd := ""
	d.MaybeScanArgs(t, "rev", &rev)
	d.MaybeScanArgs(t, "ird", &st.IRD)
	d.MaybeScanArgs(t, "ord", &st.ORD)
	d.MaybeScanArgs(t, "pd", &pd)
	st.Rev, st.PrivateData = uint8(rev), []byte(pd)
	return st
}

func name(l *ladder, s *side) string {
	if s == l.a {
		return "A"
	}
	return "B"
}

// pass moves bytes from one side to the other and writes down what they are.
func (l *ladder) pass(from, to *side, limit int) bool {
	n := from.transmit(l.now, limit)
	b := from.sent
	w := l.seen[from]
	w.stream = append(w.stream, from.sent...)
	from.sent = from.sent[:0]
	l.decode(from)
	if len(b) > 0 {
		_ = to.feed(l.now, b) // the phase tells
	}
	l.look()
	if from.q.TxEnded() && !from.cut {
		from.cut = true
		l.lines = append(l.lines, fmt.Sprintf("%s ends its half", name(l, from)))
		to.q.HandleEnd(l.now, nil)
		l.look()
		return true
	}
	return n > 0
}

// decode writes down the whole frames of a stream.
func (l *ladder) decode(s *side) {
	w := l.seen[s]
	arrow := map[bool]string{true: "A -> B  ", false: "A <- B  "}[s == l.a]
	for {
		if !w.greet {
			n, err := FrameLen(w.stream, s == l.b)
			if err != nil || len(w.stream) < n {
				return
			}
			f, _ := ParseFrame(w.stream[:n])
			l.lines = append(l.lines, arrow+describeFrame(&f))
			w.stream, w.greet = w.stream[n:], true
			continue
		}
		framing := Framing{CRC: s.q.tx.framing.CRC}
		u, n, err := framing.Next(w.stream)
		if err != nil {
			return
		}
		w.stream = w.stream[n:]
		l.lines = append(l.lines, arrow+describeULPDU(u))
	}
}

func describeFrame(f *Frame) string {
	s := "Request"
	if f.Reply {
		s = "Reply"
	}
	s += fmt.Sprintf(" rev %d", f.Rev)
	for _, b := range []struct {
		on   bool
		name string
	}{
		{f.CRC, "CRC"},
		{f.Markers, "markers"},
		{f.Reject, "REJECT"},
		{f.Enhanced.PeerToPeer, "peer-to-peer"},
		{f.Enhanced.RTRWrite, "RTR write"},
		{f.Enhanced.RTRRead, "RTR read"},
	} {
		if b.on {
			s += ", " + b.name
		}
	}
	if f.IsEnhanced {
		s += fmt.Sprintf(", IRD %d, ORD %d", f.Enhanced.IRD, f.Enhanced.ORD)
	}
	if len(f.PrivateData) > 0 {
		s += fmt.Sprintf(", %q", f.PrivateData)
	}
	return s
}

func describeULPDU(u []byte) string {
	var h Header
	if err := h.Parse(u); err != nil {
		return err.Error()
	}
	s := h.Op.String()
	p := u[h.Len():]
	switch {
	case h.Op == OpTerminate:
		t, _ := ParseTerminate(p)
		return fmt.Sprintf("%s: %v", s, t.Code)
	case h.Op == OpReadRequest:
		r, _ := ParseReadRequest(p)
		return fmt.Sprintf("%s %d: %d bytes at +%d", s, h.MSN, r.Size, r.SourceTO&(1<<40-1))
	case h.Tagged:
		s += fmt.Sprintf(" %d bytes at +%d", len(p), h.TO&(1<<40-1))
	default:
		s += fmt.Sprintf(" %d: %d bytes at %d", h.MSN, len(p), h.MO)
	}
	if h.Last {
		s += ", last"
	}
	return s
}

// look writes down what changed at both sides.
func (l *ladder) look() {
	for _, s := range []*side{l.a, l.b} {
		w, n := l.seen[s], name(l, s)
		for line := range strings.Lines(s.takeWCs()) {
			l.lines = append(l.lines, fmt.Sprintf("%s completes %s", n, strings.TrimSpace(line)))
		}
		if p, st := s.q.Phase(), s.q.State(); p != w.phase || st != w.state {
			l.lines = append(l.lines, strings.TrimSpace(fmt.Sprintf("%s is in %v, %v %v", n, p, st, orNone(s.q.Err()))))
			w.phase, w.state = p, st
		}
		for {
			ev, ok := s.q.PollEvent()
			if !ok {
				break
			}
			l.lines = append(l.lines, fmt.Sprintf("%s is told %v: %v", n, ev.Kind, ev.Err))
		}
	}
}

func orNone(err error) string {
	if err == nil {
		return ""
	}
	return "(" + err.Error() + ")"
}
