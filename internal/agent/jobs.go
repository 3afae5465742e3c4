// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// jobs bring pods in line, each pod in a goroutine of its own while there is
// something to do for it, and one thing after the other: what takes long for one
// pod, such as the end of its link groups with peers that do not answer, holds up
// that pod only. There are as many goroutines at most as pods.
type jobs struct {
	wg sync.WaitGroup

	mu    sync.Mutex // guards what is below
	busy  map[string]*job
	ended bool
}

// job is what is under way for a pod.
type job struct {
	next *wish // came meanwhile
}

// wish is what is wanted of a pod.
type wish struct {
	atts   []cni.Attachment // none: it is gone
	force  bool             // do not wait for the pause after a failure
	rounds []*round         // that it is part of
	done   chan struct{}    // closed when it was done, or a later one instead
}

// round is one look at the records and policies.
type round struct {
	node *config.Node
	left atomic.Int32 // pods, and one for who looks
}

// ask has do called with a wish for a pod, now or after what is under way for
// it. A wish that waits already is replaced. Without force it is left out if the
// pod is busy: the next look finds out whether it is still wanted.
func (j *jobs) ask(key string, w wish, do func(wish)) (done <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	w.done = make(chan struct{})
	if b := j.busy[key]; b != nil {
		switch {
		case b.next != nil && !w.force:
			return b.next.done
		case b.next != nil:
			w.rounds, w.done = append(slices.Clone(b.next.rounds), w.rounds...), b.next.done // the older ones first
		case !w.force:
			return w.done
		}
		b.next = &w
		return w.done
	}
	b := &job{}
	j.busy[key] = b
	j.wg.Go(func() {
		for next := &w; next != nil; next = j.after(key, b) {
			do(*next)
			close(next.done)
		}
	})
	return w.done
}

// after is the wish that came meanwhile, nil if the job is over.
func (j *jobs) after(key string, b *job) *wish {
	j.mu.Lock()
	defer j.mu.Unlock()
	next := b.next
	b.next = nil
	if next == nil || j.ended {
		delete(j.busy, key)
		return nil
	}
	return next
}

// begin lets jobs start.
func (j *jobs) begin() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.busy, j.ended = map[string]*job{}, false
}

// finish waits for what is under way, and drops what waits.
func (j *jobs) finish() {
	j.mu.Lock()
	j.ended = true
	j.mu.Unlock()
	j.wg.Wait()
}
