// SPDX-License-Identifier: Apache-2.0

package iwarp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func FuzzParseFrame(f *testing.F) {
	for _, s := range capturedStreams(f) {
		f.Add(s.segments[0].bytes)
		f.Add(s.segments[1].bytes)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		frame, err := ParseFrame(b)
		if err != nil {
			return
		}
		again, err := ParseFrame(frame.Append(nil))
		if err != nil {
			t.Fatalf("our own frame: %v", err)
		}
		if d := cmp.Diff(frame, again); d != "" || frame.Len() != len(b) {
			t.Fatalf("encoded and parsed again, length %d of %d (-first +second):\n%s", frame.Len(), len(b), d)
		}
	})
}

func FuzzFramingNext(f *testing.F) {
	for _, g := range golden {
		f.Add(byte(1), unhex(f, g.hex))
	}
	for _, s := range capturedStreams(f) {
		f.Add(byte(1), s.initiator[s.segmentLen(0):])
		f.Add(byte(0), s.responder[s.segmentLen(1):])
	}
	marked := Framing{CRC: true, Markers: true}
	f.Add(byte(3), marked.Append(marked.Append(nil, make([]byte, 800)), make([]byte, 300)))
	f.Fuzz(func(t *testing.T, flags byte, b []byte) {
		rx := Framing{CRC: flags&1 != 0, Markers: flags&2 != 0}
		tx := rx
		for range 8 {
			in := bytes.Clone(b) // Next moves bytes
			ulpdu, n, err := rx.Next(in)
			if err != nil {
				return
			}
			out := tx.Append(nil, ulpdu)
			if len(out) != n {
				t.Fatalf("FPDU of %d bytes, encoded again %d", n, len(out))
			}
			if rx.Markers && rx.pos != tx.pos {
				t.Fatalf("positions %d and %d", rx.pos, tx.pos)
			}
			b = b[n:]
		}
	})
}

func (s *capturedStream) segmentLen(i int) int { return len(s.segments[i].bytes) }

func FuzzHeaderParse(f *testing.F) {
	for _, g := range golden {
		f.Add(unhex(f, g.hex)[lengthLen:])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h Header
		if err := h.Parse(b); err != nil {
			var code Code
			if !errors.As(err, &code) {
				t.Fatalf("%v is no code", err)
			}
			return
		}
		want := bytes.Clone(b[:h.Len()])
		want[0] &= ddpTagged | ddpLast | ddpVerMask // reserved bits are not kept
		want[1] &= rdmapVerMask | rdmapOpMask
		if got := h.Append(nil); !bytes.Equal(got, want) {
			t.Fatalf("encoded %x, want %x", got, want)
		}
	})
}

func FuzzParseTerminate(f *testing.F) {
	for _, g := range golden {
		if g.header.Op == OpTerminate {
			f.Add([]byte(g.payload))
		}
	}
	f.Add(unhex(f, "02020000")) // as siw sends it
	f.Add(unhex(f, "21020300 0005 4143 00000000 00000000 00000001 00000000"))
	f.Fuzz(func(t *testing.T, b []byte) {
		term, err := ParseTerminate(b)
		if err != nil {
			return
		}
		out := term.Append(nil)
		if len(out) > maxTerminateLen {
			t.Fatalf("%d bytes", len(out))
		}
		again, err := ParseTerminate(out)
		if err != nil || !bytes.Equal(again.Header, term.Header) || !bytes.Equal(again.Request, term.Request) {
			t.Fatalf("encoded and parsed again: %+v, %v; first %+v", again, err, term)
		}
	})
}
