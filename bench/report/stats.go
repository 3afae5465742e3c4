// SPDX-License-Identifier: Apache-2.0

package report

import (
	"math"
	"slices"
	"time"
)

// Spread is what several rounds gave.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf sums up values; it is zero without any.
func SpreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	v := slices.Sorted(slices.Values(values))
	mid := v[len(v)/2]
	if len(v)%2 == 0 {
		mid = (mid + v[len(v)/2-1]) / 2
	}
	return Spread{Median: mid, Min: v[0], Max: v[len(v)-1]}
}

// ratios divides round by round: other work on the machine hits both values of
// a round, so that their ratio says more than the ratio of two medians. Rounds
// in which either is missing are left out.
func ratios(values, base []float64) []float64 {
	var r []float64
	for i := range min(len(values), len(base)) {
		if q := values[i] / base[i]; base[i] > 0 && values[i] > 0 && !math.IsInf(q, 0) {
			r = append(r, q)
		}
	}
	return r
}

// Quantile returns the q-Quantile by the nearest-rank rule and sorts d.
func Quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	rank := int(math.Ceil(q * float64(len(d))))
	return d[min(max(rank, 1), len(d))-1]
}
