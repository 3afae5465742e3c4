// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync"
	"time"
)

// turns runs tasks that may take long, one at a time for each pod, and lets nobody wait long for them:
//
//	0 ms    a task begins, and hangs
//	100 ms  a second one begins to wait for its turn
//	250 ms  whoever began the first one goes on without it; from now on others for that pod do not even wait
//	30 s    the task ends: the next one has its turn
//
// Its zero value is ready.
type turns struct {
	mu   sync.Mutex // guards what is below
	busy map[*proxy]*turn
}

type turn struct {
	end  chan struct{} // closed when the task has ended
	late chan struct{} // closed when nobody waits for it any more
}

// run runs the task, and reports whether it has ended within patience. If not, it may still run, or never will.
func (t *turns) run(px *proxy, patience time.Duration, task func()) bool {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	mine := &turn{end: make(chan struct{}), late: make(chan struct{})}
	for {
		other := t.begin(px, mine)
		if other == nil {
			break
		}
		select {
		case <-other.end:
		case <-other.late:
			return false
		case <-limit.C:
			return false
		}
	}
	go func() {
		defer t.finish(px, mine)
		task()
	}()
	select {
	case <-mine.end:
		return true
	case <-limit.C:
		close(mine.late)
		return false
	}
}

// begin makes mine the turn of a pod, or returns the other one that is.
func (t *turns) begin(px *proxy, mine *turn) (other *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if other := t.busy[px]; other != nil {
		return other
	}
	if t.busy == nil {
		t.busy = map[*proxy]*turn{}
	}
	t.busy[px] = mine
	return nil
}

func (t *turns) finish(px *proxy, mine *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.busy, px)
	close(mine.end)
}
