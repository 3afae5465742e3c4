// SPDX-License-Identifier: Apache-2.0

package siw

import (
	"os/exec"
	"strings"
	"testing"
)

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
