// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"container/list"
	"iter"
)

// recent are the entries of all pods that were put last, so many at most. If there is no room for another one, the pod
// with the most entries loses its oldest, so that no pod takes the place of others. Where no pod has more than
// recentOfPod, the oldest of all goes, which may be of a pod that is gone.
//
// A recent belongs to whoever made it, and has no lock.
type recent[K comparable, V any] struct {
	most  int
	order list.List // of *recentEntry[K, V], the latest first
	byKey map[K]*recentEntry[K, V]
	pods  map[string]*recentPod
	large map[*recentPod]struct{} // the pods with more than recentOfPod: a few
}

// recentPod has the entries of a pod, the latest first.
type recentPod struct {
	name  string
	order list.List // of *recentEntry[K, V]
}

type recentEntry[K comparable, V any] struct {
	key    K
	value  V
	pod    *recentPod
	of, at *list.Element // in the order of the pod, and of all
}

func newRecent[K comparable, V any](most int) *recent[K, V] {
	return &recent[K, V]{most: most, byKey: map[K]*recentEntry[K, V]{}, pods: map[string]*recentPod{}, large: map[*recentPod]struct{}{}}
}

func (r *recent[K, V]) len() int { return len(r.byKey) }

// get returns the value of an entry, nil if there is none.
func (r *recent[K, V]) get(k K) *V {
	if e := r.byKey[k]; e != nil {
		return &e.value
	}
	return nil
}

// put makes an entry of a pod the latest. The pod is part of the key.
func (r *recent[K, V]) put(pod string, k K, v V) {
	if e := r.byKey[k]; e != nil {
		e.value = v
		r.order.MoveToFront(e.at)
		e.pod.order.MoveToFront(e.of)
		return
	}
	if r.len() >= r.most {
		r.makePlace()
	}
	p := r.pods[pod]
	if p == nil {
		p = &recentPod{name: pod}
		r.pods[pod] = p
	}
	e := &recentEntry[K, V]{key: k, value: v, pod: p}
	e.at, e.of = r.order.PushFront(e), p.order.PushFront(e)
	r.byKey[k] = e
	r.noteLarge(p)
}

func (r *recent[K, V]) makePlace() {
	from := &r.order
	for p := range r.large {
		if from == &r.order || p.order.Len() > from.Len() {
			from = &p.order
		}
	}
	r.remove(from.Back().Value.(*recentEntry[K, V])) //nolint:forcetypeassert // nothing else is in there
}

func (r *recent[K, V]) remove(e *recentEntry[K, V]) {
	delete(r.byKey, e.key)
	r.order.Remove(e.at)
	e.pod.order.Remove(e.of)
	if e.pod.order.Len() == 0 {
		delete(r.pods, e.pod.name)
	}
	r.noteLarge(e.pod)
}

func (r *recent[K, V]) noteLarge(p *recentPod) {
	if p.order.Len() > recentOfPod {
		r.large[p] = struct{}{}
	} else {
		delete(r.large, p)
	}
}

// forget drops the entries of a pod.
func (r *recent[K, V]) forget(pod string) {
	p := r.pods[pod]
	for p != nil && p.order.Len() > 0 {
		r.remove(p.order.Front().Value.(*recentEntry[K, V])) //nolint:forcetypeassert // nothing else is in there
	}
}

// dropIf drops the entries that are over.
func (r *recent[K, V]) dropIf(over func(v *V) bool) {
	for _, e := range r.byKey {
		if over(&e.value) {
			r.remove(e)
		}
	}
}

// all are the values of all entries, the latest first.
func (r *recent[K, V]) all() iter.Seq[*V] {
	return func(yield func(*V) bool) {
		for at := r.order.Front(); at != nil; at = at.Next() {
			if !yield(&at.Value.(*recentEntry[K, V]).value) { //nolint:forcetypeassert // nothing else is in there
				return
			}
		}
	}
}
