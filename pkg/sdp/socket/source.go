// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// Write is a request of the program to send.
type Write struct {
	ID     uint64
	Len    uint32
	Direct bool // the bytes are in registered memory and stay there until the Write is over: RDMA may move them
}

// posted is a Write that is not over.
type posted struct {
	Write
	end uint64 // position behind its last byte
}

// srcAdvert is a SrcAvail of ours that is not processed.
type srcAdvert struct {
	end uint64 // position behind its last byte
	key rdma.RKey
	seq uint32 // of the message
}

// peerSink is a SinkAvail of the peer that can be used: its buffer waits for our bytes.
type peerSink struct {
	len  uint32
	key  rdma.RKey
	addr uint64
}

// source is the Data Source of our stream. Positions count the bytes of the stream.
//
//	next        behind what was sent, written, or read by the peer
//	forced      up to here all goes by Bcopy, since the peer refused an advert
//	srcs        what the peer may read: from max(next, forced) on, without gaps
//	produced    behind the last Write
//
// Bytes that an advert offered and that the peer did not read count as not sent again once the advert is forgotten: next was not
// moved for them.
//
// Potential is PotentialNonDiscards (§9.5.1). It counts messages with payload that consumed no buffer of the
// peer. The draft has it count all messages with payload, and count down for each SinkAvail that is found stale before it is used.
// Here a SinkAvail is compared when it arrives, and a live one is used by the next payload. The count is the same whenever it
// is compared, and no stale advert is kept.
type source struct {
	mode                   bsdh.Mode
	writes                 fifo[posted]
	produced, next, forced uint64

	srcs   fifo[srcAdvert]
	sinks  fifo[peerSink] // live, oldest first
	window window

	potential uint32
	flight    fifo[uint64] // where the bytes of each RDMA WRITE under way begin, oldest first
	patience  time.Time    // until when we wait for the peer's next buffer; zero: we do not
	ackDue    bool         // SinkCancelAck is due
	cancel    revocation
	stalls    cancelTimer
	urgent    urgentQueue

	reads    int // adverts in a row that the peer has read
	refusals int // and that it has refused
	want     bsdh.Mode
}

// window is open after ModeChange from Pipelined to Combined until the peer acknowledges it: until then
// SinkAvails may come that crossed it (§12.4).
type window struct {
	open      bool
	seq       uint32 // of the ModeChange
	potential uint32 // at that time
}

// revocation is a SrcAvailCancel or a SinkAvailCancel.
type revocation struct {
	wanted bool
	sent   bool
	seq    uint32
}

// cancelTimer bounds how long CancelWrites, or CancelReads, waits. A peer that never says what became of a buffer would keep the
// buffer, and the program that waits for its Write or Read, for ever. But a peer whose program takes the bytes slowly is
// not given up: each step (see progress) starts the time anew. Steps of the other direction do not count.
type cancelTimer struct {
	at   time.Time // when the peer is given up; zero: nobody waits
	seen progress
}

// progress is how far what is canceled has come.
type progress struct {
	pos     uint64 // of our stream
	adverts int
	moving  int // RDMA WRITEs or READs
}

// progress returns that of Writes: bytes sent, adverts that the peer has of us, RDMA WRITEs into its buffers.
func (o *source) progress() progress { return progress{o.next, o.srcs.n, o.flight.n} }

// progress returns that of Reads: adverts of ours, RDMA READs of what the peer offers.
func (k *sink) progress() progress { return progress{0, k.adv, k.flight.n} }

func (t *cancelTimer) isDue(now time.Time) bool { return !t.at.IsZero() && !now.Before(t.at) }

func (t *cancelTimer) update(now time.Time, p progress, waits bool) {
	switch {
	case !waits:
		*t = cancelTimer{}
	case t.at.IsZero() || t.seen != p:
		t.at, t.seen = now.Add(cancelTimeout), p
	}
}

func newSource(cfg *Config) source {
	return source{
		mode: bsdh.Combined, want: bsdh.Combined,
		writes: newFifo[posted](MaxWrites), srcs: newFifo[srcAdvert](cfg.MaxAdverts), sinks: newFifo[peerSink](cfg.MaxAdverts),
		flight: newFifo[uint64](MaxRDMAWrites), urgent: urgentQueue{fifo: newFifo[urgentByte](MaxUrgent)},
	}
}

// isIdle reports whether every byte is sent, and nothing is outstanding.
func (o *source) isIdle() bool {
	return o.next == o.produced && o.srcs.isEmpty() && o.flight.isEmpty() && !o.ackDue
}

// settled is the position up to which nobody needs the bytes any more: the peer has them, and no RDMA WRITE takes
// them out of the program's memory.
func (o *source) settled() uint64 {
	if o.flight.isEmpty() {
		return o.next
	}
	return *o.flight.at(0)
}

// awaitsSink reports whether long bytes wait for a buffer of the peer.
func (o *source) awaitsSink(cfg *Config) bool {
	return !o.patience.IsZero() && o.mode == bsdh.Pipelined && o.sinks.isEmpty() && o.srcs.isEmpty() && o.next >= o.forced && o.direct(o.next, cfg) > 0
}

// advertised is the position behind what is advertised.
func (o *source) advertised() uint64 {
	if o.srcs.isEmpty() {
		return max(o.next, o.forced)
	}
	return o.srcs.at(o.srcs.n - 1).end
}

// direct returns how much of the Write at pos RDMA may move: up to its end, or an out-of-band byte, which goes
// in a message (§9.5.3).
func (o *source) direct(pos uint64, cfg *Config) uint32 {
	for i := range o.writes.n {
		w := o.writes.at(i)
		if pos >= w.end {
			continue
		}
		if !w.Direct {
			return 0
		}
		n := uint32(min(w.end, o.urgent.before(pos, w.end)) - pos)
		if !cfg.isLong(n) {
			return 0
		}
		return n
	}
	return 0
}

// copied returns how much from next on may go in one message, as Bcopy: up to a stretch that RDMA should move,
// unless all up to forced must go so, and to an out-of-band byte, which is the last one of its message.
func (o *source) copied(room uint32, cfg *Config) (n uint32, urgent bool) {
	end := o.produced
	if o.next < o.forced {
		end = o.forced
	}
	end = min(end, o.next+uint64(room))
	if o.next >= o.forced && o.mode != bsdh.Buffered && (o.mode == bsdh.Combined || o.sinks.isEmpty()) {
		for i := range o.writes.n {
			w := o.writes.at(i)
			begin := w.end - uint64(w.Len)
			if begin >= end {
				break
			}
			if begin > o.next && o.direct(begin, cfg) > 0 {
				end = begin
				break
			}
		}
	}
	switch u, ok := o.urgent.oldest(); {
	case !ok || u.pos >= end:
	case !u.announced && u.pos-o.next >= urgentDistance:
		end = u.pos + 1 - urgentDistance // the next message announces it
	default:
		end, urgent = u.pos+1, true
	}
	return uint32(end - o.next), urgent
}

// sent counts a message with n bytes of payload (§9.5.1): the peer puts them into the oldest buffer that it
// advertised, if there is one.
func (o *source) sent(n uint32) {
	if o.sinks.isEmpty() {
		o.potential++
	} else {
		o.sinks.pop()
	}
	o.next += uint64(n)
}

// override forgets all adverts (§11.3): the peer will not read what is advertised.
func (o *source) override(m Memory) {
	for !o.srcs.isEmpty() {
		m.Revoke(o.srcs.pop().key)
	}
	o.cancel.sent = false
}

// takeSink takes a SinkAvail, and reports whether it was used. One that arrives after a ModeChange to Combined and
// before its acknowledgement is gone already, and is compared with the count of that time: what was sent later
// could not make it stale (§12.4). Only a live one shows that the peer dropped our adverts.
func (o *source) takeSink(a *bsdh.Advert, m Memory) error {
	switch {
	case o.window.open && a.NonDiscards != o.window.potential:
		o.window.potential--
		o.potential--
	case o.window.open:
		if !o.srcs.isEmpty() && !after(o.srcs.at(0).seq, o.window.seq) {
			o.override(m)
		}
	case o.mode != bsdh.Pipelined:
		return violation(WrongMode, "SinkAvail in %v mode", o.mode)
	case a.NonDiscards != o.potential:
		o.potential--
	case o.sinks.isFull():
		return violation(TooManyAdverts, "more than %d SinkAvails", o.sinks.n)
	default:
		o.sinks.push(peerSink{a.Len, a.Key, a.Addr})
		o.override(m)
	}
	return nil
}

// takeRead takes an RdmaRdCompl (§9.2), with the key that it made worthless, if any.
func (o *source) takeRead(n uint32, inv *rdma.RKey, m Memory) error {
	if o.srcs.isEmpty() || o.next < o.forced {
		return violation(NoAdvert, "RdmaRdCompl of %d bytes without an advert", n)
	}
	a := o.srcs.at(0)
	left := a.end - o.next
	switch {
	case uint64(n) > left:
		return violation(BeyondAdvert, "RdmaRdCompl of %d bytes, %d are left", n, left)
	case inv != nil && (*inv != a.key || uint64(n) < left):
		return violation(WrongKey, "RdmaRdCompl of %d bytes of %d invalidates key %#x, advertised was %#x", n, left, *inv, a.key)
	}
	o.next += uint64(n)
	if uint64(n) == left {
		m.Revoke(o.srcs.pop().key)
		o.reads, o.refusals = o.reads+1, 0
		o.endCancel()
	}
	return nil
}

// takeRefusal takes a SendSm (§9.5.2.1): of the oldest advert, whose bytes go as Data before any others. One that
// acknowledges our SrcAvailCancel ends that instead, and asks for nothing (§9.5.4).
func (o *source) takeRefusal(acked bool, m Memory) error {
	if o.cancel.sent && acked {
		o.override(m)
		return nil
	}
	if o.srcs.isEmpty() {
		return violation(NoAdvert, "SendSm without an advert")
	}
	a := o.srcs.pop()
	m.Revoke(a.key)
	o.forced = a.end
	o.reads, o.refusals = 0, o.refusals+1
	o.endCancel()
	return nil
}

// endCancel: a SrcAvailCancel is processed when there are no adverts left, however they went.
func (o *source) endCancel() {
	if o.srcs.isEmpty() {
		o.cancel.sent = false
	}
}

// takeSinkCancel takes a SinkAvailCancel (§9.5.5): RdmaWrCompl is posted for what was used, the rest is dropped, and that
// is said if there was anything.
func (o *source) takeSinkCancel() {
	o.ackDue = o.ackDue || !o.sinks.isEmpty()
	o.dropSinks()
}

// dropSinks forgets the buffers that the peer advertised.
func (o *source) dropSinks() {
	for !o.sinks.isEmpty() {
		o.sinks.pop()
	}
}

// becomeCombined leaves Pipelined mode by ModeChange number seq (§12.4).
func (o *source) becomeCombined(seq uint32) {
	o.dropSinks()
	o.mode, o.reads, o.refusals = bsdh.Combined, 0, 0
	o.window = window{open: true, seq: seq, potential: o.potential}
}

// change returns the mode to ask the peer for, if one is wanted and may be entered now (§12).
func (o *source) change() (bsdh.Mode, bool) {
	if o.window.open || o.want == o.mode {
		return 0, false
	}
	switch o.mode {
	case bsdh.Combined:
		if o.want == bsdh.Buffered && (!o.srcs.isEmpty() || o.next < o.forced) {
			return 0, false
		}
		return o.want, true
	case bsdh.Pipelined:
		return bsdh.Combined, o.flight.isEmpty() && !o.cancel.sent && !o.ackDue
	case bsdh.Buffered:
	}
	return 0, false
}

// hint takes what the peer prefers (§6.1.2).
func (o *source) hint(f bsdh.Flags) {
	if o.mode == bsdh.Combined && (f&bsdh.RequestPipelined != 0 || o.reads >= readsToPipeline) {
		o.want = bsdh.Pipelined
	}
}

// hintRefusal: SendSm asks for the next lower mode (§12).
func (o *source) hintRefusal() {
	switch {
	case o.mode == bsdh.Pipelined:
		o.want = bsdh.Combined
	case o.mode == bsdh.Combined && o.refusals >= refusalsToBuffer:
		o.want = bsdh.Buffered
	}
}

// urgentByte is an out-of-band byte that was not sent.
type urgentByte struct {
	pos       uint64
	announced bool
}

// urgentQueue are the out-of-band bytes that were not sent, oldest first (§9.5.3).
type urgentQueue struct{ fifo[urgentByte] }

func (q *urgentQueue) oldest() (*urgentByte, bool) {
	if q.isEmpty() {
		return nil, false
	}
	return q.at(0), true
}

// before returns the position of the first out-of-band byte in [pos, end), or end.
func (q *urgentQueue) before(pos, end uint64) uint64 {
	for i := range q.n {
		if u := q.at(i); u.pos >= pos && u.pos < end {
			return u.pos
		}
	}
	return end
}

// due returns the byte that the next message must announce when next is the first byte that is not sent: all in
// between, and the byte, must not be more than the distance that a receiver can tell of.
func (q *urgentQueue) due(next uint64) (*urgentByte, bool) {
	for i := range q.n {
		if u := q.at(i); !u.announced {
			return u, u.pos-next+1 <= urgentDistance
		}
	}
	return nil, false
}
