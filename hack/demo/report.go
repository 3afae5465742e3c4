// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// report is the result, also as JSON.
type report struct {
	Applications []row                `json:"applications"`
	Links        agentapi.Links       `json:"links"`
	Conns        agentapi.Conns       `json:"conns"`
	Capture      captured             `json:"capture"`
	Fallback     agentapi.Explanation `json:"fallback"`
	Killed       killed               `json:"killed"`
	Checks       []check              `json:"checks"`
	Seconds      float64              `json:"seconds"`
}

// row is one application with SMC-R.
type row struct {
	Application string `json:"application"`
	Conns       uint64 `json:"connections"`
	OnSMCR      uint64 `json:"connectionsOnSMCR"`
	ByRDMA      uint64 `json:"bytesByRDMA"`
	ByTCP       uint64 `json:"bytesByTCP"`
	Rate        rate   `json:"throughput"`
	// Plain is the same run without SMC-R, Ratio Rate to it.
	Plain rate    `json:"throughputWithoutSMCR"`
	Ratio float64 `json:"ratio"`
}

// check is a statement and whether it holds.
type check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

// captured is what tshark saw.
type captured struct {
	Files           []string `json:"files"`
	RoCEPackets     int      `json:"rocePackets"`
	RoCEPayload     uint64   `json:"roceBytesOfTransfer"`
	CLCMessages     []string `json:"clcMessages"`
	TCPPayload      uint64   `json:"tcpBytesOfTransfer"`
	TCPOther        int      `json:"tcpPacketsWithOtherData"`
	MalformedFrames []int    `json:"malformedFrames"`
}

// killed is what the death of an agent did.
type killed struct {
	ApplicationSaid string  `json:"applicationSaid"`
	DirectAfter     float64 `json:"directAfterSeconds"`
}

func (r *report) failed() []check {
	var out []check
	for _, c := range r.Checks {
		if !c.OK {
			out = append(out, c)
		}
	}
	return out
}

// writeJSON writes what this run has to say.
func (d *demo) writeJSON(w io.Writer) error {
	var v any = d.report
	if d.opts.failover {
		v = struct {
			*failovers
			Checks  []check `json:"checks"`
			Seconds float64 `json:"seconds"`
		}{&d.failovers, d.report.Checks, d.report.Seconds}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// writeTable writes the table of applications.
func writeTable(w io.Writer, rows []row) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "APPLICATION\tCONNECTIONS\tON SMC-R\tBY RDMA\tBY TCP\tTHROUGHPUT\tWITHOUT SMC-R\tRATIO")
	for _, r := range rows {
		fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%.2f\n",
			r.Application, r.Conns, r.OnSMCR, byteCount(r.ByRDMA), byteCount(r.ByTCP), r.Rate, r.Plain, r.Ratio)
	}
	return tw.Flush()
}

// String writes a rate as people read it.
func (r rate) String() string {
	if r.Unit == unitBytes {
		return byteCount(uint64(r.Value)) + "/s"
	}
	return fmt.Sprintf("%.0f %s", r.Value, r.Unit)
}

// byteCount writes a number of bytes with three or four digits.
func byteCount(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1000 && i < len(units)-1 {
		v /= 1024
		i++
	}
	digits := 0
	if v < 10 && v != float64(int(v)) {
		digits = 2
	} else if v < 100 && v != float64(int(v)) {
		digits = 1
	}
	return fmt.Sprintf("%.*f %ciB", digits, v, units[i])
}

// summary prints the result for people.
func (d *demo) summary(interrupted bool) {
	failed := d.report.failed()
	switch {
	case interrupted && len(failed) == 0:
		return
	case len(failed) == 0:
		fmt.Fprintf(d.out, "\n%d checks, all hold (%.0f s)\n", len(d.report.Checks), d.report.Seconds)
		return
	}
	fmt.Fprintf(d.out, "\n%d of %d checks do not hold:\n", len(failed), len(d.report.Checks))
	for _, c := range failed {
		fmt.Fprintf(d.out, "  %s: %s\n", c.Name, c.Detail)
	}
}
