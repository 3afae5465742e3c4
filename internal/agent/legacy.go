// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// legacies are runs of an agent that handed over: they carry the connections
// that they have, and touch nothing in their pods. Owned by whoever has the
// turn: standBy, or the manager of an agent that manages again.
type legacies struct {
	runs   []legacy
	ending sync.WaitGroup // runs that tidy ends

	equipped uint64 // devices that came, and that all stacks have
}

// legacy is a released run.
type legacy struct {
	*run
	until time.Time // then its diversion is over
	shut  bool      // the doors are closed
}

// add releases a run.
func (ls *legacies) add(r *run, now time.Time) {
	if err := r.release(handoverHold); err != nil {
		r.log.Warn("diversion not held for the successor", "err", err)
	}
	ls.runs = append(ls.runs, legacy{run: r, until: now.Add(handoverHold)})
}

// heldUntil is when the last diversion to a listener of theirs is over.
func (ls *legacies) heldUntil() time.Time {
	var last time.Time
	for _, l := range ls.runs {
		if l.until.After(last) {
			last = l.until
		}
	}
	return last
}

// closeDoors stops listening, once nothing is diverted there any more.
func (ls *legacies) closeDoors(now time.Time) {
	for _, l := range ls.runs {
		l.draining.Store(true) // all at once, and then one after the other
	}
	for i := range ls.runs {
		if l := &ls.runs[i]; !l.shut {
			l.closeDoors()
			l.shut, l.until = true, now
		}
	}
}

// tidy ends the runs whose pod is gone, and those that have nothing to do any
// more. A handle on a namespace keeps it alive, so it must not outlive the pod.
func (ls *legacies) tidy(now time.Time) {
	kept := ls.runs[:0]
	for _, l := range ls.runs {
		idle := now.After(l.until) && len(l.agent.flows.list(l.run)) == 0
		if gone := l.net.gone(); !gone && !idle {
			kept = append(kept, l)
			continue
		}
		ls.ending.Go(func() { // its peers may be silent, and others wait
			if err := l.stop(agentapi.CodeDraining, true); err != nil {
				l.log.Warn("handed over pod not closed", "err", err)
			}
		})
	}
	clear(ls.runs[len(kept):])
	ls.runs = kept
}

// equip gives the stacks the devices that came while they ran.
func (ls *legacies) equip(ds *devices) {
	if _, came := ds.usable(nil); came != ls.equipped {
		ls.equipped = came
		for _, l := range ls.runs {
			open, _ := ds.usable(l.set)
			if err := addDevices(l.stack, open); err != nil {
				l.log.Warn("RDMA device not used by a pod that was handed over", "err", err)
			}
		}
	}
}

// judge ends the connections that the policies no longer allow.
func (ls *legacies) judge() {
	for _, l := range ls.runs {
		l.judge()
	}
}

// take returns the runs, for those who end them.
func (ls *legacies) take() []*run {
	out := make([]*run, len(ls.runs))
	for i, l := range ls.runs {
		out[i] = l.run
	}
	ls.runs = nil
	return out
}
