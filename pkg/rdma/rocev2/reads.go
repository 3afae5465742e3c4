// SPDX-License-Identifier: Apache-2.0

package rocev2

// span is the PSNs [start, end).
type span struct{ start, end uint64 }

// readState is the READs of the requester: the requests that are sent and not answered,
// and the memory of the READ that is being answered.
type readState struct {
	spans [MaxReads]span // of the requests, in order
	n     int
	buf   []byte
	ready bool // buf is the memory of the oldest work request
}

// isFull reports whether no other request may be sent before an answer, where most may
// wait for one.
func (s *readState) isFull(most uint8) bool { return s.n >= int(most) }

// add notes that a request was sent.
func (s *readState) add(r span) {
	s.spans[s.n] = r
	s.n++
}

// goBack forgets the requests that are sent again when the PSN is the next one.
func (s *readState) goBack(psn uint64) {
	for s.n > 0 && s.spans[s.n-1].end > psn {
		s.n--
	}
}

// acked forgets the requests that are answered when una is the oldest PSN that is not.
func (s *readState) acked(una uint64) {
	drop := 0
	for drop < s.n && s.spans[drop].end <= una {
		drop++
	}
	s.n = copy(s.spans[:], s.spans[drop:s.n])
}

// forgetMemory drops the memory that was resolved.
func (s *readState) forgetMemory() { s.buf, s.ready = nil, false }
