// SPDX-License-Identifier: Apache-2.0

package script

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"sync"
)

// patternLen is the period of the bytes: a prime, so that no move by a ring's
// size gives the same bytes.
const patternLen = 262139

// pattern is long enough to give any span of maxSize at once. It is made when it is first
// used: an emulated guest takes as long for it as for the rest of a short program.
var pattern = sync.OnceValue(makePattern)

func makePattern() []byte {
	r := rand.New(rand.NewPCG(7609, 4791))
	p := make([]byte, patternLen, patternLen+maxSize)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	for len(p) < cap(p) {
		p = append(p, p[:min(patternLen, cap(p)-len(p))]...)
	}
	return p
}

// castagnoli is what processors compute.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A stream is the bytes of one direction, as they must be.
type stream struct {
	start uint64 // where in the pattern it begins
	pos   uint64
	sum   uint32
}

// newStream is the client's direction, or the server's.
func newStream(seed uint64, fromClient bool) stream {
	const spread = 100003 // neighbouring seeds are far apart
	s := stream{start: seed * spread % patternLen}
	if !fromClient {
		s.start = (s.start + patternLen/2) % patternLen
	}
	return s
}

// next is the next n bytes of the stream, at most maxSize; they are not gone
// past.
func (s *stream) next(n int) []byte {
	at := (s.start + s.pos) % patternLen
	return pattern()[at : at+uint64(min(n, maxSize))]
}

// add goes past b, which is what came next.
func (s *stream) add(b []byte) {
	s.sum = crc32.Update(s.sum, castagnoli, b)
	s.pos += uint64(len(b))
}

// errWrongBytes is a failure of what carries the connection, whatever else.
var errWrongBytes = errors.New("wrong bytes")

// check goes past b if it is what must come next.
func (s *stream) check(b []byte) error {
	for len(b) > 0 {
		want := s.next(len(b))
		if !bytes.Equal(b[:len(want)], want) {
			i := 0
			for b[i] == want[i] {
				i++
			}
			return fmt.Errorf("%w: byte %d is %#x, want %#x%s", errWrongBytes, s.pos+uint64(i), b[i], want[i], s.whence(b[i:]))
		}
		s.add(want)
		b = b[len(want):]
	}
	return nil
}

// whence says where in the pattern strange bytes belong, for people.
func (s *stream) whence(b []byte) string {
	const telling = 16
	if len(b) < telling {
		return ""
	}
	i := bytes.Index(pattern(), b[:telling])
	if i < 0 {
		return "; they are of no stream"
	}
	return fmt.Sprintf("; they would be byte %d of the period of this stream", (uint64(i)+patternLen-s.start)%patternLen)
}

// tally is what an end says about a stream that it has received.
type tally struct {
	n   uint64
	sum uint32
}

const tallyLen = 12

func (t tally) append(b []byte) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(b, t.n), t.sum)
}

func readTally(r io.Reader) (tally, error) {
	var b [tallyLen]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return tally{}, fmt.Errorf("wait for the peer's sum: %w", err)
	}
	return tally{binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint32(b[8:])}, nil
}

// agree compares what the peer received with what was sent.
func (t tally) agree(s *stream) error {
	if t.n != s.pos || t.sum != s.sum {
		return fmt.Errorf("%w: the peer received %d bytes with sum %08x, sent were %d with sum %08x", errWrongBytes, t.n, t.sum, s.pos, s.sum)
	}
	return nil
}
