// SPDX-License-Identifier: Apache-2.0

package softdev

import "sync/atomic"

// table finds objects by their numbers: queue pairs and regions by numbers and keys
// that are random, and never 0. Looking up takes no lock and allocates nothing; its
// owner's lock orders the changes.
//
// It is a hash table with open addressing. A number is its own hash. The numbers in the
// table are random, so that a peer that asks for numbers of its choice meets chains as
// short as everybody does.
//
// The key of a slot never changes, so that a look-up never sees another object than the
// one that it looks for: an object that goes leaves its slot taken. When half of the slots
// are taken, the objects move to new slots:
//
//	look-up A                owner                    look-up B
//	begins in old slots
//	                         moves objects, stores
//	                         the new slots
//	                         clears object 7
//	finds 7 in old slots                              begins in new slots
//	                                                  does not find 7
//
// A began before 7 was cleared, so A may still find 7.
type table[K ~uint32, T any] struct {
	slots atomic.Pointer[[]slot[T]] // a power of two
	used  int                       // objects
	taken int                       // slots with a key
}

type slot[T any] struct {
	key atomic.Uint32 // 0: never taken
	obj atomic.Pointer[T]
}

func (t *table[K, T]) init() { t.become(make([]slot[T], minSlots)) }

// get returns the object of a number, nil if there is none.
func (t *table[K, T]) get(k K) *T {
	slots := *t.slots.Load()
	for i := int(k); ; i++ {
		s := &slots[i&(len(slots)-1)]
		switch s.key.Load() {
		case 0:
			return nil
		case uint32(k):
			return s.obj.Load()
		}
	}
}

// free draws numbers until one is free, and returns that.
func (t *table[K, T]) free(draw func() K) K {
	for {
		if k := draw(); k != 0 && t.get(k) == nil {
			return k
		}
	}
}

// set adds the object of a number that is free.
func (t *table[K, T]) set(k K, v *T) {
	if slots := *t.slots.Load(); 2*(t.taken+1) > len(slots) {
		t.move()
	}
	s := t.slot(*t.slots.Load(), k)
	if s.key.Load() == 0 {
		t.taken++
	}
	s.key.Store(uint32(k))
	s.obj.Store(v)
	t.used++
}

// slot returns the slot of a number, or the one that it would take.
func (t *table[K, T]) slot(slots []slot[T], k K) *slot[T] {
	for i := int(k); ; i++ {
		s := &slots[i&(len(slots)-1)]
		if key := s.key.Load(); key == 0 || key == uint32(k) {
			return s
		}
	}
}

// move puts the objects into new slots, at most a quarter of which are taken then.
func (t *table[K, T]) move() {
	n := minSlots
	for n < 4*(t.used+1) {
		n *= 2
	}
	slots := make([]slot[T], n)
	old := *t.slots.Load()
	for i := range old {
		if v := old[i].obj.Load(); v != nil {
			k := K(old[i].key.Load())
			s := t.slot(slots, k)
			s.key.Store(uint32(k))
			s.obj.Store(v)
		}
	}
	t.become(slots)
	t.taken = t.used
}

func (t *table[K, T]) become(slots []slot[T]) { t.slots.Store(&slots) }

// clear takes the object of a number out.
func (t *table[K, T]) clear(k K) {
	if s := t.slot(*t.slots.Load(), k); s.obj.Swap(nil) != nil {
		t.used--
	}
}
