// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"os/exec"
	"strings"
	"testing"
)

// decoded is what tshark says about a capture.
type decoded struct {
	requests, replies int            // of MPA
	opcodes           map[string]int // FPDUs by their RDMAP opcode
	strange           []string       // frames that it does not understand
}

// tshark runs tshark over a capture and returns the fields of each frame. It is told not
// to guess what the users of RDMA say to each other: it takes some of that for NFS and SMB.
func tshark(t *testing.T, pcap, filter string, fields ...string) (rows [][]string) {
	t.Helper()
	args := []string{"-n", "-r", pcap, "-2", "-Y", filter, "-T", "fields", "-E", "separator=|", "-E", "occurrence=a", "--disable-protocol", "rpcordma", "--disable-protocol", "smb_direct"}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	cmd := exec.CommandContext(t.Context(), "tshark", args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark: %v: %s", err, stderr.String())
	}
	for line := range strings.Lines(string(out)) {
		row := strings.Split(strings.TrimRight(line, "\n"), "|")
		if len(row) != len(fields) {
			t.Fatalf("tshark wrote %q, want %d fields", line, len(fields))
		}
		rows = append(rows, row)
	}
	return rows
}

// decode looks at every frame with data of TCP, all of which is iWARP. What tshark puts
// together with later frames it shows with those.
func decode(t *testing.T, pcap string) *decoded {
	t.Helper()
	d := &decoded{opcodes: map[string]int{}}
	for _, row := range tshark(t, pcap, "tcp.len > 0", "frame.number", "frame.protocols", "_ws.malformed", "tcp.reassembled_in", "tcp.analysis.retransmission", "iwarp_mpa.key.req", "iwarp_mpa.key.rep", "iwarp_rdma.opcode") {
		iwarp := strings.Contains(row[1], ":iwarp_mpa")
		if row[2] != "" || strings.Contains(row[1], "malformed") || !iwarp && row[3] == "" && row[4] == "" {
			d.strange = append(d.strange, strings.Join(row, " "))
		}
		if row[5] != "" {
			d.requests++
		}
		if row[6] != "" {
			d.replies++
		}
		if row[7] != "" {
			for op := range strings.SplitSeq(row[7], ",") {
				d.opcodes[op]++
			}
		}
	}
	return d
}
