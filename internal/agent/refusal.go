// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
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

// stackHooks are what a stack calls. A stack that pods share may outlive the proxy that made it.
type stackHooks struct {
	agent  *agent
	log    *slog.Logger // with the pod or, if pods share the stack, NAMESPACE/*
	memory *account     // of the stack's memory
}

// stackHooks are the hooks of the proxy's stack, the account of whose memory is memory.
func (px *proxy) stackHooks(memory *account) smcr.Hooks {
	h := stackHooks{px.agent, px.log, memory}
	if px.sharesStack() {
		h.log = px.agent.cfg.Log.With("pod", podOf((*px.atts.Load())[0]).Namespace+"/*")
	}
	return smcr.Hooks{Malformed: h.noteMalformed, Failed: h.noteFailed, Trespass: h.noteTrespass, PathMTU: h.notePathMTU}
}

// noteMalformed is the hook for messages of peers that the stack did not understand.
func (h stackHooks) noteMalformed(where string, err error) {
	h.agent.metrics.malformed.Inc()
	h.log.Debug("message not understood", "where", where, "err", err)
}

// noteFailed is the hook for what fails in the stack without a peer's fault.
func (h stackHooks) noteFailed(what string, err error) {
	if !errors.Is(err, rdma.ErrNoResources) {
		h.agent.metrics.failures.Inc()
		h.log.Debug("failed in the SMC-R stack", "where", what, "err", err)
		return
	}
	h.memory.deviceRefused.Add(1)
	h.agent.metrics.deviceRefusals.Inc()
	if h.agent.refusals.note(err, time.Now()) {
		h.log.Warn("RDMA device refuses what a connection needs; it is plain TCP", "err", err)
	}
}

// noteTrespass is the hook for a peer that asked for memory that is not its own: it has a bug, or
// tries out keys.
func (h stackHooks) noteTrespass(peer netip.Addr, err error) {
	h.agent.metrics.trespasses.Inc()
	if ok, dropped := h.agent.logLimit.allow(time.Now()); ok {
		h.log.Warn("a peer asked for memory that is not its own; if it goes on, it gets no link group for a minute", "peer", peer, "err", err, "leftOut", dropped)
	}
}

// notePathMTU is the hook for a network that carries smaller packets only than the interfaces at both ends of it do.
func (h stackHooks) notePathMTU(m smcr.PathMTU) {
	ok, dropped := h.agent.logLimit.allow(time.Now())
	if !ok {
		return
	}
	log := h.log.With("peer", m.Peer, "rnic", m.PeerGID.Addr(), "device", m.Device, "pathMTU", m.Lost.Bytes(), "leftOut", dropped)
	if m.Next == 0 {
		log.Warn("the network does not carry RDMA packets of this size to a peer, but smaller messages; connections were reset, and the next ones are plain TCP for ten minutes")
		return
	}
	log.Warn("the network does not carry RDMA packets of this size to a peer, but smaller ones; connections were reset, and new links with the peer have "+
		"a smaller path MTU for ten minutes. Set soft.mtu of the devices lower, or the MTU of an RDMA device's interface", "next", m.Next.Bytes())
}
