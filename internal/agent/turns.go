// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync"
	"time"
)

// turns runs tasks that may take long, one at a time for each key, and lets nobody wait long for them:
//
//	0 ms    a task begins, and hangs
//	100 ms  a second one begins to wait for its turn
//	250 ms  whoever began the first one goes on without it; from now on others for that key do not even wait
//	350 ms  the second one would have waited long enough; since 250 ms nobody waits
//	30 s    the task ends: the next one has its turn
//
// Its zero value is ready.
type turns struct {
	mu   sync.Mutex // guards what is below
	busy map[string]*turn
}

type turn struct {
	end  chan struct{} // closed when the task has ended
	late chan struct{} // closed when nobody waits for it any more
}

// run runs the task, and reports whether it has ended within patience. If not, it may still run, or never will.
func (t *turns) run(key string, patience time.Duration, task func()) bool {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	mine := &turn{end: make(chan struct{}), late: make(chan struct{})}
	for {
		other := t.begin(key, mine)
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
		defer t.finish(key, mine)
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

// begin makes mine the turn of a key, or returns the other one that is.
func (t *turns) begin(key string, mine *turn) (other *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if other := t.busy[key]; other != nil {
		return other
	}
	if t.busy == nil {
		t.busy = map[string]*turn{}
	}
	t.busy[key] = mine
	return nil
}

func (t *turns) finish(key string, mine *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.busy, key)
	close(mine.end)
}
