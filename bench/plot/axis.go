// SPDX-License-Identifier: Apache-2.0

package plot

import (
	"fmt"
	"math"
	"slices"
)

// axis places values on a logarithmic scale between two coordinates.
type axis struct {
	low, high float64 // values
	from, to  float64 // their coordinates
}

// at returns the coordinate of a value.
func (a axis) at(v float64) float64 {
	if a.high <= a.low {
		return (a.from + a.to) / 2 // there is one value only
	}
	return a.from + (a.to-a.from)*math.Log(v/a.low)/math.Log(a.high/a.low)
}

// tick is a line of the grid.
type tick struct {
	Value float64
	Label string
}

// decades returns the ticks around values, and the axis that they span: 1, 2 and 5 of
// each decade, or only powers of ten if that would be many.
func decades(values []float64, from, to float64) (axis, []tick) {
	least, most := slices.Min(values), slices.Max(values)
	steps := []float64{1, 2, 5}
	if most/least > maxFine {
		steps = steps[:1]
	}
	var all []float64
	for e := math.Floor(math.Log10(least)); e <= math.Ceil(math.Log10(most)); e++ {
		for _, s := range steps {
			all = append(all, s*math.Pow(10, e))
		}
	}
	// What lies outside of the values goes, but for the next one on either side.
	first, last := 0, len(all)-1
	for first+1 < len(all) && all[first+1] <= least {
		first++
	}
	for last-1 > first && all[last-1] >= most {
		last--
	}
	ticks := make([]tick, 0, last-first+1)
	for _, v := range all[first : last+1] {
		ticks = append(ticks, tick{v, plain(v)})
	}
	return axis{all[first], all[last], from, to}, ticks
}

// plain prints a round number.
func plain(v float64) string { return fmt.Sprintf("%.12g", v) }

// bytes prints a size that is a power of two.
func bytes(v float64) string {
	switch {
	case v >= 1<<20:
		return plain(v/(1<<20)) + " MiB"
	case v >= 1<<10:
		return plain(v/(1<<10)) + " KiB"
	}
	return plain(v) + " B"
}
