// SPDX-License-Identifier: Apache-2.0

// Package cm is the interface to connect queue pairs on a device that opens its TCP connections itself. Such a device is an iWARP adapter,
// whose kernel or firmware has the socket from the first SYN on, so that no program can send a byte before RDMA. What the programs
// tell each other during the set-up is the private data of MPA's Request and Reply (RFC 5044 §7.1).
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
// A queue pair belongs to its user, who takes it to INIT, and posts receives, before it is connected. To close it ends its
// connection. Whoever gets a [Request] accepts or rejects it, once.
//
// # Limitations
//
// Connections of iWARP only. An iWARP responder may not send before the initiator has. Whether an adapter that is the initiator sends
// an empty message by itself, so that the responder can send at once (RFC 6581 §9), is a setting of the adapter that programs cannot
// see. A protocol in which the responder speaks first lets the initiator's program send something before.
package cm
