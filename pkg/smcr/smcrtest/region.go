// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// region is a registered RMB.
type region struct {
	addr     uint64
	mem      []byte
	element  uint32   // bytes
	owners   []string // connection of each element, "" when free
	keys     []uint32 // by RNIC or, at the kernel's model, by link
	shift    []uint64 // what the RNIC adds to addr; nil for nothing
	life     []int    // of the RNIC that keys are for
	last     []string // connection that held each element before, at an engine
	released bool     // deregistered: nothing may arrive any more
}

// window is where a connection may be written: what its reader has of the
// stream, and what its writer may know of that.
type window struct {
	key  byte
	ring cdc.Ring
	base uint32 // of the element in the region
	// told is what the writer may have heard was read, prod what the reader
	// was told is there.
	told, prod uint64
}

// check says whether bytes written at an offset of the element destroy bytes
// that the reader still has to read, or are not of the stream. A writer that
// sends bytes again may repeat the stream one lap of the ring back: the reader
// may have read those bytes already.
func (v window) check(off uint32, b []byte) error {
	lap := uint64(v.ring.Capacity())
	start := v.ring.Offset(v.told)
	pos := v.told + (uint64(off)+lap-uint64(start))%lap
	for i, c := range b {
		p := pos + uint64(i)
		if p >= v.told+lap {
			p -= lap // past the end of the window is its beginning
		}
		if c == streamByte(v.key, p) || p >= v.prod && p >= lap && c == streamByte(v.key, p-lap) {
			continue
		}
		if p < v.prod {
			return fmt.Errorf("over unread byte %d: told %d, there are %d", p, v.told, v.prod)
		}
		return fmt.Errorf("byte %d is 0x%02x, want 0x%02x", p, c, streamByte(v.key, p))
	}
	return nil
}

// errLate: the connection has just ended here.
var errLate = errors.New("the connection is over")

// place is an RDMA write into the region on behalf of a connection, of which
// view tells the window if it still has one.
func (r *region) place(conn string, addr uint64, b []byte, origin uint32, view func() (window, bool)) error {
	if r.released {
		return errors.New("the RMB is deregistered")
	}
	if addr < r.addr || addr+uint64(len(b)) > r.addr+uint64(len(r.mem)) {
		return fmt.Errorf("0x%x+%d is outside the RMB at 0x%x", addr, len(b), r.addr)
	}
	off := uint32(addr - r.addr)
	i := off / r.element
	switch {
	case len(b) == 0:
		return errors.New("nothing to write")
	case (off+uint32(len(b))-1)/r.element != i:
		return errors.New("more than one RMBE")
	case off%r.element < origin:
		return errors.New("into the eye catcher")
	case r.owners[i] == "" && r.last != nil && r.last[i] == conn:
		// The peer fails over and says again what it had said before its last
		// word, while our answer to that is on its way. It may not be given
		// to another connection in this time. Or it is a packet of a link that
		// is lost, which something has held up.
		copy(r.mem[off:], b)
		return errLate
	case r.owners[i] != conn:
		return fmt.Errorf("into the RMBE of %q", r.owners[i])
	}
	if v, ok := view(); ok {
		if err := v.check(off-v.base, b); err != nil {
			return err
		}
	}
	copy(r.mem[off:], b)
	return nil
}
