// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// HandleRecv takes a message, b, that arrived in a receive buffer. The socket keeps no slice of b; the buffer
// is the socket's until OutRecycle. Invalidated is the key of ours that the message made worthless, or nil.
// An error is the peer's fault, and the end of the connection, as Poll says.
func (s *Socket) HandleRecv(now time.Time, buffer int, b []byte, invalidated *rdma.RKey) error {
	var err error
	switch {
	case s.state == StateClosed || s.susp.away:
		return nil
	case s.state == StateHello && s.cfg.Role == Connecting:
		err = s.handleHelloAck(buffer, b)
	case s.state == StateHello:
		err = violation(UnexpectedMessage, "message before Hello")
	case s.state == StateAbort:
		// While AbortConn waits for credit nothing else of a message matters.
		if m, err := bsdh.Parse(b, s.cfg.Layout); err == nil && s.credits.take(&m) == nil {
			s.size.used(buffer)
			s.recycle(buffer)
		}
	default:
		err = s.handleMessage(now, buffer, b, invalidated)
	}
	if err != nil {
		s.abort(now, err)
	}
	s.flush(now)
	return err
}

// handleMessage does what every message asks for, and then what its kind does.
func (s *Socket) handleMessage(now time.Time, buffer int, b []byte, inv *rdma.RKey) error {
	m, err := bsdh.Parse(b, s.cfg.Layout)
	if err != nil {
		return violation(BadMessage, "%w", err)
	}
	if err := s.credits.take(&m); err != nil {
		return err
	}
	s.size.used(buffer)
	n := uint32(len(m.Payload))
	if m.MID != bsdh.Data || n > 0 || m.Flags != 0 {
		s.credits.tell()
	}
	if w := &s.src.window; w.open && s.credits.acked(w.seq) {
		w.open = false
	}
	if inv != nil && m.MID != bsdh.RdmaRdCompl && m.MID != bsdh.RdmaWrCompl {
		return violation(WrongKey, "%v invalidates key %#x", m.MID, *inv)
	}
	if m.Flags&bsdh.OOBPending != 0 {
		s.out.put(Output{Kind: OutUrgent})
	}
	if err := s.snk.check(&m); err != nil {
		return err
	}
	if n > 0 {
		if s.snk.adv == 0 && s.snk.held.isFull() {
			return violation(NoCredit, "%v while %d messages wait", m.MID, s.snk.held.n)
		}
		s.takePayload(heldPayload{buffer, len(b) - int(n), n, m.Flags&bsdh.OOBPresent != 0})
	} else {
		s.recycle(buffer)
	}
	if err := s.dispatch(now, &m, inv); err != nil {
		return err
	}
	if s.end.closed && (!s.snk.held.isEmpty() || !s.snk.srcs.isEmpty()) {
		s.abort(now, ErrAborted)
		return nil
	}
	s.deliver()
	if s.snk.keepDue(&s.cfg, s.size.recvBytes) {
		s.keep()
	}
	return nil
}

// check reports what the state of the peer's stream does not allow.
func (k *sink) check(m *bsdh.Message) error {
	n := uint32(len(m.Payload))
	switch {
	case k.done && (n > 0 || m.MID == bsdh.SrcAvail || m.MID == bsdh.RdmaWrCompl || m.MID == bsdh.DisConn && !k.again):
		return violation(BehindEnd, "%v behind the end of the stream", m.MID)
	case m.MID == bsdh.SrcAvail:
		return k.checkSrc(n)
	case n > k.owed && !k.srcs.isEmpty():
		return violation(PayloadInTurn, "%v with %d bytes while an advert is outstanding", m.MID, n)
	case n > 0 && k.adv > 0 && n > k.reads.at(0).Len:
		return violation(BeyondAdvert, "%v with %d bytes, advertised were %d", m.MID, n, k.reads.at(0).Len)
	case m.MID == bsdh.DisConn && (!k.srcs.isEmpty() || k.owed > 0):
		return violation(BehindEnd, "end of the stream before all was sent that was offered")
	}
	return nil
}

// takePayload takes the payload of a message: it fills the oldest buffer that is advertised, alone, whatever its
// size (§9.5.1), or waits in line.
func (s *Socket) takePayload(p heldPayload) {
	k := &s.snk
	k.owed -= min(k.owed, p.len)
	if k.adv > 0 {
		r := k.popAdvert(s.cfg.Memory)
		s.out.put(Output{Kind: OutCopy, Buffer: p.buffer, From: p.off, ID: r.ID, Len: p.len})
		s.recycle(p.buffer)
		s.out.put(Output{Kind: OutRead, ID: r.ID, Len: p.len, Urgent: p.urgent})
		return
	}
	k.nonDiscards++
	k.held.push(p)
	k.count.holds(p.len)
}

// recycle posts a receive buffer again, or drops it.
func (s *Socket) recycle(buffer int) {
	if s.size.isOld(buffer) {
		s.size.old--
		s.out.put(Output{Kind: OutDrop, Buffer: buffer})
		return
	}
	s.credits.posted++
	s.out.put(Output{Kind: OutRecycle, Buffer: buffer})
}

// dispatch does what the kind of a message asks for. Its payload is taken.
func (s *Socket) dispatch(now time.Time, m *bsdh.Message, inv *rdma.RKey) error {
	o, k := &s.src, &s.snk
	switch m.MID {
	case bsdh.Data:
	case bsdh.SrcAvail:
		return s.takeSrc(now, m)
	case bsdh.SinkAvail:
		if o.sinks.n+k.srcs.n >= s.cfg.MaxAdverts {
			return violation(TooManyAdverts, "more than %d adverts", s.cfg.MaxAdverts)
		}
		if s.end.finSent {
			return nil // it crossed our DisConn
		}
		return o.takeSink(&m.Advert, s.cfg.Memory)
	case bsdh.RdmaRdCompl:
		if err := o.takeRead(m.Bytes, inv, s.cfg.Memory); err != nil {
			return err
		}
		o.hint(m.Flags)
		s.settleWrites()
	case bsdh.SendSm:
		if err := o.takeRefusal(o.cancel.sent && s.credits.acked(o.cancel.seq), s.cfg.Memory); err != nil {
			return err
		}
		o.hintRefusal()
	case bsdh.RdmaWrCompl:
		if err := s.takeWritten(m.Bytes, inv); err != nil {
			return err
		}
		o.hint(m.Flags)
	case bsdh.ModeChange:
		return s.takeMode(m.Change)
	case bsdh.SrcAvailCancel:
		if k.takeCancel() && !k.flight.isEmpty() {
			s.credits.hold(m.Seq)
		}
	case bsdh.SinkAvailCancel:
		if !o.window.open {
			o.takeSinkCancel()
		}
	case bsdh.SinkCancelAck:
		if k.cancel.sent && s.credits.acked(k.cancel.seq) {
			k.endAdverts(s.cfg.Memory)
		}
	case bsdh.DisConn:
		s.takeDisConn()
	case bsdh.AbortConn:
		s.close(OutReset, ErrReset) // the DisConn before it counts no more (§8.2.2)
	case bsdh.ChRcvBuf:
		void, err := s.size.takeRequest(m.Bytes, s.cfg.Role, s.credits.acked(s.size.askedSeq))
		if void {
			s.peer.recvBytes = s.size.before
		}
		return err
	case bsdh.ChRcvBufAck:
		if err := s.size.takeAnswer(m.Bytes); err != nil {
			return err
		}
		s.peer.recvBytes = m.Bytes
	case bsdh.SuspComm:
		err := s.susp.take(m, &s.cfg)
		if s.susp.due { // not one that crossed ours and is disregarded
			s.deadline = now.Add(s.cfg.SuspendTimeout)
		}
		return err
	case bsdh.SuspCommAck:
		if !s.susp.sent {
			return violation(UnexpectedMessage, "unexpected %v", m.MID)
		}
		s.suspend()
	case bsdh.Hello, bsdh.HelloAck:
		return violation(UnexpectedMessage, "%v on an established connection", m.MID)
	}
	return nil
}

func (s *Socket) takeSrc(now time.Time, m *bsdh.Message) error {
	k := &s.snk
	if s.src.sinks.n+k.srcs.n >= s.cfg.MaxAdverts {
		return violation(TooManyAdverts, "more than %d adverts", s.cfg.MaxAdverts)
	}
	if k.adv > 0 {
		k.dropSrcs()
	}
	return k.takeSrc(&m.Advert, uint32(len(m.Payload)), now)
}

// takeWritten takes an RdmaWrCompl (§9.3), which is about the oldest buffer that we advertised. An RdmaWrCompl of 0 bytes gives the
// buffer back unused, and its Read goes on waiting: to end it with no bytes would look like the end of the stream. This is possible
// only if no second buffer is advertised. The peer would fill that one next, so a later Read would get bytes before an earlier one.
func (s *Socket) takeWritten(n uint32, inv *rdma.RKey) error {
	k := &s.snk
	if k.adv == 0 {
		return violation(NoAdvert, "RdmaWrCompl of %d bytes without an advert", n)
	}
	r := k.reads.at(0)
	switch {
	case n > r.Len:
		return violation(BeyondAdvert, "RdmaWrCompl of %d bytes, advertised were %d", n, r.Len)
	case inv != nil && *inv != r.key:
		return violation(WrongKey, "RdmaWrCompl invalidates key %#x, advertised was %#x", *inv, r.key)
	case n == 0 && k.adv > 1:
		return violation(UnexpectedMessage, "RdmaWrCompl of 0 bytes while %d buffers are advertised", k.adv)
	}
	if n == 0 {
		k.endAdverts(s.cfg.Memory) // it is the only one
		return nil
	}
	done := k.popAdvert(s.cfg.Memory)
	s.out.put(Output{Kind: OutRead, ID: done.ID, Len: n})
	return nil
}

// takeMode takes a ModeChange (§12). There are four: three of the sender of a stream, and from Buffered to Combined
// of its receiver.
func (s *Socket) takeMode(c bsdh.ModeWord) error {
	o, k := &s.src, &s.snk
	switch {
	case c.Send && o.mode == bsdh.Buffered && c.Mode == bsdh.Combined:
		o.mode, o.want, o.refusals = bsdh.Combined, bsdh.Combined, 0
	case !c.Send && k.mode == bsdh.Combined && c.Mode == bsdh.Pipelined:
		k.mode = bsdh.Pipelined
	case !c.Send && k.mode == bsdh.Combined && c.Mode == bsdh.Buffered && k.srcs.isEmpty():
		k.mode = bsdh.Buffered
	case !c.Send && k.mode == bsdh.Pipelined && c.Mode == bsdh.Combined:
		k.mode = bsdh.Combined
		k.endAdverts(s.cfg.Memory)
	default:
		return violation(WrongMode, "change to %v mode of our %s, which is in %v", c.Mode,
			map[bool]string{true: "sending half", false: "receiving half"}[c.Send], map[bool]bsdh.Mode{true: o.mode, false: k.mode}[c.Send])
	}
	return nil
}

// deliver gives to the program what is there for it.
func (s *Socket) deliver() {
	k := &s.snk
	for k.adv == 0 && !k.reads.isEmpty() {
		r := k.reads.at(0)
		urgent := s.fill(r)
		more := r.Fill && s.state != StateClosed || k.canRead(&s.cfg)
		over := r.got == r.Len || urgent || r.got > 0 && !more && k.held.isEmpty()
		eof := k.done && k.held.isEmpty()
		if r.asked > 0 || !over && !eof {
			break
		}
		s.out.put(Output{Kind: OutRead, ID: r.ID, Len: r.got, Urgent: urgent, EOF: eof && r.got == 0})
		k.reads.pop()
	}
	if k.cancel.wanted && k.adv == 0 && k.flight.isEmpty() {
		for !k.reads.isEmpty() {
			r := k.reads.pop()
			s.out.put(Output{Kind: OutRead, ID: r.ID, Len: r.got, Canceled: true})
		}
		k.cancel.wanted = false
	}
}

// fill copies held payload into a Read. It ends behind an out-of-band byte, and says so.
func (s *Socket) fill(r *pendingRead) (urgent bool) {
	k := &s.snk
	for !k.held.isEmpty() && r.got < r.Len {
		p := k.held.at(0)
		n := min(p.len, r.Len-r.got)
		s.out.put(Output{Kind: OutCopy, Buffer: p.buffer, From: p.off, ID: r.ID, Offset: uint64(r.got), Len: n})
		k.count.takes(p, n, n == p.len)
		if p.len, r.got = p.len-n, r.got+n; p.buffer != Kept {
			p.off += int(n)
		}
		if p.len > 0 {
			break
		}
		urgent = p.urgent
		if buffer := k.held.pop().buffer; buffer != Kept {
			s.recycle(buffer)
			s.credits.tell()
		}
		if urgent {
			break
		}
	}
	return urgent
}
