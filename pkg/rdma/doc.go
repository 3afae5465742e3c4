// SPDX-License-Identifier: Apache-2.0

// Package rdma is the verbs vocabulary of kube-smcr: the types and interfaces
// of a reliable-connected (RC) RDMA provider, in the words of the InfiniBand
// Architecture (IBTA) and of libibverbs.
//
// It is PURE: it holds no sockets, no clocks and no goroutines. Providers are
// shells that implement it: [github.com/smcr-io/kube-smcr/pkg/rdma/soft] in
// software over UDP, others on hardware. The conformance suite that every
// provider passes is in [github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest].
//
// # Who owns what
//
// A [Device] is shared by everyone. Open gives a [Context]; what is made from
// a context (PD, CQ, QP, MR) belongs to it and dies with it. One goroutine at
// a time posts to a QP and one at a time polls a CQ; they may be different
// goroutines. Verbs never block: what cannot be done now returns an error
// ([ErrQueueFull]) or less than was asked for. The one exception is Modify to RTR on a
// [PathResolver], which may have to wait for an address; ResolvePath does that beforehand.
//
// # Memory
//
// Work requests address registered memory by (address, length, key), never by
// Go pointers. Registered memory is mapped outside the Go heap by
// [PD.AllocMR]; the device writes into it while the program reads it. The
// program may read bytes that a work completion announced: the completion,
// taken from the CQ by Poll, orders the device's writes before the reads.
//
// # Completions
//
// Poll until it returns fewer than asked, Arm, poll once more (a completion
// may have come in between), then wait on Notify. Notify is a channel, so it
// waits in the Go scheduler without a thread; providers with a completion
// file descriptor feed it from the network poller. OnNotify, in place of Notify, saves the
// switch to a waiting goroutine: the provider's own goroutine calls a function of the user's.
package rdma
