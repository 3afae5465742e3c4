// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestPathMTU(t *testing.T) {
	for bytes, want := range map[int]rdma.MTU{
		0: rdma.MTU256, 1280: rdma.MTU1024, 1500: rdma.MTU1024, 2200: rdma.MTU2048, 4200: rdma.MTU4096, 9000: rdma.MTU4096, 65536: rdma.MTU4096,
	} {
		if got := pathMTU(bytes); got != want {
			t.Errorf("interface MTU %d: path MTU %v, want %v", bytes, got, want)
		}
	}
}
