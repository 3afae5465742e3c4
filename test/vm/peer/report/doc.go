// SPDX-License-Identifier: Apache-2.0

// Package report is what the program test/vm/peer prints: one JSON object per
// line, each with one of the fields of a [Line] set. [Read] reads a whole
// output, and [Report.Check] looks at what must hold in any of them.
//
// # Who owns what
//
// These are values. The program writes them in a guest, package drive reads
// them outside.
//
// # Limitations
//
// The program of another commit may print something else: both ends are meant
// to be built from one tree.
package report
