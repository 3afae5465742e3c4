// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// The bytes of a stream go round the whole ring of its RMBE, and of its send buffer, so a ring takes as much of the
// processors' caches as it is long while its connection moves bytes. One connection is fastest with large rings, as it
// waits less often for its peer; many of them push each other's rings out of the caches, where small ones would stay. So
// the first connections of a link group have rings of the configured sizes, and further ones smaller rings. On devices in
// software, where each wait costs a wake of both sides, the very first ones have larger rings: see [group.growRings]. With
// the usual sizes, and the connections that the link group has already:
//
//	             RNIC      software
//	 0 and 1    512 KiB     2 MiB
//	 2 and 3    512 KiB     1 MiB
//	 4 to  7    512 KiB   512 KiB
//	 8 to 15    256 KiB   256 KiB
//	16 and up   128 KiB   128 KiB
//
// A pod's memory then has room for up to four times as many connections.
const (
	// fullRings is how many connections of a link group have rings of the configured sizes.
	fullRings = 8

	// smallRing is the size below which no ring is made smaller, in bytes: what 100 Gbit/s carry in 10 us, which is about
	// a round trip in a data centre.
	smallRing = 128 << 10

	// largeRing is the size of the largest rings, in bytes. RFC 7609 A.2.3 ends at 512 KiB.
	largeRing = 2 << 20

	// GrowthShare is the part of a budget that may be in use while rings are larger than configured.
	GrowthShare = 4
)

// ringSizes are those of one kind of rings of a link group: configured, and the largest, which is that or a
// few times as much.
type ringSizes struct{ configured, largest int }

// of is the size of a ring of the next connection of a link group that has so many: a power of two.
func (r ringSizes) of(conns int) int {
	size, full := r.largest, fullRings*r.configured/r.largest
	for ; conns >= full && size > smallRing; conns /= 2 {
		size /= 2
	}
	return size
}

// growRings gives the link group's first connections larger rings than the RFC's largest, if all of that holds:
//
//   - its devices are in software: an RNIC wakes nobody for a window, and pins all of the memory
//   - both sides speak version 2. Linux, which has up to 512 MiB, takes them, and so do we; peers of version 1
//     are told what RFC 7609 has
//   - the configured sizes are the RFC's largest: who has chosen smaller ones has a reason
//   - with an RMB and a send buffer of that size less than a quarter of the budgets is in use: three quarters stay for
//     connections as they are configured, however many peers a pod has
func (g *group) growRings(unpinned bool) {
	if !unpinned || g.version < clc.V2 || !g.mayGrow() {
		return
	}
	for _, r := range []*ringSizes{&g.rmbeSizes, &g.sendSizes} {
		if r.configured == clc.MaxRMBESizeV1.Bytes() {
			r.largest = largeRing
		}
	}
}

func (g *group) mayGrow() bool { return g.s.account.spare() >= (firstRMBEs+1)*largeRing }

// shrinkRings has no more rings grow. It reports whether some did until now.
func (g *group) shrinkRings() bool {
	grew := g.rmbeSizes.largest > g.rmbeSizes.configured || g.sendSizes.largest > g.sendSizes.configured
	g.rmbeSizes.largest, g.sendSizes.largest = g.rmbeSizes.configured, g.sendSizes.configured
	return grew
}

// LeastConnBytes is the memory of the rings of one of very many connections of a link group, whose first ones have rings
// of the configured sizes.
func LeastConnBytes(rmbe, sendBuffer int) int {
	return min(rmbe, smallRing) + min(sendBuffer, smallRing)
}
