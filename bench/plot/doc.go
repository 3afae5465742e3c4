// SPDX-License-Identifier: Apache-2.0

// Package plot draws what a comparison of network paths found, as SVG: a line for each
// path, over what was swept.
//
//	err := plot.Write(dir, report)
//
// Both axes are logarithmic. A dot is the median of the rounds, a whisker goes from their
// minimum to their maximum. Dots of one place are drawn side by side, so that no whisker
// hides another one. Paths differ in colour and in the form of their dots. Colours follow
// the reader's scheme, light or dark.
//
// # Who owns what
//
// The report is the caller's, and read only.
//
// # Limitations
//
// Values are above zero, which all that is measured in rounds is.
package plot
