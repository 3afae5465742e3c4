// SPDX-License-Identifier: Apache-2.0

package cdc

import (
	"errors"
	"fmt"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// Cursor is a place in an RMBE as CDC messages give it (RFC 7609 A.4): an
// offset and how often the writer went past the end.
type Cursor struct {
	Wrap  uint16 // wraps to 0
	Count uint32 // from Ring.Origin up to, not including, Ring.Size
}

func (c Cursor) String() string { return fmt.Sprintf("%d:%d", c.Wrap, c.Count) }

// ErrStale says that a cursor is behind the one it was compared with: it is
// old news, to be ignored, unless the messages are known to be in order.
var ErrStale = errors.New("cdc: cursor goes backwards")

// CursorError reports a cursor that no correct peer can send.
type CursorError struct {
	Ring     Ring
	From, To Cursor
}

func (e *CursorError) Error() string {
	return fmt.Sprintf("cdc: cursor %v after %v is impossible in an RMBE of %d bytes with data from %d: want at most %d bytes ahead",
		e.To, e.From, e.Ring.Size, e.Ring.Origin, e.Ring.Capacity())
}

// Ring is the geometry of an RMBE. Cursors run from Origin to Size and then
// start at Origin again.
//
// With RMBE eye catchers, as RFC 7609 4.3 has them, Origin is 4; without,
// as with Linux, it is 0. Size is the whole RMBE, eye catcher included.
//
// A position is the number of bytes of the stream before a byte, which never
// wraps in practice. Ring turns positions into cursors and back.
type Ring struct {
	Origin, Size uint32
}

// Origins of a [Ring].
const (
	OriginLinux uint32 = 0
	OriginRFC   uint32 = 4
)

// EyeCatcher is "RMBE" in EBCDIC: the first bytes of an RMBE whose Origin is OriginRFC
// (RFC 7609 4.3).
const EyeCatcher = "\xd9\xd4\xc2\xc5"

// Capacity returns how many bytes of data fit.
func (r Ring) Capacity() uint32 { return r.Size - r.Origin }

// Start returns the cursor of position 0.
func (r Ring) Start() Cursor { return Cursor{Count: r.Origin} }

// Cursor returns the cursor of a position.
func (r Ring) Cursor(pos uint64) Cursor {
	n := uint64(r.Capacity())
	return Cursor{Wrap: uint16(pos / n), Count: r.Origin + uint32(pos%n)}
}

// Offset returns where in the RMBE the byte at a position is.
func (r Ring) Offset(pos uint64) uint32 { return r.Origin + uint32(pos%uint64(r.Capacity())) }

// UpdateDue reports whether the reader's position, consumed, is far enough from the one that
// the peer was told, announced, for a message of its own (RFC 7609 4.5.1): the peer, which
// has written up to produced, has less than half of the window and would gain a tenth.
func (r Ring) UpdateDue(consumed, announced, produced uint64) bool {
	size := uint64(r.Capacity())
	return consumed-announced >= size/10 && produced-announced > size-size/2
}

// Valid reports whether c lies within the RMBE.
func (r Ring) Valid(c Cursor) bool { return c.Count >= r.Origin && c.Count < r.Size }

// Distance returns how many bytes to is ahead of from, at most the capacity.
// It returns [ErrStale] if to is behind, a [*CursorError] if a cursor lies
// outside the RMBE or to is further ahead than the capacity. Wrap counters
// are compared within half their number space.
func (r Ring) Distance(from, to Cursor) (uint32, error) {
	if !r.Valid(from) || !r.Valid(to) {
		return 0, &CursorError{r, from, to}
	}
	switch wraps := int16(to.Wrap - from.Wrap); {
	case wraps == 0 && to.Count >= from.Count:
		return to.Count - from.Count, nil
	case wraps == 1 && to.Count <= from.Count:
		return r.Capacity() - (from.Count - to.Count), nil
	case wraps <= 0:
		return 0, ErrStale
	}
	return 0, &CursorError{r, from, to}
}

// Advance returns the position of a cursor that is not behind the position base, and at
// most one capacity ahead. Its errors are those of [Ring.Distance].
func (r Ring) Advance(base uint64, to Cursor) (uint64, error) {
	n, err := r.Distance(r.Cursor(base), to)
	return base + uint64(n), err
}

// Span is a contiguous piece of an RMBE.
type Span struct {
	Offset, Len uint32 // Offset from the start of the RMBE, eye catcher included
}

// Spans returns where n bytes from position pos on lie: in one piece, or in
// two where they go past the end. A piece not needed has length 0. More bytes
// than the capacity are a bug of the caller and panic.
func (r Ring) Spans(pos uint64, n uint32) [2]Span {
	invariant.Must(n <= r.Capacity(), "cdc: span longer than the RMBE")
	at := r.Offset(pos)
	first := min(n, r.Size-at)
	return [2]Span{{at, first}, {r.Origin, n - first}}
}
