// SPDX-License-Identifier: Apache-2.0

package cdc_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

// walk is the obvious cursor: it goes byte by byte.
type walk struct {
	ring cdc.Ring
	at   cdc.Cursor
}

func (w *walk) step() {
	w.at.Count++
	if w.at.Count == w.ring.Size {
		w.at.Count = w.ring.Origin
		w.at.Wrap++
	}
}

// The RMBEs are small so that 16 bits of wraps go by quickly.
func TestRing_likeOneThatWalks(t *testing.T) {
	seed := testenv.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, ring := range []cdc.Ring{{0, 1}, {0, 7}, {0, 16}, {4, 5}, {4, 11}, {4, 20}} {
		w := walk{ring: ring, at: ring.Start()}
		end := uint64(ring.Capacity()) * (1<<16 + 100)
		for pos := uint64(0); pos < end; {
			from := ring.Cursor(pos)
			if from != w.at || ring.Offset(pos) != w.at.Count {
				t.Fatalf("seed %d, %+v: cursor of %d is %v, offset %d, want %v", seed, ring, pos, from, ring.Offset(pos), w.at)
			}
			n := rng.Uint32N(ring.Capacity() + 1)
			var written [32]bool
			for range n {
				written[w.at.Count] = true
				w.step()
			}
			for _, s := range ring.Spans(pos, n) {
				for i := s.Offset; i < s.Offset+s.Len; i++ {
					if !written[i] {
						t.Fatalf("seed %d, %+v: Spans(%d, %d) = %v: byte %d is not in it", seed, ring, pos, n, ring.Spans(pos, n), i)
					}
					written[i] = false
				}
			}
			for i, left := range written {
				if left {
					t.Fatalf("seed %d, %+v: Spans(%d, %d) = %v: byte %d is missing", seed, ring, pos, n, ring.Spans(pos, n), i)
				}
			}
			got, err := ring.Advance(pos, w.at)
			if err != nil || got != pos+uint64(n) {
				t.Fatalf("seed %d, %+v: Advance(%d, %v) = %d, %v, want %d", seed, ring, pos, w.at, got, err, pos+uint64(n))
			}
			if n > 0 && n < ring.Capacity() {
				if d, err := ring.Distance(w.at, from); !errors.Is(err, cdc.ErrStale) {
					t.Fatalf("seed %d, %+v: Distance(%v, %v) = %d, %v, want ErrStale", seed, ring, w.at, from, d, err)
				}
			}
			pos += uint64(n)
		}
	}
}

func TestRing_Distance(t *testing.T) {
	const stale, impossible = -1, -2
	linux, rfc := cdc.Ring{Size: 100}, cdc.Ring{Origin: 4, Size: 100}
	c := func(wrap uint16, count uint32) cdc.Cursor { return cdc.Cursor{Wrap: wrap, Count: count} }
	for name, tt := range map[string]struct {
		ring     cdc.Ring
		from, to cdc.Cursor
		want     int
	}{
		"nothing":                  {linux, c(3, 50), c(3, 50), 0},
		"same round":               {linux, c(3, 50), c(3, 99), 49},
		"over the end":             {linux, c(3, 50), c(4, 10), 60},
		"all of it":                {linux, c(3, 50), c(4, 50), 100},
		"all of it, RFC":           {rfc, c(3, 50), c(4, 50), 96},
		"over the end, RFC":        {rfc, c(3, 99), c(4, 4), 1},
		"over the wrap counter":    {linux, c(0xffff, 99), c(0, 0), 1},
		"more than all":            {linux, c(3, 50), c(4, 51), impossible},
		"two rounds":               {linux, c(3, 50), c(5, 0), impossible},
		"count is the size":        {linux, c(3, 50), c(3, 100), impossible},
		"count in the eye catcher": {rfc, c(3, 50), c(4, 3), impossible},
		"from outside":             {rfc, c(3, 0), c(3, 5), impossible},
		"largest count":            {linux, c(3, 50), c(4, 1<<32-1), impossible},
		"behind":                   {linux, c(3, 50), c(3, 49), stale},
		"behind by a round":        {linux, c(3, 50), c(2, 99), stale},
		"behind the wrap counter":  {linux, c(0, 0), c(0xffff, 99), stale},
		"half the counter ahead":   {linux, c(0, 0), c(0x7fff, 0), impossible},
		"half the counter behind":  {linux, c(0, 0), c(0x8000, 0), stale},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := tt.ring.Distance(tt.from, tt.to)
			got := int(n)
			var cursor *cdc.CursorError
			switch {
			case errors.Is(err, cdc.ErrStale):
				got = stale
			case errors.As(err, &cursor):
				got = impossible
			case err != nil:
				t.Fatal(err)
			}
			if got != tt.want {
				t.Errorf("Distance(%v, %v) = %d, %v, want %d", tt.from, tt.to, n, err, tt.want)
			}
		})
	}
}

func TestRing_panicsOnOurMistakes(t *testing.T) {
	ring := cdc.Ring{Size: 100}
	defer func() {
		if recover() == nil {
			t.Error("no panic where a span is longer than the RMBE")
		}
	}()
	ring.Spans(0, 101)
}

// Whatever a peer sends, the position stays where it was or moves to the one
// within a capacity that has the peer's cursor.
func FuzzCursorAdvance(f *testing.F) {
	f.Add(uint32(65536), false, uint64(0), uint16(1), uint32(0))
	f.Add(uint32(65536), true, uint64(1)<<40, uint16(0xffff), uint32(4))
	f.Add(uint32(16384), true, uint64(16380)*65536-1, uint16(0), uint32(5))
	f.Fuzz(func(t *testing.T, size uint32, eyecatcher bool, base uint64, wrap uint16, count uint32) {
		ring := cdc.Ring{Size: size}
		if eyecatcher {
			ring.Origin = cdc.OriginRFC
		}
		if size <= ring.Origin || base > 1<<62 {
			return
		}
		to := cdc.Cursor{Wrap: wrap, Count: count}
		got, err := ring.Advance(base, to)
		if err != nil {
			var cursor *cdc.CursorError
			if !errors.Is(err, cdc.ErrStale) && !errors.As(err, &cursor) {
				t.Fatalf("unknown error %v", err)
			}
			if got != base {
				t.Fatalf("position moved from %d to %d with error %v", base, got, err)
			}
			return
		}
		if got < base || got-base > uint64(ring.Capacity()) || ring.Cursor(got) != to {
			t.Fatalf("%+v: from %d to %d, whose cursor is %v, want %v", ring, base, got, ring.Cursor(got), to)
		}
	})
}

func TestSection4_5_1_RingUpdateDue(t *testing.T) {
	r := cdc.Ring{Origin: cdc.OriginRFC, Size: 1004} // 1,000 bytes of data
	for _, tc := range []struct {
		name                          string
		consumed, announced, produced uint64
		want                          bool
	}{
		{"nothing new", 500, 500, 1400, false},
		{"half of the window left", 600, 500, 1000, false},
		{"less than half left, and a tenth to gain", 600, 500, 1001, true},
		{"less than half left, and less than a tenth to gain", 599, 500, 1001, false},
		{"all written, and all read", 1500, 500, 1500, true},
		{"the peer was told of more than the reader knows", 1500, 500, 1700, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := r.UpdateDue(tc.consumed, tc.announced, tc.produced); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}
