// SPDX-License-Identifier: Apache-2.0

package cdc

// coalescing says which small pieces of data wait until they can travel with more data
// (§4.5.2). The owner of the connection measures how long.
type coalescing struct {
	below   uint32 // less data than this waits for Flush
	flushed uint64 // up to here data does not wait, whatever for
}

// isFlushed reports whether some of the data that follows position sent does not wait.
func (k *coalescing) isFlushed(sent uint64) bool { return k.flushed > sent }

// isOn reports whether data that follows position sent may have to wait.
func (k *coalescing) isOn(sent uint64) bool { return k.below > 0 && !k.isFlushed(sent) }

// delays reports whether n bytes that follow position sent wait.
func (k *coalescing) delays(n uint32, sent uint64) bool { return n < k.below && !k.isFlushed(sent) }
