// SPDX-License-Identifier: Apache-2.0

package smcr

import "sync/atomic"

// streams say how far the two byte streams of a connection over SMC-R have come, and whether
// they have ended. The positions are those of package cdc:
//
//	our stream     0 ..... completed ..... produced
//	                  sent            to be sent
//
//	peer's stream  0 ..... announced ..... consumed ..... peerProduced
//	                 known to the peer   read        unread
//
// The writer stores produced, the reader consumed, and the holder of the turn the others,
// which may be on another processor: so the two groups have a cache line each, and share it
// with nothing else.
type streams struct {
	_            [64]byte
	produced     atomic.Uint64 // with endOfStream
	consumed     atomic.Uint64
	_            [64]byte
	completed    atomic.Uint64
	peerProduced atomic.Uint64
	announced    atomic.Uint64
	flags        atomic.Uint32
	_            [64]byte
}

// endOfStream, in produced, says that nothing may follow: CloseWrite ends a
// Write under way, as with TCP, and does not wait for it.
const endOfStream = 1 << 63

// The flags are what the holder of the turn tells reader and writer.
const (
	flagPeerDone    uint32 = 1 << iota // no more data will come
	flagAborted                        // the connection was reset
	flagPeerBlocked                    // the peer waits for window
	flagReset                          // the connection did not end in order
	flagPeerUrgent                     // the peer has urgent data that it could not write yet
	flagGroupLost                      // it was reset because its link group ended
)

// has reports whether one of the flags is set.
func (s *streams) has(flags uint32) bool { return s.flags.Load()&flags != 0 }

// written is the position up to which the application wrote.
func (s *streams) written() uint64 { return s.produced.Load() &^ endOfStream }

// produce moves the end of our stream on by n bytes; false: CloseWrite or Close came first.
// The caller is the only writer.
func (s *streams) produce(n int) bool {
	pos := s.written()
	return s.produced.CompareAndSwap(pos, pos+uint64(n))
}

// end ends our stream.
func (s *streams) end() { s.produced.Or(endOfStream) }

// ended reports whether our stream has its end.
func (s *streams) ended() bool { return s.produced.Load()&endOfStream != 0 }

// unread is the reader's position, and how many bytes have arrived behind it.
func (s *streams) unread() (pos, n uint64) {
	pos = s.consumed.Load()
	return pos, s.peerProduced.Load() - pos
}
