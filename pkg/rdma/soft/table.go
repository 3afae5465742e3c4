// SPDX-License-Identifier: Apache-2.0

package soft

import "sync/atomic"

// table maps small indexes to objects. Looking up takes no lock; its owner's
// lock orders the changes.
type table[T any] struct {
	chunks []atomic.Pointer[[tableChunk]atomic.Pointer[T]]
	next   int // where the search for a free slot starts
	used   int
}

func (t *table[T]) init(size int) {
	t.chunks = make([]atomic.Pointer[[tableChunk]atomic.Pointer[T]], size/tableChunk)
}

// get returns the object at i, nil if there is none.
func (t *table[T]) get(i int) *T {
	if i < 0 || i/tableChunk >= len(t.chunks) {
		return nil
	}
	c := t.chunks[i/tableChunk].Load()
	if c == nil {
		return nil
	}
	return c[i%tableChunk].Load()
}

// free returns a free index above 0, or false. Indexes are taken in turn, so
// that one is not used again soon.
func (t *table[T]) free() (int, bool) {
	size := len(t.chunks) * tableChunk
	if t.used >= size-1 {
		return 0, false
	}
	// Small tables stay small: wrap at the next chunk boundary above twice
	// what is in use.
	limit := min(size, (2*t.used/tableChunk+1)*tableChunk)
	for range size {
		t.next++
		if t.next >= limit {
			t.next = 1
		}
		if t.get(t.next) == nil {
			return t.next, true
		}
	}
	return 0, false
}

func (t *table[T]) set(i int, v *T) {
	c := t.chunks[i/tableChunk].Load()
	if c == nil {
		c = new([tableChunk]atomic.Pointer[T])
		t.chunks[i/tableChunk].Store(c)
	}
	c[i%tableChunk].Store(v)
	t.used++
}

func (t *table[T]) clear(i int) {
	t.chunks[i/tableChunk].Load()[i%tableChunk].Store(nil)
	t.used--
}

// all appends the objects to dst.
func (t *table[T]) all(dst []*T) []*T {
	for i := range t.chunks {
		c := t.chunks[i].Load()
		if c == nil {
			continue
		}
		for k := range c {
			if v := c[k].Load(); v != nil {
				dst = append(dst, v)
			}
		}
	}
	return dst
}
