// SPDX-License-Identifier: Apache-2.0

// Package verbs runs the tests of pkg/rdma/verbs in a guest, on a soft RoCE
// device: the conformance suite of providers, alone and beside load, the limits and errors of
// a device, and its removal while it is used.
package verbs
