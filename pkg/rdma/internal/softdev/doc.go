// SPDX-License-Identifier: Apache-2.0

// Package softdev is what RDMA devices in software share, whatever their wire is:
// contexts, protection domains, memory regions, completion queues, queue pair numbers,
// timers, and the ownership of queue pairs.
//
// A provider has a [Device] and gives it a function that makes queue pairs. Its own type of
// queue pair embeds a [QP] and is a [Carrier]: it has the protocol, a [Machine], and
// moves what the protocol has to send.
//
//	type qp struct {
//		softdev.QP
//		m *rocev2.QP // or another protocol
//		...          // the way to the peer
//	}
//
//	d.base = softdev.New(softdev.Config{Device: d, NewQP: d.newQP})
//
// # Who owns what
//
// Each queue pair has an owner at every moment: whoever holds its ownership word (see
// owner), by [QP.Lock]. Posting takes the queue pair if it is free and then transmits in the
// caller's goroutine; if it is not free, the work requests go to a ring that the owner
// empties before it lets go, so that posting never blocks. What is refused is refused
// before that, by the [wq.Limits] of the protocol, and for the same reasons both ways.
// All access to registered memory by the device happens while a queue pair is owned. That
// is why closing a region has only to take it out of the table and to own every queue pair
// of its domain once.
//
// A provider's receiver does the same as a poster:
//
//	q.Lock()
//	if !q.Dead() {
//		m.HandlePacket(...) // or whatever the protocol takes
//		q.Step(now)         // transmit, complete, set the timer
//	}
//	q.Unlock()              // and call those who wait for completions
//
// A completion queue has many producers under a lock and one consumer without.
//
// Locks are taken in this order: the ownership of a queue pair; Context; Device. Nobody
// waits for a queue pair with one of the other two.
//
// # What peers can guess
//
// RKeys and LKeys are 32 random bits, queue pair numbers 24 unless the provider draws them;
// none tells anything about another one, and one that is gone hardly ever comes again.
// They are found in hash tables, without a lock. The address of a region is a random one
// of its own too, and not that of its memory in the process.
package softdev
