// SPDX-License-Identifier: Apache-2.0

package plot

// The picture, in pixels. On the left are the labels of values, above the plot are title
// and legend, below it sizes or numbers of connections, and how all was measured.
const (
	width, height = 760, 460

	left, right = 64, width - 24
	top, bottom = 106, height - 76
)

const (
	// edge keeps dots off the borders of the plot.
	edge = 28
	// beside is how far dots of one place are apart.
	beside = 7
	// legendLetter is about what a letter of the legend takes, and legendRoom what its dot and a gap do.
	legendLetter, legendRoom = 7.2, 38
	// maxFine is the range of values up to which each decade has three lines.
	maxFine = 300
)
