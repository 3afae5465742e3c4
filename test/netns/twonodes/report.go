// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// Findings are what [Applications] found out, also as JSON.
type Findings struct {
	Applications []Row                `json:"applications"`
	Links        agentapi.Links       `json:"links"`
	Conns        agentapi.Conns       `json:"conns"`
	Capture      Captured             `json:"capture"`
	Fallback     agentapi.Explanation `json:"fallback"`
	Killed       Killed               `json:"killed"`
}

// Row is one application with SMC-R.
type Row struct {
	Application string `json:"application"`
	Conns       uint64 `json:"connections"`
	OnSMCR      uint64 `json:"connectionsOnSMCR"`
	ByRDMA      uint64 `json:"bytesByRDMA"`
	ByTCP       uint64 `json:"bytesByTCP"`
	Rate        Rate   `json:"throughput"`
	// Plain is the same run without SMC-R, Ratio Rate to it.
	Plain Rate    `json:"throughputWithoutSMCR"`
	Ratio float64 `json:"ratio"`
}

// Captured is what tshark saw.
type Captured struct {
	Files           []string `json:"files"`
	RoCEPackets     int      `json:"rocePackets"`
	RoCEPayload     uint64   `json:"roceBytesOfTransfer"`
	CLCMessages     []string `json:"clcMessages"`
	TCPPayload      uint64   `json:"tcpBytesOfTransfer"`
	TCPOther        int      `json:"tcpPacketsWithOtherData"`
	MalformedFrames []int    `json:"malformedFrames"`
}

// Killed is what the death of an agent did.
type Killed struct {
	ApplicationSaid string  `json:"applicationSaid"`
	DirectAfter     float64 `json:"directAfterSeconds"`
}

// table is the table of applications.
func table(rows []Row) string {
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(tw, "APPLICATION\tCONNECTIONS\tON SMC-R\tBY RDMA\tBY TCP\tTHROUGHPUT\tWITHOUT SMC-R\tRATIO")
	for _, r := range rows {
		_, _ = fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%s\t%s\t%s\t%.2f\n",
			r.Application, r.Conns, r.OnSMCR, byteCount(r.ByRDMA), byteCount(r.ByTCP), r.Rate, r.Plain, r.Ratio)
	}
	_ = tw.Flush() // a builder takes everything
	return b.String()
}

// String writes a rate as people read it.
func (r Rate) String() string {
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
