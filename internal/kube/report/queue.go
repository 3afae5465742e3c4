// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
)

// kind is the kind of an object that is written.
type kind uint8

const (
	kindNode kind = iota
	kindLink
	kindPod
)

// class is the rank of a write: of those that wait, the lowest class is written first.
type class uint8

const (
	classNode class = iota
	classLink
	classPod
	classCounters
)

// key names an object.
type key struct {
	kind      kind
	namespace string // of a pod
	name      string
}

// target is what an object is to be, or was written as. Nobody changes it.
type target struct {
	present  bool
	state    any     // compared with equality.Semantic; every change is written
	counters []int64 // a change is written at once if it is notable, else later
	body     any     // the object
}

// same tells whether two targets are equal, but perhaps for their counters.
func (t *target) same(o *target) bool {
	return t.present == o.present && equality.Semantic.DeepEqual(t.state, o.state)
}

// entry is what the queue knows of one object.
type entry struct {
	key        key
	want       target
	wrote      target
	differs    difference // of want and wrote
	dirtySince time.Time  // since when they differ; zero: they do not
	wroteAt    time.Time
	version    string    // the resource version after the last write
	notBefore  time.Time // after an error, or a repair
	pause      time.Duration
	doubtful   bool // the last write failed in a way that leaves open whether the object was written

	countersAt    time.Time // of the last write for counters
	countersPause time.Duration

	repairedAt  time.Time
	repairPause time.Duration
}

// difference is how two targets differ.
type difference uint8

const (
	inNothing difference = iota
	inCounters
	inNotableCounters
	inState
)

// difference compares two targets. The comparison is slow, so it is made only when one
// of the two changes.
func (t *target) difference(o *target) difference {
	switch {
	case !t.same(o):
		return inState
	case !t.present || slices.Equal(t.counters, o.counters):
		return inNothing
	case notable(t.counters, o.counters):
		return inNotableCounters
	}
	return inCounters
}

// due tells when an entry is to be written and in which class. ok is false if there is
// nothing to write.
func (e *entry) due() (c class, at time.Time, ok bool) {
	switch e.differs {
	case inNothing:
		return 0, time.Time{}, false
	case inState:
		c, at = class(e.key.kind), e.wroteAt.Add(objectPause)
	case inNotableCounters:
		c, at = classCounters, e.wroteAt.Add(max(e.countersPause, countersFirst))
	case inCounters:
		c, at = classCounters, e.wroteAt.Add(countersMost)
	}
	if e.notBefore.After(at) {
		at = e.notBefore
	}
	return c, at, true
}

// notable tells whether counters changed by so much that people want to know.
func notable(was, is []int64) bool {
	if len(was) != len(is) {
		return true
	}
	for i := range was {
		low, high := min(was[i], is[i]), max(was[i], is[i])
		if (low == 0) != (high == 0) || high >= 2*low && high != low {
			return true
		}
	}
	return false
}

// queue decides what is written when. It keeps one entry per object, however long the
// API server is away. It has no clock and belongs to the goroutine of [Reporter.Run].
type queue struct {
	rng     *rand.Rand
	entries map[key]*entry
	tokens  bucket

	// blocked is set until the API server's objects have been read: until then nothing
	// is written.
	blocked   bool
	away      time.Duration // the pause after the last error of the API server
	awayUntil time.Time
	// An object of which it is not known whether it was written also waits for doubtUntil.
	doubt      time.Duration
	doubtUntil time.Time
}

func newQueue(rng *rand.Rand) *queue {
	return &queue{
		rng: rng, entries: map[key]*entry{}, blocked: true,
		tokens: bucket{every: time.Second / writesPerSecond, burst: writesBurst},
	}
}

// want says what an object is to be.
func (q *queue) want(k key, t target, now time.Time) {
	e := q.entries[k]
	if e == nil {
		e = &entry{key: k}
		q.entries[k] = e
	}
	e.want = t
	e.touch(now)
}

// touch brings differs and dirtySince up to date after want or wrote changed.
func (e *entry) touch(now time.Time) {
	e.differs = e.want.difference(&e.wrote)
	if e.differs == inNothing {
		e.dirtySince = time.Time{}
	} else if e.dirtySince.IsZero() {
		e.dirtySince = now
	}
}

// unwant says that an object is to be deleted, if the API server has it.
func (q *queue) unwant(k key, now time.Time) {
	e := q.entries[k]
	switch {
	case e == nil:
	case e.wrote.present:
		q.want(k, target{}, now)
	default:
		delete(q.entries, k)
	}
}

// drop forgets an object that no longer exists.
func (q *queue) drop(k key) { delete(q.entries, k) }

// known says what the API server has of an object. If that differs from what was written
// here last, somebody else changed the object, and it is written again after a pause:
//
//	0 s   written here
//	1 s   somebody else changes the object; known
//	3 s   written again (repairFirst)
//	4 s   somebody else changes the object again; known
//	8 s   written again (twice repairFirst)
func (q *queue) known(k key, t target, now time.Time) {
	e := q.entries[k]
	if e == nil {
		e = &entry{key: k, want: t}
		q.entries[k] = e
	}
	e.wrote = t
	e.touch(now)
	if e.differs == inState && !e.wroteAt.IsZero() {
		if now.Sub(e.repairedAt) > repairMost {
			e.repairPause = 0
		}
		e.repairPause = min(max(2*e.repairPause, repairFirst), repairMost)
		e.repairedAt = now
		e.notBefore = now.Add(e.repairPause)
	}
}

// next is the entry to write now. If it is nil, again is when to ask again; a zero again
// means after the next change.
func (q *queue) next(now time.Time) (e *entry, again time.Time) {
	if q.blocked {
		return nil, time.Time{}
	}
	var first class
	for _, x := range q.entries {
		c, at, ok := x.due()
		if x.doubtful && q.doubt > 0 {
			c = classNode // whatever its class: the doubtful ones take turns, see broke
			if q.doubtUntil.After(at) {
				at = q.doubtUntil
			}
		}
		switch {
		case !ok:
			continue
		case at.After(now):
			if again.IsZero() || at.Before(again) {
				again = at
			}
			continue
		case e == nil || cmp.Or(cmp.Compare(c, first), x.dirtySince.Compare(e.dirtySince), x.key.compare(e.key)) < 0:
			e, first = x, c
		}
	}
	if e == nil {
		return nil, again
	}
	if q.awayUntil.After(now) {
		return nil, q.awayUntil
	}
	if at := q.tokens.take(now); at.After(now) {
		return nil, at
	}
	return e, time.Time{}
}

// String names the object, for messages.
func (k key) String() string {
	switch k.kind {
	case kindNode:
		return "SMCRNode " + k.name
	case kindLink:
		return "SMCRLink " + k.name
	case kindPod:
	}
	return "status of pod " + k.namespace + "/" + k.name
}

func (k key) compare(o key) int {
	return cmp.Or(cmp.Compare(k.kind, o.kind), cmp.Compare(k.namespace, o.namespace), cmp.Compare(k.name, o.name))
}

// wrote notes that an object was written as t, and has that resource version.
func (q *queue) wrote(k key, t target, version string, now time.Time) {
	e := q.entries[k]
	if e == nil {
		return
	}
	if e.wrote.same(&t) { // the write was for the counters
		if now.Sub(e.countersAt) > countersForget {
			e.countersPause = 0
		}
		e.countersPause = min(max(2*e.countersPause, countersFirst), countersMost)
		e.countersAt = now
	}
	e.wrote, e.wroteAt, e.version, e.pause, e.notBefore, e.dirtySince = t, now, version, 0, time.Time{}, time.Time{}
	e.doubtful = false
	e.touch(now)
	if !e.want.present && !t.present && k.kind != kindPod {
		delete(q.entries, k)
	}
}

// refused notes that the API server refused an object. Only that object waits.
func (q *queue) refused(k key, now time.Time) (pause time.Duration) {
	e := q.entries[k]
	if e == nil {
		return 0
	}
	e.doubtful = false
	e.pause = min(max(2*e.pause, objectFirst), objectMost)
	e.notBefore = now.Add(q.jittered(e.pause))
	return e.pause
}

// unsure notes that a write failed in a way that leaves open whether the object was
// written.
func (q *queue) unsure(k key, now time.Time) (pause time.Duration) {
	e := q.entries[k]
	if e == nil {
		return 0
	}
	e.wrote, e.dirtySince, e.doubtful = target{present: true}, time.Time{}, true
	e.touch(now)
	e.pause = min(max(2*e.pause, objectFirst), awayMost)
	e.notBefore = now.Add(q.jittered(e.pause))
	return e.pause
}

// broke notes that the API server answered a write with an internal error, which may concern this
// object only or all objects, see [isInternal]. So objects that had such an error are doubtful, and
// are tried one at a time, with a pause that grows up to awayMost until a write succeeds. All other
// objects wait only after the first error of each doubtful object, and not for long:
//
//	0 s     pod a gets its first internal error: all objects wait for up to awayFirst
//	1 s     pod b gets its first one: all objects wait for up to twice awayFirst
//	5 s     pod a gets another one: pods a and b wait longer, the others do not
//	5.1 s   a link group is lost, which is written at once
func (q *queue) broke(k key, now time.Time) (pause time.Duration) {
	if e := q.entries[k]; e == nil || !e.doubtful {
		q.wait(now, objectFirst)
	}
	q.doubt = min(max(2*q.doubt, awayFirst), awayMost)
	q.doubtUntil = now.Add(q.jittered(q.doubt))
	return q.unsure(k, now)
}

// failed notes that the API server did not answer, or answered with an error that is not
// about the object. All writes wait.
func (q *queue) failed(now time.Time) { q.wait(now, awayMost) }

// wait has all writes wait, longer each time, but not longer than most.
func (q *queue) wait(now time.Time, most time.Duration) {
	q.away = min(max(2*q.away, awayFirst), most)
	q.awayUntil = now.Add(q.jittered(q.away))
}

// answered notes that the API server works.
func (q *queue) answered() {
	q.away, q.awayUntil, q.doubt, q.doubtUntil = 0, time.Time{}, 0, time.Time{}
}

// jittered is between half of d and d: agents that lost the API server at the
// same time come back at different ones.
func (q *queue) jittered(d time.Duration) time.Duration {
	return d/2 + time.Duration(q.rng.Int64N(int64(d/2)+1))
}

// written tells whether the API server has an object as it is wanted, but perhaps for its
// counters.
func (q *queue) written(k key) bool {
	e := q.entries[k]
	return e != nil && e.want.present && e.differs != inState
}

// dirty tells whether an object other than the SMCRNode is yet to be written.
func (q *queue) dirty() bool {
	for k, e := range q.entries {
		if k.kind != kindNode && e.differs == inState {
			return true
		}
	}
	return false
}

// bucket is a token bucket. The first call finds it full.
type bucket struct {
	every time.Duration // a token
	burst int
	// full is when the bucket will be full again.
	full time.Time
}

// take takes a token, or says when there will be one.
func (b *bucket) take(now time.Time) (at time.Time) {
	full := b.full
	if full.Before(now) {
		full = now
	}
	full = full.Add(b.every)
	if at := full.Add(-time.Duration(b.burst) * b.every); at.After(now) {
		return at
	}
	b.full = full
	return now
}
