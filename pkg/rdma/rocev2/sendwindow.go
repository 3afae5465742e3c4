// SPDX-License-Identifier: Apache-2.0

package rocev2

// sendWindow is where the requester stands in its PSNs.
//
//	una -------------- nxt ---------------- max ---------------- post
//	     outstanding        sent before,         not yet sent
//	                        to be sent again
//
// nxt is behind max after a go-back only.
type sendWindow struct {
	una  uint64 // oldest PSN not acknowledged
	nxt  uint64 // next PSN to send
	max  uint64 // one after the highest PSN sent
	post uint64 // first PSN of the next work request posted
}

// start begins with a PSN.
func (w *sendWindow) start(psn uint64) { w.una, w.nxt, w.max, w.post = psn, psn, psn, psn }

// stop takes everything posted as sent and acknowledged.
func (w *sendWindow) stop() { w.una, w.nxt, w.max = w.post, w.post, w.post }

// outstanding is the number of PSNs that were sent and are not acknowledged.
func (w *sendWindow) outstanding() uint64 { return w.nxt - w.una }

// awaits reports whether the PSN was sent and is not acknowledged, also if it was sent
// before a go-back only.
func (w *sendWindow) awaits(psn uint64) bool { return psn >= w.una && psn < w.max }

// reserve gives the next n PSNs to a work request, and returns the first and the last.
func (w *sendWindow) reserve(n uint64) (first, last uint64) {
	first, last = w.post, w.post+n-1
	w.post = last + 1
	return first, last
}

// sent moves nxt, and reports whether the PSN that was sent is a repetition.
func (w *sendWindow) sent(nxt uint64) bool {
	again := w.nxt < w.max
	w.nxt = nxt
	w.max = max(w.max, nxt)
	return again
}

// acked moves una. It reports whether nxt had to follow: the peer acknowledged what was
// to be sent again after a go-back.
func (w *sendWindow) acked(una uint64) bool {
	w.una = una
	if w.nxt >= una {
		return false
	}
	w.nxt = una
	return true
}
