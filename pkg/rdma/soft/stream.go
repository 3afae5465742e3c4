// SPDX-License-Identifier: Apache-2.0

package soft

import "time"

const (
	// streamBytes is the least that arrives at once in a stream. Less is a dialogue: whether to look for its
	// answers is for the user to say (rdma.IdlePoller).
	streamBytes = 16 << 10
	// streamPause is the longest time between two arrivals of a stream. With datagrams of 64 KiB that is
	// 5 Gbit/s: in a slower stream the processor sleeps.
	streamPause = 100 * time.Microsecond
	// streamPoll is how long the receiver looks for what follows in a stream.
	streamPoll = 50 * time.Microsecond
	// streamTurn is how long the receiver looks in a stream without any sleep.
	streamTurn = 500 * time.Microsecond
)

// stream tells when bulk data arrives without a pause. The receiver then looks for the next piece at once, and does not sleep.
// If it slept after each piece, as a receiver does that is as fast as its sender, the processor would go idle, and the sender
// would have to wake it for each piece. This takes the sender longer than the piece itself, so that the receiver would sleep
// all the more. While the receiver looks it yields to the goroutines that read what came.
//
// In a stream that does not end the receiver sleeps after each streamTurn, if only for a moment. For as long as a goroutine is
// ready to run, a program on one processor does not ask the network poller about other sockets, and these would wait for some
// 10 ms, until Go's monitor asks.
type stream struct {
	last  time.Time // when something of that size arrived
	until time.Time // look until then; zero: sleep
	awake time.Time // since when the stream has not slept; zero: it sleeps, or has not begun
}

// arrived takes note of n bytes that arrived.
func (s *stream) arrived(now time.Time, n int) {
	if n < streamBytes {
		return
	}
	if s.awake.IsZero() {
		s.awake = now
	}
	s.until = time.Time{}
	if now.Sub(s.last) < streamPause {
		s.until = now.Add(streamPoll)
	}
	s.last = now
}

// goesOn reports whether more of the stream may arrive in a moment. If not, the receiver sleeps.
func (s *stream) goesOn(now time.Time) bool {
	if now.After(s.until) || now.Sub(s.awake) > streamTurn {
		s.until, s.awake = time.Time{}, time.Time{}
	}
	return !s.until.IsZero()
}
