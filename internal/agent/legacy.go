// SPDX-License-Identifier: Apache-2.0

package agent

import (
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
	ending  sync.WaitGroup // proxies that stopFinished is stopping

	openCount uint64 // Set.Usable's count when all stacks got their devices
}

// legacy is a proxy that was released.
type legacy struct {
	*proxy
	until  time.Time // nothing is diverted to it after that
	closed bool      // its listeners are
}

// add releases a proxy and keeps it.
func (ls *legacies) add(px *proxy, now time.Time) {
	lasting := max(handoverTTL, px.tableConfig.Load().FailOpenTTL) // at least its own TTL, for which it lasts if the release fails
	if err := px.release(lasting); err != nil {
		px.log.Warn("diversion not held for the successor", "err", err)
	}
	ls.proxies = append(ls.proxies, legacy{proxy: px, until: now.Add(lasting)})
}

// divertedUntil is when the last diversion to one of their listeners ends.
func (ls *legacies) divertedUntil() time.Time {
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
