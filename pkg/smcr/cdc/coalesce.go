// SPDX-License-Identifier: Apache-2.0

package cdc

// coalescing is what the application wants of small pieces of data: that they wait, for a
// time that the owner keeps, until they can travel with more (§4.5.2).
type coalescing struct {
	below   uint32 // less data than this waits for Flush
	flushed uint64 // up to here data does not wait
}

// isOn reports whether data that follows position sent may have to wait.
func (k *coalescing) isOn(sent uint64) bool { return k.below > 0 && k.flushed <= sent }

// holds reports whether n bytes that follow position sent wait.
func (k *coalescing) holds(n uint32, sent uint64) bool { return n < k.below && k.flushed <= sent }
