// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// refusals keep the last error of a device that had no resources: memory that may not be locked, or
// more queue pairs, regions or queues than the device has. The connections concerned become plain
// TCP with reason MEM, which says nothing of that.
type refusals struct {
	mu   sync.Mutex // guards what is below
	text string
	last time.Time
	said time.Time // when it was logged last
}

// note keeps an error, and reports whether to log it, too.
func (r *refusals) note(err error, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	fresh := r.text != err.Error() && now.Sub(r.said) >= refusalPause || now.Sub(r.said) >= refusalShown
	r.text, r.last = err.Error(), now
	if fresh {
		r.said = now
	}
	return fresh
}

// recent describes the last refusal for the status; "" if it was long ago.
func (r *refusals) recent(now time.Time) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.text == "" || now.Sub(r.last) > refusalShown {
		return ""
	}
	return "an RDMA device refuses what connections need, which are plain TCP therefore: " + r.text
}

// noteMalformed is the hook for messages of peers that the stack did not understand.
func (px *proxy) noteMalformed(where string, err error) {
	px.agent.metrics.malformed.Inc()
	px.log.Debug("message not understood", "where", where, "err", err)
}

// noteFailed is the hook for what fails in the stack without a peer's fault.
func (px *proxy) noteFailed(what string, err error) {
	if !errors.Is(err, rdma.ErrNoResources) {
		px.agent.metrics.failures.Inc()
		px.log.Debug("failed in the SMC-R stack", "where", what, "err", err)
		return
	}
	px.deviceRefusals.Add(1)
	px.agent.metrics.deviceRefusals.Inc()
	if px.agent.refusals.note(err, time.Now()) {
		px.log.Warn("RDMA device refuses what a connection needs; it is plain TCP", "err", err)
	}
}

// noteTrespass is the hook for a peer that asked for memory that is not its own: it has a bug, or
// tries out keys.
func (px *proxy) noteTrespass(peer netip.Addr, err error) {
	px.agent.metrics.trespasses.Inc()
	if ok, dropped := px.agent.logLimit.allow(time.Now()); ok {
		px.log.Warn("a peer asked for memory that is not its own; if it goes on, it gets no link group for a minute", "peer", peer, "err", err, "leftOut", dropped)
	}
}
