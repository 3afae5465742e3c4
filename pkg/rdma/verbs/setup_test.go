// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"errors"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// A device with one SGE for a receive, as erdma, would refuse each queue pair.
func TestDeviceLimits_enough(t *testing.T) {
	for sge, want := range map[int]string{1: "at most 1 SGE, receives need 2", 2: "", 30: ""} {
		err := deviceLimits{sge: sge}.enough()
		if want == "" && err != nil || want != "" && (!errors.Is(err, rdma.ErrNotSupported) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d SGE: %v, want %q", sge, err, want)
		}
	}
}
