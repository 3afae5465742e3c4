// SPDX-License-Identifier: Apache-2.0

// Package report is what a comparison of network paths found: values of each
// path and round, the ratios within rounds, and what was to be reached. It is
// printed as a table or as JSON.
//
// # Who owns what
//
// A Report and its Cases belong to one goroutine: Add is called for each path
// in each round, Judge once at the end.
//
// # Limitations
//
// Values of the same index are taken to be of the same round: a path that fails
// in one round has to end the run.
package report
