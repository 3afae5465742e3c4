// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// jobs reconcile the pods. Each pod with work to do has one goroutine, its job, which does one
// thing after the other. Ending the link groups of a pod whose peers do not answer takes long, for
// example; it then holds up that pod only. There are at most as many goroutines as pods.
type jobs struct {
	wg sync.WaitGroup

	mu    sync.Mutex // guards what is below
	busy  map[string]*job
	ended bool
}

// job is the work under way for one pod, and what waits behind it.
type job struct {
	now  *desired
	ctx  context.Context         //nolint:containedctx // of what is under way
	end  context.CancelCauseFunc // ends ctx, with a cause
	next *desired                // submitted while now is under way
}

// errDetached ends the set-up under way of a pod whose record was removed.
var errDetached = errors.New("the pod was detached meanwhile")

// start puts w under way.
func (b *job) start(ctx context.Context, w *desired) {
	b.now = w
	b.ctx, b.end = context.WithCancelCause(ctx)
}

// desired is what the records want of one pod.
type desired struct {
	atts   []cni.Attachment // none: the pod is to be removed
	force  bool             // try now, even in the pause after a failure
	rounds []*round         // the rounds that wait for it
	done   chan struct{}    // closed when this, or a later one in its place, was done
}

// round is one comparison of all pods with the records and policies.
type round struct {
	node *config.Node
	left atomic.Int32 // pods that are not done, and one for reconcile itself
}

// submit has do called with w for a pod, now or after the work under way. If the pod is busy:
//
//   - w with force waits, in place of what waited before, and counts for the rounds of both;
//   - w without force is dropped: the next round submits it again if it is still wanted;
//   - w that removes the pod always has force, and ends a set-up under way with errDetached.
//
// done is closed when w, or what took its place, was done. It is never closed if w was dropped
// while nothing waited.
func (j *jobs) submit(ctx context.Context, key string, w desired, do func(context.Context, desired)) (done <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	w.done = make(chan struct{})
	if b := j.busy[key]; b != nil {
		if len(w.atts) == 0 && len(b.now.atts) > 0 {
			w.force = true
			b.end(errDetached)
		}
		switch {
		case b.next != nil && !w.force:
			return b.next.done
		case b.next != nil:
			w.rounds, w.done = append(slices.Clone(b.next.rounds), w.rounds...), b.next.done // in order of age
		case !w.force:
			return w.done
		}
		b.next = &w
		return w.done
	}
	b := &job{}
	b.start(ctx, &w)
	j.busy[key] = b
	j.wg.Go(func() {
		for more := true; more; {
			do(b.ctx, *b.now)
			close(b.now.done)
			more = j.startNext(ctx, key, b)
		}
	})
	return w.done
}

// startNext puts what waits under way, if there is something.
func (j *jobs) startNext(ctx context.Context, key string, b *job) (more bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	b.end(nil)
	if b.next == nil || j.ended {
		delete(j.busy, key)
		return false
	}
	b.start(ctx, b.next)
	b.next = nil
	return true
}

// underWay returns the wanted attachments of the pods that have a job.
func (j *jobs) underWay() map[string][]cni.Attachment {
	j.mu.Lock()
	defer j.mu.Unlock()
	out := map[string][]cni.Attachment{}
	for key, b := range j.busy {
		out[key] = b.now.atts
	}
	return out
}

// open lets jobs start, also after finish.
func (j *jobs) open() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.busy, j.ended = map[string]*job{}, false
}

// finish waits for the work under way, and drops what waits.
func (j *jobs) finish() {
	j.mu.Lock()
	j.ended = true
	j.mu.Unlock()
	j.wg.Wait()
}
