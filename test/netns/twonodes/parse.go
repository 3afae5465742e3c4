// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// Rate is what an application calls its speed.
type Rate struct {
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
}

// Units of rates.
const (
	unitBytes    = "B/s"
	unitRequests = "requests/s"
)

// parseCurl reads what curl wrote about a transfer: bytes and bytes per second,
// after what it complained about.
func parseCurl(s string) (outcome, error) {
	var o outcome
	var speed float64
	s = strings.TrimSpace(s)
	if n, err := fmt.Sscanf(s[strings.LastIndexByte(s, '\n')+1:], "%d %g", &o.bytes, &speed); n != 2 || err != nil {
		return outcome{}, fmt.Errorf("curl said %q, want bytes and bytes per second", s)
	}
	o.rate = Rate{speed, unitBytes}
	return o, nil
}

// parseRedis reads the CSV output of redis-benchmark. The commands ran one
// after the other with the same number of requests, so the rate of all is the
// harmonic mean.
func parseRedis(s string) (Rate, error) {
	r := csv.NewReader(strings.NewReader(s))
	r.FieldsPerRecord = -1
	rows, err := r.ReadAll()
	if err != nil {
		return Rate{}, fmt.Errorf("output of redis-benchmark: %w", err)
	}
	var seconds, tests float64
	for _, row := range rows {
		if len(row) < 2 || row[1] == "rps" {
			continue // a warning, or the heading
		}
		rps, err := strconv.ParseFloat(row[1], 64)
		if err != nil || rps <= 0 {
			return Rate{}, fmt.Errorf("redis-benchmark: %s has the rate %q", row[0], row[1])
		}
		seconds += 1 / rps
		tests++
	}
	if tests == 0 {
		return Rate{}, fmt.Errorf("redis-benchmark gave no result: %q", s)
	}
	return Rate{tests / seconds, unitRequests}, nil
}

// parseIperf reads the JSON output of iperf3's client.
func parseIperf(s string) (outcome, error) {
	var v struct {
		Error string `json:"error"`
		End   struct {
			Received *struct {
				Bytes uint64  `json:"bytes"`
				Bits  float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		return outcome{}, fmt.Errorf("output of iperf3: %w", err)
	}
	if v.Error != "" {
		return outcome{}, fmt.Errorf("iperf3: %s", v.Error)
	}
	if v.End.Received == nil || v.End.Received.Bytes == 0 {
		return outcome{}, fmt.Errorf("iperf3 moved nothing")
	}
	return outcome{rate: Rate{v.End.Received.Bits / 8, unitBytes}, bytes: v.End.Received.Bytes}, nil
}

// unprivileged says whether /proc/PID/status is of a process that has no
// privileges and cannot get any.
func unprivileged(status string) bool {
	want := map[string]string{
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000",
		"CapBnd": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1",
	}
	rootless := false
	for line := range strings.Lines(status) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		value = strings.TrimSpace(value)
		if key == "Uid" {
			rootless = len(strings.Fields(value)) == 4
			for _, id := range strings.Fields(value) {
				rootless = rootless && id != "0"
			}
		}
		if want[key] == value {
			delete(want, key)
		}
	}
	return rootless && len(want) == 0
}
