// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// linuxReceiving is how far the kernel's model has come with the stream that the peer writes
// into its RMB.
//
//	told <= cons <= peerProd <= told + size
type linuxReceiving struct {
	size                 uint32 // of the RMB
	peerProd, cons, told place32
	unread               int
	consumed             uint64
	urgentCame           bool // the peer waits until the urgent byte is read
	peerFlags            cdc.Flags
}

// gain checks a producer cursor against what is unread, and returns how many bytes are new.
func (r *linuxReceiving) gain(prod cdc.Cursor) (int, error) {
	n := fromCursor(prod).minus(r.peerProd, r.size)
	if prod.Count >= r.size || r.unread+n > int(r.size) {
		return 0, fmt.Errorf("producer cursor %v after %v, %d unread", prod, r.peerProd, r.unread)
	}
	return n, nil
}

// checkTold checks a producer cursor against what the peer knows to be read.
func (r *linuxReceiving) checkTold(prod cdc.Cursor) error {
	if fromCursor(prod).minus(r.told, r.size) > int(r.size) {
		return fmt.Errorf("producer cursor %v passes the consumer cursor %v", prod, r.told)
	}
	return nil
}

// take takes n new bytes up to the producer cursor.
func (r *linuxReceiving) take(prod cdc.Cursor, n int) {
	r.peerProd = fromCursor(prod)
	r.unread += n
}

// takeFlags takes what the flags say about the stream.
func (r *linuxReceiving) takeFlags(f cdc.Flags) {
	r.peerFlags = f
	r.urgentCame = r.urgentCame || f.UrgentPresent()
}

// read takes the next byte out of the RMB, which must be that of the stream with the key;
// otherwise read returns both, and takes nothing.
func (r *linuxReceiving) read(mem []byte, key byte) (got, want byte) {
	if got, want = mem[r.cons.count], streamByte(key, r.consumed); got == want {
		r.cons = r.cons.plus(r.size, 1)
		r.consumed++
		r.unread--
	}
	return got, want
}

// window is where the peer may write.
func (r *linuxReceiving) window(key byte) window {
	return window{
		key: key, ring: cdc.Ring{Size: r.size},
		told: r.consumed - uint64(r.cons.minus(r.told, r.size)), prod: r.consumed + uint64(r.unread),
	}
}

// updateDue is the kernel's rule for telling how far it has read.
func (r *linuxReceiving) updateDue() bool {
	gain := r.cons.minus(r.told, r.size)
	limit := max(int(r.size)/10, linuxMinUpdate)
	senderFree := int(r.size) - r.peerProd.minus(r.told, r.size)
	return gain > limit && (senderFree <= int(r.size)/2 || r.peerFlags.WriterBlocked())
}
