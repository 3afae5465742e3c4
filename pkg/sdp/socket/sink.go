// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
)

// Read is a buffer of the program for what arrives.
type Read struct {
	ID     uint64
	Len    uint32
	Direct bool // registered memory: RDMA may fill it
	Fill   bool // over only when it is full (MSG_WAITALL); never advertised (§9.3)
}

// pendingRead is a Read that is not over.
type pendingRead struct {
	Read
	got   uint32
	asked uint32    // bytes behind these, which RDMA READs under way will bring
	key   rdma.RKey // if it is advertised
}

// room returns for how many bytes the Read has place beside those that have come and those that are asked for.
func (r *pendingRead) room() uint32 { return r.Len - r.got - r.asked }

// heldPayload is payload that waits for a Read in its receive buffer.
type heldPayload struct {
	buffer, off int
	len         uint32
	urgent      bool // the last byte is out-of-band data
}

// peerSrc is a SrcAvail of the peer that is not processed.
type peerSrc struct {
	key   rdma.RKey
	addr  uint64 // of what is left
	left  uint32 // bytes that have not come
	asked uint32 // bytes of left that RDMA READs under way will bring
	read  uint32 // bytes that have come and are not reported
	since time.Time
}

// sink is the Data Sink of the peer's stream. In the order of the stream come:
//
//	held     payload without a Read
//	owed     bytes that the peer must send as Data, because we refused an advert
//	srcs     what the peer offers to be read
//
// The first adv of reads are advertised to the peer; then there are no held payload, owed bytes and srcs, so
// that whatever comes next belongs into the first of them.
//
// RDMA READs are posted in the order of the stream, and complete in the order in which they were posted. Each moves bytes of one advert
// into one Read. The one that completes next is of the first advert, and into the first Read, that still have bytes asked for.
type sink struct {
	mode bsdh.Mode

	reads fifo[pendingRead]
	adv   int
	held  fifo[heldPayload]
	owed  uint32
	srcs  fifo[peerSrc]

	count       keptCount
	nonDiscards uint32
	flight      fifo[uint32] // bytes of each RDMA READ under way, oldest first
	stop        bool         // SrcAvailCancel came: read no more
	cancel      revocation
	stalls      cancelTimer
	done        bool // DisConn came
	again       bool // on a connection before this one: it comes again
}

func newSink(cfg *Config) sink {
	return sink{
		mode: bsdh.Combined, reads: newFifo[pendingRead](MaxReads),
		held: newFifo[heldPayload](4*cfg.RecvBuffers + 1), srcs: newFifo[peerSrc](cfg.MaxAdverts),
		flight: newFifo[uint32](cfg.ORD),
	}
}

// takeSrc takes a SrcAvail (§9.2, §11.3). Its payload, of n bytes, was taken as that of any other message. While a
// buffer of ours is advertised, the SrcAvail is void: the peer will write into that buffer what it offered.
func (k *sink) takeSrc(a *bsdh.Advert, n uint32, now time.Time) error {
	if k.adv > 0 {
		return nil
	}
	if k.srcs.isFull() {
		return violation(TooManyAdverts, "more than %d SrcAvails", k.srcs.n)
	}
	k.srcs.push(peerSrc{key: a.Key, addr: a.Addr + uint64(n), left: a.Len - n, since: now})
	return nil
}

// checkSrc reports a SrcAvail that the mode does not allow (§11).
func (k *sink) checkSrc(n uint32) error {
	ok := false
	switch k.mode {
	case bsdh.Buffered:
	case bsdh.Combined:
		ok = n > 0 && k.srcs.isEmpty() && k.adv == 0
	case bsdh.Pipelined:
		ok = n == 0
	}
	if !ok {
		return violation(WrongMode, "SrcAvail with %d bytes of payload in %v mode, %d adverts outstanding", n, k.mode, k.srcs.n)
	}
	return nil
}

// takeCancel takes a SrcAvailCancel, and reports whether there is something to cancel (§9.5.4).
func (k *sink) takeCancel() bool {
	k.stop = !k.srcs.isEmpty()
	return k.stop
}

// dropSrcs forgets the peer's adverts.
func (k *sink) dropSrcs() {
	for !k.srcs.isEmpty() {
		k.srcs.pop()
	}
}

// suits reports whether a Read can take what an advert still offers.
func (a *peerSrc) suits(r *pendingRead, cfg *Config) bool {
	return r.Direct && cfg.ZcopyBytes != NoZcopy && (r.room() >= a.left-a.asked || cfg.isLong(r.room()))
}

// next returns the advert of which the next RDMA READ is, and the Read into which it goes; ok is false if one of both is missing. They are
// the oldest advert of which bytes are not asked for yet, and the oldest Read that has room beside the bytes that are.
func (k *sink) next() (a *peerSrc, r *pendingRead, ok bool) {
	for i := range k.srcs.n {
		if a = k.srcs.at(i); a.left > a.asked {
			break
		}
	}
	for i := range k.reads.n {
		if r = k.reads.at(i); r.room() > 0 {
			break
		}
	}
	return a, r, a != nil && r != nil && a.left > a.asked && r.room() > 0
}

// canRead reports whether what comes next in the stream can be read into the Read that is next now, or will be.
func (k *sink) canRead(cfg *Config) bool {
	a, r, ok := k.next()
	return ok && !k.stop && k.owed == 0 && a.suits(r, cfg)
}

// arrived counts the oldest RDMA READ, which has completed.
func (k *sink) arrived() {
	n := k.flight.pop()
	a, r := k.srcs.at(0), k.reads.at(0)
	for i := 1; a.asked == 0; i++ {
		a = k.srcs.at(i)
	}
	for i := 1; r.asked == 0; i++ {
		r = k.reads.at(i)
	}
	a.addr, a.left, a.asked, a.read = a.addr+uint64(n), a.left-n, a.asked-n, a.read+n
	r.got, r.asked = r.got+n, r.asked-n
}

// reportDue reports whether RdmaRdCompl is due for the oldest advert (§9.2): all of it has come, or some of it and no more is
// under way.
func (k *sink) reportDue() bool {
	if k.srcs.isEmpty() || k.owed > 0 {
		return false
	}
	a := k.srcs.at(0)
	return a.left == 0 || a.read > 0 && k.flight.isEmpty()
}

// refuses reports whether SendSm is due for the oldest advert: the program reads into a buffer that it does not
// suit, or both peers wait for each other.
func (k *sink) refuses(now time.Time, weWait bool, cfg *Config) bool {
	if k.srcs.isEmpty() || k.stop || !k.flight.isEmpty() || k.reportDue() || k.owed > 0 {
		return false
	}
	a := k.srcs.at(0)
	if k.reads.isEmpty() {
		return weWait && !now.Before(a.since.Add(deadlockDelay))
	}
	return k.held.isEmpty() && !a.suits(k.reads.at(0), cfg)
}

// deadlockAt returns when refuses may change without an input.
func (k *sink) deadlockAt(weWait bool) (time.Time, bool) {
	if !weWait || k.srcs.isEmpty() || !k.reads.isEmpty() || k.owed > 0 || k.stop || k.srcs.at(0).left == 0 {
		return time.Time{}, false
	}
	return k.srcs.at(0).since.Add(deadlockDelay), true
}

// nextAdvert returns the Read to advertise now, if there is one (§9.3, §9.5.1, §11.3): all before it are, and
// nothing that comes earlier in the stream can come any other way.
func (k *sink) nextAdvert(cfg *Config, recvBytes uint32) (*pendingRead, bool) {
	if k.mode != bsdh.Pipelined || !k.srcs.isEmpty() || k.owed > 0 || !k.held.isEmpty() || k.cancel.wanted || k.cancel.sent || k.done ||
		k.adv == k.reads.n {
		return nil, false
	}
	r := k.reads.at(k.adv)
	return r, r.Direct && !r.Fill && r.got == 0 && r.Len > recvBytes && r.Len <= bsdh.MaxBytes && cfg.isLong(r.Len)
}

// endAdverts makes all adverts of ours worthless: their buffers are ordinary Reads again.
func (k *sink) endAdverts(m Memory) {
	for i := range k.adv {
		m.Revoke(k.reads.at(i).key)
	}
	k.adv, k.cancel.sent = 0, false
}

// popAdvert takes the oldest advertised Read out: its key is worthless, its buffer the program's.
func (k *sink) popAdvert(m Memory) pendingRead {
	r := k.reads.pop()
	m.Revoke(r.key)
	if k.adv--; k.adv == 0 {
		k.cancel.sent = false
	}
	return r
}

// prefersPipelined is what REQ_PIPE says (§6.1.2), and why we leave Buffered mode: the program posts buffers that are worth
// an advert.
func (k *sink) prefersPipelined(cfg *Config) bool {
	return !k.reads.isEmpty() && k.reads.at(0).Direct && cfg.isLong(k.reads.at(0).Len)
}
