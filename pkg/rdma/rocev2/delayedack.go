// SPDX-License-Identifier: Apache-2.0

package rocev2

import "time"

// delayedACK is an ACK that is due, and waits for a request that goes the same way and takes it along: in a
// dialogue the answer, which saves both sides a wake-up, and in a stream the message that the reader
// has made room. But a sender may wait for the ACK before it goes on, and does not say so. So the ACK goes
// at once if a full packet asks for it, as the last one of a window does; for the second message of a
// stream; and when it stands for more packets than common peers have in their windows.
//
//	SEND asks, answered by a SEND                  one packet back
//	... WRITE, SEND asks, WRITE ... SEND asks      at the second
//	... WRITE, WRITE asks                          at once
type delayedACK struct {
	due    bool      // an ACK is to be sent
	urgent bool      // and not to wait for company
	at     time.Time // when it has waited long enough; zero: it does not wait
	// What came since it is due.
	bytes int
	pkts  int
	sends int // of them, packets of SENDs

	patience patience
}

// becomeUrgent makes an ACK due that waits for nothing.
func (a *delayedACK) becomeUrgent() { a.due, a.urgent = true, true }

// isUrgent reports whether the ACK goes even if nothing else does.
func (a *delayedACK) isUrgent() bool { return a.due && a.urgent }

// received takes a packet into account after which an ACK is due, of n bytes. It may wait for d; 0:
// not at all. asksForWindow says that the packet asks for an ACK and is full.
func (a *delayedACK) received(now time.Time, d time.Duration, n int, send, asksForWindow bool) {
	a.patience.received(now, d, a.pkts)
	a.pkts++
	a.bytes += n
	if send {
		a.sends++
	}
	sends := maxKeptPackets + 2
	if a.bytes > maxDelayedBytes {
		sends = 1
	}
	if d == 0 || asksForWindow || a.sends > sends || a.pkts > maxHeldPackets {
		a.urgent = true
	} else if a.at.IsZero() && !a.urgent {
		a.at = now.Add(a.patience.delay(d))
	}
}

// keep reports whether a request may leave without the ACK.
func (a *delayedACK) keep() bool { return a.patience.keep(a.pkts) }

// expire makes the ACK urgent when it has waited long enough.
func (a *delayedACK) expire(now time.Time) {
	if a.at.IsZero() || now.Before(a.at) {
		return
	}
	a.at, a.urgent = time.Time{}, true
	a.patience.expired(now, a.pkts)
}

// sent notes that the ACK has left.
func (a *delayedACK) sent() {
	*a = delayedACK{patience: a.patience}
	a.patience.kept = 0
}

// stop lets an ACK that is due wait no longer. There will be no other.
func (a *delayedACK) stop() {
	due := a.due
	a.sent()
	a.due, a.urgent = due, due
}

// patience finds out whether the peer goes on without our ACKs. In a dialogue
// whose next question needs only the answer, the ACK beside each answer is a
// packet for nothing, which may even wake the peer once more; one ACK does for
// several questions. But a peer may also wait for the completion of its sends
// before it goes on. So ACKs are kept back on trial. If the peer is silent until
// the timer sends one, and then goes on at once, it has waited: ACKs go along
// with each answer again for a while, longer each time. The while is short if the peer
// has gone on without ACKs many times before. Such a peer rarely waits, or it was silent
// for another reason, such as a program that got no processor, and went on at once by
// chance.
type patience struct {
	lazy    bool
	kept    int       // packets of the ACK without which an answer last went; 0: none did
	goesOn  int       // how often the peer went on after an answer without an ACK since it was last found to wait
	suspect time.Time // when the timer sent an ACK after such silence; zero: nothing to judge
	eager   int       // ACKs that went with answers since the last trial
	pause   int       // how many have to before the next one
}

const (
	// maxKeptPackets is how many packets one ACK may stand for. Linux's SMC-R
	// has 16 SENDs under way on a link and then waits.
	maxKeptPackets = 12
	// keptDelays is how many ACKDelays an ACK is kept back at most; it must
	// stay below the probe time of a peer of our kind.
	keptDelays = 3
	// minPause and maxPause bound the ACKs between two trials. A trial in vain
	// costs the peer one delay.
	minPause = 64
	maxPause = 1 << 14
	// enoughGoesOn is how often a peer goes on without an ACK until what that saved, for each some 10 us, is more than a
	// trial in vain costs.
	enoughGoesOn = 512
)

func (p *patience) delay(d time.Duration) time.Duration {
	if p.lazy {
		return keptDelays * d
	}
	return d
}

// keep reports whether an answer may leave without the ACK for the pkts
// packets before it.
func (p *patience) keep(pkts int) bool {
	if p.lazy {
		if pkts > maxKeptPackets {
			return false
		}
		p.kept = pkts
		return true
	}
	p.eager++
	p.lazy = p.eager > max(p.pause, minPause)
	return false
}

// expired is told when the timer sends the ACK for pkts packets.
func (p *patience) expired(now time.Time, pkts int) {
	if p.kept != 0 && p.kept == pkts { // silence since the answer
		p.suspect = now
	}
}

// received judges a trial by the next packet, before which an ACK for pkts packets was due.
func (p *patience) received(now time.Time, d time.Duration, pkts int) {
	switch {
	case p.suspect.IsZero():
		if p.kept != 0 && p.kept == pkts { // the first one since the answer
			p.goesOn++
		}
	case now.Sub(p.suspect) < d:
		p.pause = min(2*max(p.pause, minPause), maxPause)
		if p.goesOn >= enoughGoesOn {
			p.pause = 0
		}
		p.lazy, p.eager, p.goesOn = false, 0, 0
	default: // it had nothing to say
		p.pause = 0
	}
	p.suspect = time.Time{}
}
