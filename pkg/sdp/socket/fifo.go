// SPDX-License-Identifier: Apache-2.0

package socket

import "github.com/smcr-io/kube-smcr/internal/invariant"

// fifo is a queue of bounded length. It allocates when it is made only.
type fifo[T any] struct {
	ring    []T
	head, n int
}

func newFifo[T any](size int) fifo[T] { return fifo[T]{ring: make([]T, size)} }

func (q *fifo[T]) isEmpty() bool { return q.n == 0 }
func (q *fifo[T]) isFull() bool  { return q.n == len(q.ring) }

// at returns the i-th oldest.
func (q *fifo[T]) at(i int) *T {
	invariant.Must(i >= 0 && i < q.n, "socket: index beyond a queue")
	return &q.ring[(q.head+i)%len(q.ring)]
}

func (q *fifo[T]) push(v T) {
	invariant.Must(!q.isFull(), "socket: push to a full queue")
	q.n++
	*q.at(q.n - 1) = v
}

func (q *fifo[T]) clear() {
	for !q.isEmpty() {
		q.pop()
	}
}

func (q *fifo[T]) pop() T {
	v := *q.at(0)
	var zero T
	*q.at(0) = zero
	q.head = (q.head + 1) % len(q.ring)
	q.n--
	return v
}
