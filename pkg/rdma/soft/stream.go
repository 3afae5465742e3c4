// SPDX-License-Identifier: Apache-2.0

package soft

import "time"

const (
	// streamBytes is how much arrives at once, at least, in a stream: less is a dialogue, and others
	// look for its answers.
	streamBytes = 16 << 10
	// streamPause is how much time there is at most between two arrivals of a stream. With
	// datagrams of 64 KiB it is one of 5 Gbit/s: a slower one lets the processor sleep.
	streamPause = 100 * time.Microsecond
	// streamPoll is how long the receiver looks for what follows in a stream.
	streamPoll = 50 * time.Microsecond
	// streamTurn is how long the receiver looks in a stream without any sleep.
	streamTurn = 500 * time.Microsecond
)

// stream tells when bulk data arrives without a pause. Its receiver is as fast as its sender or faster, and would
// sleep after each piece of it. To look for the next one takes less than to sleep: the processor goes idle, the sender
// has to wake it for each piece, which takes the sender longer than the piece does, and so the receiver sleeps
// all the more. While it looks it yields to the goroutines that read what came. But as long as a goroutine is ready to
// run, a program on one processor does not ask the network poller about others' sockets: these would wait for some 10 ms,
// until Go's monitor asks. So in a stream that does not end the receiver sleeps after each streamTurn, if only for a moment.
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
