// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// refusals keep what a device refused last: memory that may not be locked, or
// more queue pairs, regions or queues than it has. The connections that it was for
// are plain TCP with reason MEM, which does not say why.
type refusals struct {
	mu   sync.Mutex // guards what is below
	text string
	last time.Time
	said time.Time // in the log
}

// note keeps a refusal; it reports whether to log it too.
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

// recent is the last refusal, if it is not long ago.
func (r *refusals) recent(now time.Time) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.text == "" || now.Sub(r.last) > refusalShown {
		return ""
	}
	return "an RDMA device refuses what connections need, which are plain TCP therefore: " + r.text
}

// noteStack takes what a pod's stack tells of messages and of its devices.
func (r *run) noteStack(where string, err error) {
	if !errors.Is(err, rdma.ErrNoResources) {
		r.agent.metrics.malformed.Inc()
		r.log.Debug("message not understood", "where", where, "err", err)
		return
	}
	r.refused.Add(1)
	r.agent.metrics.deviceRefusals.Inc()
	if r.agent.refusals.note(err, time.Now()) {
		r.log.Warn("RDMA device refuses what a connection needs; it is plain TCP", "err", err)
	}
}

// noteTrespass takes what a pod's stack tells of a peer that asked for memory that is
// not its own: a bug, or somebody who tries out keys.
func (r *run) noteTrespass(peer netip.Addr, err error) {
	r.agent.metrics.trespasses.Inc()
	if ok, dropped := r.agent.news.pass(time.Now()); ok {
		r.log.Warn("a peer asked for memory that is not its own; if it goes on, it gets no link group for a minute", "peer", peer, "err", err, "leftOut", dropped)
	}
}
