// SPDX-License-Identifier: Apache-2.0

package clc

import (
	"slices"
	"testing"
)

func TestList(t *testing.T) {
	var l List[int]
	for i := range maxList {
		if !l.Add(i + 10) {
			t.Fatalf("no room for element %d", i)
		}
	}
	if l.Add(1) {
		t.Error("a ninth element was taken")
	}
	if l.Len() != maxList || l.At(7) != 17 || !l.Has(13) || l.Has(1) {
		t.Errorf("%v: length %d, At(7) %d", l, l.Len(), l.At(7))
	}
	if !l.Equal(ListOf(l.Slice()...)) || l.Equal(ListOf(10, 11)) || !(List[int]{}).Equal(ListOf[int]()) {
		t.Error("Equal does not compare the elements")
	}
	if got := ListOf(3, 4); got.String() != "[3 4]" || !slices.Equal(got.Slice(), []int{3, 4}) {
		t.Errorf("%v", got)
	}
	for name, f := range map[string]func(){
		"nine elements": func() { ListOf(make([]int, 9)...) },
		"index":         func() { s := ListOf(1); s.At(1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
	// The limits of the protocol and the room of a list are the same number.
	for name, n := range map[string]int{"MaxPrefixes": MaxPrefixes, "MaxEIDs": MaxEIDs, "MaxISMGIDs": MaxISMGIDs, "MaxGIDs": MaxGIDs} {
		if n != maxList {
			t.Errorf("%s is %d, a list has room for %d", name, n, maxList)
		}
	}
}
