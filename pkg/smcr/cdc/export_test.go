// SPDX-License-Identifier: Apache-2.0

package cdc

// Same reports whether two connections are in the same state. Where the queue of messages
// in flight begins in its array is no part of that, nor what was there before.
func Same(a, b *Conn) bool {
	x, y := *a, *b
	x.sentMsgs.told, y.sentMsgs.told = a.sentMsgs.told.fromZero(), b.sentMsgs.told.fromZero()
	return x == y
}

func (q *inflight) fromZero() inflight {
	r := inflight{size: q.size}
	for i := range q.size {
		r.q[i] = q.q[(q.head+i)%MaxInflight]
	}
	return r
}
