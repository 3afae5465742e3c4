// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma/rocev2"
)

func TestSegmentable(t *testing.T) {
	pkt := func(sizes ...int) (p []rocev2.TxPacket) {
		for _, s := range sizes {
			p = append(p, rocev2.TxPacket{HdrLen: 12, PayloadLen: s - 12 - rocev2.ICRCLen})
		}
		return p
	}
	for _, c := range []struct {
		name  string
		sizes []int
		most  int
		want  int
	}{
		{"one", []int{100}, 64, 1},
		{"equal", []int{100, 100, 100}, 64, 3},
		{"last shorter", []int{100, 100, 60, 60}, 64, 3},
		{"next longer", []int{100, 116}, 64, 1},
		{"limit", []int{100, 100, 100}, 2, 2},
		{"no segmentation", []int{100, 100}, 1, 1},
		{"bytes", []int{4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112, 4112}, 64, 15},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := segmentable(pkt(c.sizes...), c.most); got != c.want {
				t.Errorf("of %v %d make one message, want %d", c.sizes, got, c.want)
			}
		})
	}
}
