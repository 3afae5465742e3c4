// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// flush posts all that is due and may go. What a message changes is changed when the message goes and not
// when it becomes due: what arrives in between is judged by what the peer knows.
func (s *Socket) flush(now time.Time) {
	for s.step(now) {
	}
	s.settleEnd(now)
	s.settleAbort()
	if s.state == StateOpen && s.susp.answered && s.sends.done == s.sends.posted {
		s.suspend()
	}
	s.src.stalls.update(now, s.src.progress(), s.src.cancel.wanted)
	s.snk.stalls.update(now, s.snk.progress(), s.snk.cancel.wanted)
}

// step posts one thing, and reports whether it did.
func (s *Socket) step(now time.Time) bool {
	switch s.state {
	case StateOpen:
	case StateAbort:
		return s.stepAbort()
	case StateHello: // nothing is with the peer, and a cancel needs no message
		s.endCanceledWrites()
		s.deliver()
		return false
	case StateLinger, StateClosed:
		return false
	}
	s.endCanceledWrites()
	s.deliver()
	if s.susp.isActive() {
		return s.stepSuspend(now)
	}
	return s.startRead() || s.startWrite(now) || s.stepSink(now) || s.stepSource() || s.stepResize() || s.stepModes() || s.stepOwnCancels() || s.stepAdvert() ||
		s.stepStream(now) || s.stepDisConn() || s.stepUpdate(now)
}

// maySend reports whether a message may go.
func (s *Socket) maySend(payload bool) bool {
	return s.sends.hasRoom(&s.cfg) && s.credits.allows(payload)
}

// hasRoom reports whether one more message may be posted.
func (q *sendQueue) hasRoom(cfg *Config) bool { return q.posted-q.done < uint64(cfg.SendDepth) }

// send posts a message with n bytes of our stream, from next on, as its payload. Send always returns true.
func (s *Socket) send(m bsdh.Message, n uint32) bool {
	s.credits.stamp(&m)
	s.sends.posted++
	s.out.put(Output{Kind: OutSend, Message: m, Pos: s.src.next, Len: n})
	return true
}

// sendInvalidating posts a message that ends an advert of the peer, and makes its key worthless.
func (s *Socket) sendInvalidating(m bsdh.Message, key rdma.RKey) bool {
	s.credits.stamp(&m)
	s.sends.posted++
	s.out.put(Output{Kind: OutSend, Message: m, Invalidate: true, Key: key})
	return true
}

// sendKind posts a message that is only a header.
func (s *Socket) sendKind(mid bsdh.MID) bool { return s.send(bsdh.Message{MID: mid}, 0) }

// startRead reads what the peer offers into the buffers of the program (§9.2): as much as there is of both, by no more RDMA
// READs at a time than the peer serves (§8.1.1).
func (s *Socket) startRead() bool {
	k := &s.snk
	if k.flight.n >= s.peer.reads || !k.held.isEmpty() || k.cancel.wanted || !k.canRead(&s.cfg) {
		return false
	}
	a, r, _ := k.next()
	if err := s.cfg.Memory.OpenSink(r.ID); err != nil {
		r.Direct = false
		return true
	}
	n := min(a.left-a.asked, r.room())
	s.out.put(Output{
		Kind: OutRDMARead, ID: r.ID, Offset: uint64(r.got + r.asked), Len: n, Key: a.key, Addr: a.addr + uint64(a.asked),
	})
	a.asked, r.asked = a.asked+n, r.asked+n
	k.flight.push(n)
	return true
}

// startWrite writes into the oldest buffer that the peer advertises, and posts RdmaWrCompl right behind (§9.3): the send queue
// keeps their order, so that the peer sees the bytes first, and what follows need not wait for the RDMA WRITE. That
// goes when its RdmaWrCompl may: no payload may come in between, since the peer would give it to the program in the
// same buffer.
func (s *Socket) startWrite(now time.Time) bool {
	o := &s.src
	if !o.mayWrite() || o.flight.isFull() || !s.maySend(false) {
		return false
	}
	n := o.direct(o.next, &s.cfg)
	if n == 0 {
		return false
	}
	to := o.sinks.pop()
	n = min(n, to.len)
	o.patience = now.Add(sinkDelay)
	s.out.put(Output{Kind: OutRDMAWrite, Pos: o.next, Len: n, Key: to.key, Addr: to.addr})
	o.flight.push(o.next)
	o.next += uint64(n)
	m := bsdh.Message{MID: bsdh.RdmaWrCompl, Bytes: n}
	if s.snk.prefersPipelined(&s.cfg) {
		m.Flags = bsdh.RequestPipelined
	}
	return s.sendInvalidating(m, to.key)
}

// mayWrite reports whether there is a buffer of the peer for the next bytes of our stream.
func (o *source) mayWrite() bool {
	return o.mode == bsdh.Pipelined && o.want == bsdh.Pipelined && !o.sinks.isEmpty() && !o.ackDue && o.next >= o.forced && !o.cancel.wanted
}

// stepSink tells the peer what became of its adverts.
func (s *Socket) stepSink(now time.Time) bool {
	k := &s.snk
	// §9.5.4 holds the acknowledgement of SrcAvailCancel back until what is under way is finished. That is when it
	// is read: were it when it is reported, two peers with one credit and none could wait for each other, since
	// no message gives credit whose acknowledgement is held back.
	s.credits.holds = s.credits.holds && !k.flight.isEmpty()
	switch {
	case k.reportDue():
		return s.maySend(false) && s.reportRead()
	case k.stop && k.flight.isEmpty():
		switch {
		case k.srcs.isEmpty():
			k.stop = false
			return true
		case !s.maySend(false):
			return false
		}
		k.stop = false
		k.dropSrcs()
		return s.sendKind(bsdh.SendSm)
	case k.refuses(now, s.waits(), &s.cfg):
		if !s.maySend(false) {
			return false
		}
		k.owed = k.srcs.pop().left
		return s.sendKind(bsdh.SendSm)
	}
	return false
}

// waits reports whether our stream waits for the peer's program: for an advert to be read, or for the receive buffers that
// hold what nobody reads.
func (s *Socket) waits() bool {
	return !s.src.srcs.isEmpty() || s.src.next < s.src.produced && !s.credits.allows(true)
}

// reportRead sends RdmaRdCompl for what was read of the oldest advert since the last one (§9.2).
func (s *Socket) reportRead() bool {
	k := &s.snk
	a := k.srcs.at(0)
	m := bsdh.Message{MID: bsdh.RdmaRdCompl, Bytes: a.read}
	if k.prefersPipelined(&s.cfg) {
		m.Flags = bsdh.RequestPipelined
	}
	if a.read = 0; a.left > 0 {
		return s.send(m, 0)
	}
	return s.sendInvalidating(m, k.srcs.pop().key)
}

// stepSource tells the peer what became of the buffers that it advertised.
func (s *Socket) stepSource() bool {
	o := &s.src
	if !o.ackDue || s.credits.holds || !s.maySend(false) {
		return false
	}
	// RdmaWrCompl of all that was used is before this one: the peer takes all back when it sees it. It tells late answers from
	// others by the acknowledgement in them, so this one must not go while the acknowledgement is held back.
	o.ackDue = false
	return s.sendKind(bsdh.SinkCancelAck)
}

// stepModes changes the modes of both directions where that is ours to do (§12).
func (s *Socket) stepModes() bool {
	o, k := &s.src, &s.snk
	if k.mode == bsdh.Buffered && k.prefersPipelined(&s.cfg) && !k.done && s.maySend(false) {
		k.mode = bsdh.Combined
		return s.send(bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: bsdh.Combined, Send: true}}, 0)
	}
	to, ok := o.change()
	if !ok || s.end.finSent || !s.maySend(false) {
		return false
	}
	s.send(bsdh.Message{MID: bsdh.ModeChange, Change: bsdh.ModeWord{Mode: to}}, 0)
	if o.mode == bsdh.Pipelined {
		o.becomeCombined(s.credits.sent)
		return true
	}
	o.mode, o.reads, o.refusals = to, 0, 0
	return true
}

// stepOwnCancels takes back adverts of ours (§9.5.4, §9.5.5).
func (s *Socket) stepOwnCancels() bool {
	o, k := &s.src, &s.snk
	if o.cancel.wanted && !o.cancel.sent && !o.srcs.isEmpty() && s.maySend(false) {
		s.sendKind(bsdh.SrcAvailCancel)
		o.cancel.sent, o.cancel.seq = true, s.credits.sent
		return true
	}
	if k.cancel.wanted && !k.cancel.sent && k.adv > 0 && s.maySend(false) {
		s.sendKind(bsdh.SinkAvailCancel)
		k.cancel.sent, k.cancel.seq = true, s.credits.sent
		return true
	}
	return false
}

// adverts is how many more adverts we may have outstanding (§6.2.1.3).
func (s *Socket) adverts() int {
	return min(s.peer.maxAdverts, s.cfg.MaxAdverts) - s.src.srcs.n - s.snk.adv
}

// stepAdvert advertises a buffer of the program (§9.3). What we have to send anyhow may go with it, if that is all
// of it: the Transaction mechanism (§9.4).
func (s *Socket) stepAdvert() bool {
	k := &s.snk
	r, ok := k.nextAdvert(&s.cfg, s.size.forAdverts())
	if !ok || s.adverts() <= 0 || !s.maySend(false) {
		return false
	}
	key, addr, err := s.cfg.Memory.AdvertiseRead(r.ID, r.Len)
	if err != nil {
		r.Direct = false
		return true
	}
	r.key = key
	k.adv++
	m := bsdh.Message{MID: bsdh.SinkAvail, Advert: bsdh.Advert{Len: r.Len, Key: key, Addr: addr, NonDiscards: k.nonDiscards}}
	n := s.rider()
	s.send(m, n)
	s.sentStream(n)
	return true
}

// rider is how much of our stream goes with a SinkAvail: all of it, or nothing.
func (s *Socket) rider() uint32 {
	if !s.mayStream() || !s.maySend(true) || !s.src.srcs.isEmpty() {
		return 0
	}
	n, urgent := s.src.copied(s.room(bsdh.SinkAvailLen), &s.cfg)
	if urgent || s.src.next+uint64(n) != s.src.produced || s.src.next < s.src.forced || s.src.direct(s.src.next, &s.cfg) > 0 {
		return 0
	}
	return n
}

// room is how many bytes of payload fit into a message with headers of a length.
func (s *Socket) room(headers uint32) uint32 { return min(s.peer.recvBytes, s.cfg.SendBytes) - headers }

// mayStream reports whether bytes of our stream may go at all, by a message or an advert.
func (s *Socket) mayStream() bool {
	o := &s.src
	return !o.ackDue && (!o.cancel.wanted || o.next < o.forced) && !s.end.finSent
}

// stepStream sends bytes of our stream, or offers them (§9, §11).
func (s *Socket) stepStream(now time.Time) bool {
	o := &s.src
	if !now.Before(o.patience) {
		o.patience = time.Time{}
	}
	copies := s.mayStream() && o.srcs.isEmpty() && s.maySend(true) && o.direct(o.next, &s.cfg) == 0
	if u, ok := o.urgent.due(o.next); ok && !copies && s.maySend(false) {
		u.announced = true
		return s.send(bsdh.Message{MID: bsdh.Data, Flags: bsdh.OOBPending}, 0)
	}
	switch {
	case !s.mayStream() || o.next == o.produced:
		return false
	case o.next < o.forced:
		return s.sendData()
	case o.mode == bsdh.Buffered:
		return s.sendData()
	case o.mode == bsdh.Pipelined && !o.sinks.isEmpty():
		// What is worth an RDMA WRITE, and may go so, waits for one that is under way.
		return (!o.mayWrite() || o.direct(o.next, &s.cfg) == 0) && s.sendData()
	case o.cancel.wanted || o.cancel.sent || o.awaitsSink(&s.cfg):
		return false
	case !o.srcs.isEmpty():
		return o.mode == bsdh.Pipelined && s.sendSrc()
	}
	return s.sendSrc() || o.srcs.isEmpty() && s.sendData()
}

// sendSrc offers the next stretch of our stream for the peer to read (§9.2): in Combined mode with its first bytes,
// in Pipelined mode without.
func (s *Socket) sendSrc() bool {
	o := &s.src
	pos := o.advertised()
	n := o.direct(pos, &s.cfg)
	if n == 0 || s.adverts() <= 0 {
		return false
	}
	n = min(n, bsdh.MaxBytes)
	var inline uint32
	if o.mode == bsdh.Combined {
		inline = min(srcInline, n-1, s.room(bsdh.SrcAvailLen))
	}
	if !s.maySend(inline > 0) {
		return false
	}
	key, addr, err := s.cfg.Memory.AdvertiseStream(pos, n)
	if err != nil {
		return false
	}
	m := bsdh.Message{MID: bsdh.SrcAvail, Advert: bsdh.Advert{Len: n, Key: key, Addr: addr}}
	s.send(m, inline)
	o.srcs.push(srcAdvert{end: pos + uint64(n), key: key, seq: s.credits.sent})
	s.sentStream(inline)
	return true
}

// sendData sends the next bytes of our stream as a message (§9.1).
func (s *Socket) sendData() bool {
	o := &s.src
	if !s.maySend(true) {
		return false
	}
	n, urgent := o.copied(s.room(bsdh.HeaderLen), &s.cfg)
	m := bsdh.Message{MID: bsdh.Data}
	if u, ok := o.urgent.due(o.next); ok {
		m.Flags |= bsdh.OOBPending
		u.announced = true
	}
	if urgent {
		m.Flags |= bsdh.OOBPresent
		o.urgent.pop()
	}
	s.send(m, n)
	s.sentStream(n)
	return true
}

// sentStream counts n bytes of our stream that went with a message.
func (s *Socket) sentStream(n uint32) {
	if n > 0 {
		s.src.sent(n)
		s.settleWrites()
	}
}

// settleWrites gives back Writes of which the peer has all bytes, or will have them whatever becomes of the memory.
func (s *Socket) settleWrites() {
	o := &s.src
	for !o.writes.isEmpty() && o.writes.at(0).end <= o.settled() {
		w := o.writes.pop()
		s.out.put(Output{Kind: OutWritten, ID: w.ID, Len: w.Len})
	}
}

// endCanceledWrites gives back all Writes once CancelWrites may: nothing of them is offered, under way or owed.
func (s *Socket) endCanceledWrites() {
	o := &s.src
	if !o.cancel.wanted || o.cancel.sent || !o.srcs.isEmpty() || !o.flight.isEmpty() || o.next < o.forced {
		return
	}
	o.cancel.wanted = false
	s.returnWrites()
	o.produced = o.next
}

// returnWrites gives back all Writes with as many bytes as the peer has.
func (s *Socket) returnWrites() {
	o := &s.src
	for !o.writes.isEmpty() {
		w := o.writes.pop()
		begin := w.end - uint64(w.Len)
		s.out.put(Output{Kind: OutWritten, ID: w.ID, Len: uint32(min(max(o.next, begin), w.end) - begin), Canceled: true})
	}
	for !o.urgent.isEmpty() {
		o.urgent.pop()
	}
}

// stepUpdate gives credit by a message without payload (§10.4).
func (s *Socket) stepUpdate(now time.Time) bool {
	waits := s.mayStream() && s.src.next < s.src.produced && (s.src.srcs.isEmpty() || s.src.next < s.src.forced)
	due := s.credits.updateDue(now)
	return (s.credits.prodDue(now, waits) || due) && s.maySend(false) && s.sendKind(bsdh.Data)
}
