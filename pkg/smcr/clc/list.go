// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"fmt"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// maxList is the room of every list in a CLC message. The protocol has the
// same limit for all of them: [MaxPrefixes], [MaxEIDs], [MaxISMGIDs], [MaxGIDs].
const maxList = 8

// List is a list of at most eight elements without memory of its own, so that
// a message is one value: decoding allocates nothing, and a copy shares
// nothing. Elements past the end are zero. The zero value is empty.
type List[T comparable] struct {
	n uint8
	a [maxList]T
}

// ListOf returns a list of s, which must not have more than eight elements.
func ListOf[T comparable](s ...T) List[T] {
	invariant.Must(len(s) <= maxList, "clc: more than eight elements in a list")
	var l List[T]
	l.n = uint8(copy(l.a[:], s))
	return l
}

// Len returns the number of elements.
func (l List[T]) Len() int { return int(l.n) }

// At returns element i.
func (l *List[T]) At(i int) T {
	invariant.Must(i < int(l.n), "clc: index beyond the end of a list")
	return l.a[i]
}

// Add appends v; false means that the list is full.
func (l *List[T]) Add(v T) bool {
	if l.n == maxList {
		return false
	}
	l.a[l.n] = v
	l.n++
	return true
}

// Slice returns the elements in place: it is valid as long as l is.
func (l *List[T]) Slice() []T { return l.a[:l.n] }

// Has reports whether v is an element.
func (l *List[T]) Has(v T) bool { return slices.Contains(l.a[:l.n], v) }

// Equal reports whether both lists have the same elements in the same order.
func (l List[T]) Equal(o List[T]) bool { return l.n == o.n && l.a == o.a }

// String writes the elements as fmt does for a slice.
func (l List[T]) String() string { return fmt.Sprint(l.a[:l.n]) }
