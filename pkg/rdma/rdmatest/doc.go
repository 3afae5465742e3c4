// SPDX-License-Identifier: Apache-2.0

// Package rdmatest has what tests of RDMA providers and of their users need.
//
// [TestProvider] is the conformance suite: every provider passes it between
// two of its devices. A test in a synctest bubble, where subtests are not
// allowed, takes the cases from [Cases].
//
// [Fabric] is an in-memory network for software devices with faults that come
// from a seed: loss, duplication, reordering, corruption, delay and one-way
// cuts. It has no clock of its own, so that in a synctest bubble a long
// timeout costs nothing.
//
// [Pair] connects two queue pairs the short way, for tests of other packages.
//
// # Limitations
//
// The order in which two goroutines use the fabric is the scheduler's, so the
// same seed gives the same faults to each sender's packets, but not always the
// same run.
package rdmatest
