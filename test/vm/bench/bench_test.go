// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"testing"

	"github.com/smcr-io/kube-smcr/bench/report"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// TestBench makes one short round of two measurements, and of group transparent, whose pods' paths have what proves
// them, and of group receivers, which has other guests; nobody looks at the figures. The others are the same code with other numbers.
func TestBench(t *testing.T) {
	testenv.Builds("...") // the bench, and what it builds
	l := lab.ForTest(t, lab.Config{})
	for _, tt := range []struct {
		group, only string
		paths       []string // that have to be there
	}{
		{"smcr", "round trip", []string{"RDMA WRITE", "smcr.Conn", "kernel SMC-R", "TCP"}},
		{"smcr", "64 KiB writes, 1 connection", []string{"RDMA WRITE", "smcr.Conn", "kernel SMC-R", "TCP"}},
		{"receivers", "stream", []string{"1 processor", "2 processors 1 receiver", "2 processors 2 receivers"}},
		{"transparent", "redis, 1 client", []string{"TCP", "kernel datapath", "2 agents", "1 relay", "2 relays"}},
	} {
		t.Run(tt.group+" "+tt.only, func(t *testing.T) {
			var stderr bytes.Buffer
			args := []string{"run", "github.com/smcr-io/kube-smcr/bench/guests", "-groups", tt.group, "-rounds", "1", "-time", "50ms", "-only", tt.only, "-o", "json"}
			if tt.group != "receivers" {
				args = append(args, "-vm", l.Name())
			}
			cmd := exec.CommandContext(t.Context(), "go", args...)
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v: %s", err, &stderr)
			}
			var r report.Report
			if err := json.Unmarshal(out, &r); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if len(r.Cases) == 0 {
				t.Fatal("nothing was measured")
			}
			for _, name := range tt.paths {
				found := false
				for _, s := range r.Cases[0].Series {
					found = found || s.Path == name && s.Spread.Median > 0
				}
				if !found {
					t.Errorf("%s has no figure in %s", name, out)
				}
			}
		})
	}
}
