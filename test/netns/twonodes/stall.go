// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// longestGap is the longest time between two arrivals of which the second one
// came after from, with to as the last one: what an application that waits for
// data would have waited. The times are in order.
func longestGap(arrivals []time.Duration, from, to time.Duration) time.Duration {
	first, _ := slices.BinarySearch(arrivals, from)
	last := from
	if first > 0 {
		last = arrivals[first-1]
	}
	longest := time.Duration(0)
	for _, at := range arrivals[first:] {
		if at >= to {
			break
		}
		longest = max(longest, at-last)
		last = at
	}
	return max(longest, to-last)
}

// median is the middle one, the larger of the two middle ones.
func median(ds []time.Duration) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	ds = slices.Sorted(slices.Values(ds))
	return ds[len(ds)/2]
}

// target is how long an application may stall.
type target struct{ median, worst time.Duration }

// times is a target on a machine that is so many times as busy.
func (t target) times(slack int) target {
	n := time.Duration(max(1, slack))
	return target{t.median * n, t.worst * n}
}

// FaultRow is what one kind of fault did, over all its repetitions.
type FaultRow struct {
	Fault string `json:"fault"`
	// Runs of which Died ended with a connection that was reset.
	Runs int `json:"runs"`
	Died int `json:"died"`
	// Stalls are the longest gaps of the probes, one for each run.
	Stalls []Millis `json:"stallMilliseconds"`
	// Mended are the same, after the fault was mended.
	Mended []Millis `json:"mendedMilliseconds"`
	// Redundant is how long it took until there were two links again, Alone
	// how often that did not happen.
	Redundant []Millis `json:"redundantMilliseconds"`
	Alone     int      `json:"notRedundant"`
	target    target
}

// Millis is a duration that is written in milliseconds.
type Millis time.Duration

// MarshalJSON implements json.Marshaler.
func (m Millis) MarshalJSON() ([]byte, error) {
	return json.Marshal(math.Round(time.Duration(m).Seconds()*10_000) / 10)
}

func durations(ms []Millis) []time.Duration {
	out := make([]time.Duration, len(ms))
	for i, m := range ms {
		out[i] = time.Duration(m)
	}
	return out
}

// reached says whether the applications came through as they should.
func (r *FaultRow) reached() bool {
	stalls := durations(r.Stalls)
	return r.Runs > 0 && r.Died == 0 && r.Alone == 0 &&
		(r.target == target{} || median(stalls) <= r.target.median && slices.Max(stalls) <= r.target.worst)
}

// stallText is a row in words.
func (r *FaultRow) stallText() string {
	if r.Runs == 0 {
		return "did not run"
	}
	stalls := durations(r.Stalls)
	text := fmt.Sprintf("stall %s median, %s worst of %d", ms(median(stalls)), ms(slices.Max(stalls)), r.Runs)
	if r.target != (target{}) {
		text += fmt.Sprintf(" (target %s, %s)", ms(r.target.median), ms(r.target.worst))
	}
	if r.Died > 0 {
		text += fmt.Sprintf("; the connections died in %d of them", r.Died)
	}
	if r.Alone > 0 {
		text += fmt.Sprintf("; there were no two links again %d times", r.Alone)
	}
	return text
}

func ms(d time.Duration) string {
	if d < 10*time.Millisecond {
		return fmt.Sprintf("%.1f ms", d.Seconds()*1000)
	}
	return fmt.Sprintf("%.0f ms", d.Seconds()*1000)
}

// faultTable is the table of faults.
func faultTable(rows []*FaultRow) string {
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tw, "FAULT\tRUNS\tDIED\tSTALL MEDIAN\tWORST\tTARGET\tREACHED\tWHEN MENDED\tTWO LINKS AFTER")
	for _, r := range rows {
		if r.Runs == 0 {
			_, _ = fmt.Fprintf(tw, "%s\t0\t-\t-\t-\t-\tno\t-\t-\n", r.Fault)
			continue
		}
		stalls, mended, two := durations(r.Stalls), durations(r.Mended), durations(r.Redundant)
		goal, reached := "-", "-"
		if r.target != (target{}) {
			goal, reached = fmt.Sprintf("%s, %s", ms(r.target.median), ms(r.target.worst)), "no"
			if r.reached() {
				reached = "yes"
			}
		}
		worst := func(ds []time.Duration) string {
			if len(ds) == 0 {
				return "-"
			}
			return ms(slices.Max(ds))
		}
		again := worst(two)
		if r.Alone > 0 {
			again = "never"
		}
		_, _ = fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n",
			r.Fault, r.Runs, r.Died, ms(median(stalls)), ms(slices.Max(stalls)), goal, reached, worst(mended), again)
	}
	_ = tw.Flush() // a builder takes everything
	return b.String()
}
