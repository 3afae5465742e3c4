// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"container/list"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// Expiring remembers things for a time, a bounded number of them: who puts one more forgets the one
// that was put first.
type Expiring[K comparable, V any] struct {
	limit   int
	entries map[K]*list.Element
	order   list.List // of entry[K, V], as they were put
}

type entry[K comparable, V any] struct {
	key   K
	value V
	until time.Time
}

// NewExpiring makes one that remembers limit things at most.
func NewExpiring[K comparable, V any](limit int) *Expiring[K, V] {
	invariant.Must(limit > 0, "portmap: memory without room")
	return &Expiring[K, V]{limit: limit, entries: make(map[K]*list.Element)}
}

// Put remembers something until a time.
func (x *Expiring[K, V]) Put(k K, v V, until time.Time) {
	x.Drop(k)
	if len(x.entries) == x.limit {
		x.remove(x.order.Front())
	}
	x.entries[k] = x.order.PushBack(entry[K, V]{k, v, until})
}

// Get returns what is remembered. What has expired is forgotten (§7.3.1.4).
func (x *Expiring[K, V]) Get(now time.Time, k K) (v V, ok bool) {
	e := x.entries[k]
	if e == nil {
		return v, false
	}
	if en := e.Value.(entry[K, V]); now.Before(en.until) {
		return en.value, true
	}
	x.remove(e)
	return v, false
}

// Drop forgets something.
func (x *Expiring[K, V]) Drop(k K) {
	if e := x.entries[k]; e != nil {
		x.remove(e)
	}
}

// Len returns how many things are remembered, expired or not.
func (x *Expiring[K, V]) Len() int { return len(x.entries) }

func (x *Expiring[K, V]) remove(e *list.Element) {
	delete(x.entries, x.order.Remove(e).(entry[K, V]).key)
}
