// SPDX-License-Identifier: Apache-2.0

// Package softtest has the network that tests of software devices use.
//
// [Fabric] is in memory and has faults that come from a seed: loss, duplication,
// reordering, corruption, delay and one-way cuts. It has no clock of its own, so that in a
// synctest bubble a long timeout costs nothing.
//
// # Limitations
//
// The order in which two goroutines use the fabric is the scheduler's, so the
// same seed gives the same faults to each sender's packets, but not always the
// same run.
package softtest
