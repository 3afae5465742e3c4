// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
)

// legacies are the proxies of an agent that handed over: they carry their sessions, and change
// nothing in their pods. At most one goroutine uses legacies: that of standBy or, if the agent
// manages the node again, the manager's.
type legacies struct {
	proxies []legacy
	ending  sync.WaitGroup // what runs in the background: releases, and the ends of proxies

	openCount uint64 // Set.Usable's count when all stacks got their devices
}

// legacy is a proxy that was released.
type legacy struct {
	*proxy
	lasting  time.Duration   // of its diversion after the release
	released <-chan struct{} // closed when the release has ended
	late     bool            // it had not when the node was handed over
	until    time.Time       // nothing is diverted to it after that
	closed   bool            // its listeners are
}

// add releases proxies, side by side, and keeps them. It waits for releasePatience at most: one pod must not keep the node, and the
// other pods' diversions, which nobody renews any more. The diversion of a pod that is late holds as long as it was last
// renewed for, and the successor, which looks at all pods, sets that pod up as any other.
func (ls *legacies) add(proxies []*proxy, now func() time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), releasePatience)
	defer cancel()
	first := len(ls.proxies)
	for _, px := range proxies {
		released := make(chan struct{})
		l := legacy{proxy: px, released: released}
		l.lasting = max(handoverTTL, px.tableConfig.Load().FailOpenTTL) // at least its own TTL, for which it lasts if the release fails
		ls.proxies = append(ls.proxies, l)
		ls.ending.Go(func() {
			defer close(released)
			if err := px.release(ctx, l.lasting); err != nil {
				px.log.Warn("diversion not held for the successor", "err", err)
			}
		})
	}
	for i := first; i < len(ls.proxies); i++ {
		l := &ls.proxies[i]
		select {
		case <-l.released:
		case <-ctx.Done():
			if l.late = !isClosed(l.released); !l.late {
				continue
			}
			l.log.Warn("pod is late with its release; its diversion ends by itself unless the successor is there before", "waited", releasePatience)
		}
	}
	for i := first; i < len(ls.proxies); i++ {
		ls.proxies[i].until = now().Add(ls.proxies[i].lasting)
	}
}

// settle has the diversion to a proxy whose release is late, or has just ended, last from now on.
func (ls *legacies) settle() {
	for i := range ls.proxies {
		l := &ls.proxies[i]
		if !l.late || l.closed {
			continue
		}
		l.late = !isClosed(l.released)
		l.until = time.Now().Add(l.lasting)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// divertedUntil is when the last diversion to one of their listeners ends.
func (ls *legacies) divertedUntil() time.Time {
	ls.settle()
	var last time.Time
	for _, l := range ls.proxies {
		if l.until.After(last) {
			last = l.until
		}
	}
	return last
}

// closeListeners closes the listeners of all, once nothing is diverted to them.
func (ls *legacies) closeListeners(now time.Time) {
	for _, l := range ls.proxies {
		l.closing.Store(true) // first all, so that their accept loops end at the same time
	}
	for i := range ls.proxies {
		if l := &ls.proxies[i]; !l.closed {
			l.closeListeners()
			l.closed, l.until = true, now
		}
	}
}

// stopFinished stops the proxies whose pod is gone, and those to which nothing is diverted and that
// have no sessions, nor anything to deliver. A handle on a namespace keeps the namespace alive, so the proxy of a pod that
// is gone must not keep its handle.
func (ls *legacies) stopFinished(now time.Time) {
	ls.settle()
	kept := ls.proxies[:0]
	for _, l := range ls.proxies {
		gone := l.net.gone()
		idle := now.After(l.until) && l.agent.sessions.count(l.proxy) == 0
		// The proxy resigns here, since others that share the stack are looked at before the proxy has stopped.
		if finished := (gone || idle) && l.resign(); !gone && !finished {
			kept = append(kept, l)
			continue
		}
		ls.ending.Go(func() { // in the background, since its peers may not answer
			if err := l.stop(agentapi.CodeDraining, true); err != nil {
				l.log.Warn("handed over pod not closed", "err", err)
			}
		})
	}
	clear(ls.proxies[len(kept):])
	ls.proxies = kept
}

// addNewDevices gives the stacks the devices that were opened while they ran.
func (ls *legacies) addNewDevices(node *rnics.Set) {
	if _, count := node.Usable(); count != ls.openCount {
		ls.openCount = count
		for _, l := range ls.proxies {
			open, _ := l.set.Usable()
			if err := addDevices(l.stack, open); err != nil {
				l.log.Warn("RDMA device not used by a pod that was handed over", "err", err)
			}
		}
	}
}

// enforcePolicies resets the sessions that the policies do not allow any more.
func (ls *legacies) enforcePolicies() {
	for _, l := range ls.proxies {
		l.enforcePolicies()
	}
}

// take removes the proxies and returns them, for the caller to stop.
func (ls *legacies) take() []*proxy {
	out := make([]*proxy, len(ls.proxies))
	for i, l := range ls.proxies {
		out[i] = l.proxy
	}
	ls.proxies = nil
	return out
}
