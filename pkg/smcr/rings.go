// SPDX-License-Identifier: Apache-2.0

package smcr

// The bytes of a stream go round the whole ring of its RMBE, and of its send buffer, so a ring takes as much of the
// processors' caches as it is long while its connection moves bytes. One connection is fastest with large rings, as it
// waits less often for its peer; many of them push each other's rings out of the caches, where small ones would stay. So
// the first connections of a link group have rings of the configured sizes, and further ones smaller rings. With the
// usual sizes, and the connections that the link group has already:
//
//	 0 to  7   512 KiB
//	 8 to 15   256 KiB
//	16 and up  128 KiB
//
// A pod's memory then has room for up to four times as many connections.
const (
	// fullRings is how many connections of a link group have rings of the configured sizes.
	fullRings = 8

	// smallRing is the size below which no ring is made smaller, in bytes: what 100 Gbit/s carry in 10 us, which is about
	// a round trip in a data centre.
	smallRing = 128 << 10
)

// ringBytes is the size of a ring of the next connection of a link group that has so many: a power of two.
func ringBytes(configured, conns int) int {
	for ; conns >= fullRings && configured > smallRing; conns /= 2 {
		configured /= 2
	}
	return configured
}

// LeastConnBytes is the memory of the rings of one of very many connections of a link group, whose first ones have rings
// of the configured sizes.
func LeastConnBytes(rmbe, sendBuffer int) int {
	return min(rmbe, smallRing) + min(sendBuffer, smallRing)
}
