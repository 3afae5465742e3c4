// SPDX-License-Identifier: Apache-2.0

// Package cm says how queue pairs are connected on a device that opens connections of TCP itself: an iWARP adapter, whose
// kernel or firmware has the socket from the first SYN on. No program sees a byte of the stream before RDMA; what peers tell each other
// meanwhile is the private data of MPA's Request and Reply (RFC 5044 §7.1).
//
//	c, err := dev.Dial(ctx, qp, to, cm.Options{PrivateData: hello})
//
//	l, err := dev.Listen(at)
//	r, err := l.Accept(ctx)
//	err = r.Accept(ctx, qp, cm.Options{})
//
// It is only interfaces, so that users of such devices need not import their provider, which is C: pkg/rdma/verbs implements them
// by the kernel's rdma_cm.
//
// # Who owns what
//
// A queue pair stays its user's, who takes it to INIT and posts receives before it is connected; closing it ends its
// connection. A [Request] is to be accepted or rejected, once.
//
// # Limitations
//
// Connections of iWARP only. Whether an initiator sends a message of its own first, so that the responder may send at once
// (RFC 6581 §9), is the adapter's setting: a responder whose protocol depends on it waits for a message of its peer.
package cm
