// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"testing"
)

// newFilled has one entry of each of the pods that come first, and the rest of a large one.
func newFilled(t *testing.T, most, pods, large int) (r *recent[string, int], put func(pod string, n int)) {
	t.Helper()
	r = newRecent[string, int](most)
	put = func(pod string, n int) { r.put(pod, fmt.Sprint(pod, n), n) }
	for i := range pods {
		put(fmt.Sprint("small", i), 0)
	}
	for n := range large {
		put("large", n)
	}
	if r.len() != pods+large {
		t.Fatalf("%d entries", r.len())
	}
	return r, put
}

// Place is made by the pod with the most entries, and where no pod has many, by the oldest of all.
func TestRecent_place(t *testing.T) {
	const small = 10
	for _, tt := range []struct {
		name   string
		large  int
		gone   string
		remain string
	}{
		{"a large pod", recentOfPod + 1, "large0", "small00"},
		{"no large pod", recentOfPod, "small00", "large0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, put := newFilled(t, small+tt.large, small, tt.large)
			put("new", 0)
			if r.get(tt.gone) != nil || r.get(tt.remain) == nil || r.get("new0") == nil || r.len() != small+tt.large {
				t.Errorf("%d entries; want %s instead of %s", r.len(), tt.remain, tt.gone)
			}
		})
	}
}

// Of several large pods the largest makes place, however they came.
func TestRecent_largest(t *testing.T) {
	r, put := newFilled(t, 3*recentOfPod, 0, 2*recentOfPod-1)
	for n := range recentOfPod + 1 {
		put("second", n)
	}
	for n := range 100 {
		put("third", n)
	}
	for pod, want := range map[string]int{"large": 2*recentOfPod - 101, "second": recentOfPod + 1, "third": 100} {
		if got := r.pods[pod].order.Len(); got != want {
			t.Errorf("%s has %d entries, want %d", pod, got, want)
		}
	}
}

// What was put again is the latest and has its new value; and what is dropped leaves nothing behind.
func TestRecent_drop(t *testing.T) {
	r, put := newFilled(t, 2*recentOfPod, 2, recentOfPod+1)
	r.put("small0", "small00", 7)
	for v := range r.all() {
		if *v != 7 {
			t.Errorf("the latest is %d", *v)
		}
		break
	}
	r.dropIf(func(v *int) bool { return *v == 1 })
	if r.get("large1") != nil || len(r.large) != 0 {
		t.Errorf("large pods %v", r.large)
	}
	put("large", 1)
	for _, pod := range []string{"large", "small0", "small1", "none"} {
		r.forget(pod)
	}
	if r.len() != 0 || r.order.Len() != 0 || len(r.pods) != 0 || len(r.large) != 0 {
		t.Errorf("left: %d entries, pods %v", r.len(), r.pods)
	}
}

// BenchmarkRecent_put: an entry in place of another.
func BenchmarkRecent_put(b *testing.B) {
	r := newRecent[[2]int, int](maxDecisions)
	n := 0
	for b.Loop() {
		r.put("pod", [2]int{n}, n)
		n++
	}
}
