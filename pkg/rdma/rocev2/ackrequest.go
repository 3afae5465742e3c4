// SPDX-License-Identifier: Apache-2.0

package rocev2

// ackRequest decides which packets ask the peer to acknowledge (AckReq).
type ackRequest struct {
	since uint64 // packets since the last one that asked
	force bool   // the next packet asks
}

// next counts a packet of a window of wnd packets, and reports whether the packet should
// ask, so that the window slides.
func (a *ackRequest) next(wnd uint64) bool {
	a.since++
	return a.force || a.since >= max(1, wnd/4)
}

// asked notes that a packet asked.
func (a *ackRequest) asked() { a.since, a.force = 0, false }

// again makes the next packet ask: after a go-back, whose end nobody else would report.
func (a *ackRequest) again() { a.since, a.force = 0, true }
