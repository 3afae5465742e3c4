// SPDX-License-Identifier: Apache-2.0

// Package wq is what the protocols of software queue pairs share around their
// work queues: completions until they are polled ([Completions]), events until
// they are told ([Events]), what a work request may ask for ([Limits]), and the
// memory that work requests and peers name ([Memory]).
//
// It is PURE. A protocol, for instance
// [github.com/smcr-io/kube-smcr/pkg/rdma/rocev2], has one of each in a queue pair;
// whoever owns the queue pair owns them. Only [Limits], which are constant, may be
// asked by everybody: so a work request that finds the queue pair busy is refused
// for the same reasons as one that does not.
//
// Nothing is allocated after [NewCompletions].
package wq
