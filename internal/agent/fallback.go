// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// admitSMCR reserves one of the connections on SMC-R for a session, or says why the session may not
// be on SMC-R.
func (px *proxy) admitSMCR(s *session) fallback {
	why := fallback{code: px.ineligible(s)}
	if why.code != agentapi.CodeOK {
		return why
	}
	if s.dir == agentapi.Outbound && px.out.lacks(s.dst.Addr()) {
		return fallback{code: agentapi.CodeUndiverted, detail: noIPv6Detail}
	}
	if full := s.reservation.takeConn(); full != "" {
		return fallback{code: agentapi.CodeBudgetConns, detail: full}
	}
	return why
}

// fallback is why a session is not on SMC-R.
type fallback struct {
	code         agentapi.Code
	peerDeclined bool
	detail       string // more than the code says; may be ""
}

// shortage counts how often memory, queue pairs or a device's resources were missing for the pod.
// Compared before and after a rendezvous, it tells why the rendezvous declined with MEM.
type shortage struct {
	memory, queuePairs, device uint64
	full                       string // the budget of memory that was full the last time
}

func (px *proxy) shortage() shortage {
	n, full := px.memory.memoryRefusals()
	return shortage{memory: n, queuePairs: px.memory.queuePairRefusals(), device: px.memory.deviceRefused.Load(), full: full}
}

// fallbackOf says why a rendezvous ended with TCP. The stack declines with MEM for several reasons:
// the pod's or the node's budget of memory, the queue pairs of a device, or a device that has no
// resources left. What grew since before tells which.
func (px *proxy) fallbackOf(i smcr.Info, before shortage) fallback {
	why := fallback{code: agentapi.CodeOf(i.Reason), peerDeclined: i.PeerDeclined}
	if i.Reason == clc.ReasonNone || !i.Reason.Known() {
		why.code, why.detail = agentapi.CodeUnknownReason, i.Reason.Text()
	}
	if i.Reason != clc.ReasonMem || i.PeerDeclined {
		return why
	}
	switch now := px.shortage(); {
	case now.memory != before.memory:
		why.code, why.detail = agentapi.CodeBudgetMemory, now.full
	case now.queuePairs != before.queuePairs:
		why.code = agentapi.CodeQueuePairs
	case now.device == before.device:
		why.code, why.detail = agentapi.CodeBudgetMemory, podFull // the stack's own budget was full, which is the pod's
	}
	return why
}

// declineReason is the reason in the Decline that the client gets.
func declineReason(code agentapi.Code) clc.Reason {
	switch code {
	case agentapi.CodeOK:
		return clc.ReasonNone
	case agentapi.CodeBudgetConns, agentapi.CodeBudgetMemory:
		return clc.ReasonMem
	case agentapi.CodePodDevice, agentapi.CodeOf(clc.ReasonNoDev):
		return clc.ReasonNoDev
	case agentapi.CodeBacklog:
		return clc.ReasonInternal // which passes by itself, see temporary
	}
	return clc.ReasonConfigErr
}

// ineligible says why a session may not be on SMC-R, as far as that is known without asking the
// peer.
func (px *proxy) ineligible(s *session) agentapi.Code {
	if !s.decision.Accelerate {
		return codeOfDecision(s.decision)
	}
	if code := px.agent.unableWith(px.set).code; code != "" {
		return code
	}
	if code := px.meshed().code; code != "" {
		return code
	}
	return agentapi.Code(px.mismatch().Code())
}

// codeOfDecision is the reason code of a policy's decision against SMC-R.
func codeOfDecision(d config.Decision) agentapi.Code {
	if d.Reason == config.ReasonOptedOut {
		return agentapi.CodeOptedOut
	}
	return agentapi.CodeNoPolicy
}

// bypassFirst enters the destination of a session into the negative cache before the agent dials it
// for plain TCP. It does so for two kinds of reasons: those that hold for many connections at once
// (a budget is full), and another redirector in the pod, which may bring the agent's connection
// back to the agent. It returns false if the session must not be dialed, because it could come
// back.
func (px *proxy) bypassFirst(s *session, code agentapi.Code) bool {
	switch code {
	case agentapi.CodeBudgetConns, agentapi.CodeBudgetMemory:
		px.bypass(s, code, true)
	case agentapi.CodeMesh:
		return px.bypass(s, code, true) // whatever time that takes
	}
	return true
}

// bypass enters the session's destination into the negative cache, so that the next connections go
// there directly. Passing reasons count for a shorter time. It reports whether the entry was made.
func (px *proxy) bypass(s *session, code agentapi.Code, passing bool) bool {
	return px.bypassFor(s, code, passing) > 0
}

// bypassFor is bypass, and returns for how long the entry was made; 0: it was not, or not yet. The kernel makes it wait for
// other changes of nftables, which take long in some other pod perhaps. This connection does not wait, unless another program
// redirects connections in the pod.
func (px *proxy) bypassFor(s *session, code agentapi.Code, passing bool) time.Duration {
	n := px.agent.node.Load()
	ttl := n.NegativeCacheTTL
	if passing {
		ttl /= tempShare
	}
	if code == agentapi.CodeMesh {
		ttl = max(ttl, leastMeshBypass)
	}
	if ttl < time.Millisecond || s.decision.Required || px.requires(s.peer()) {
		return 0 // s.decision may be old, and the cache counts for the pod's other interfaces, too
	}
	var made bool
	makes := func() { made = makeBypass(px, s, code, ttl) }
	if code == agentapi.CodeMesh { // without an entry the connection must not be dialed
		makes()
	} else if !px.agent.bypasses.making.run(px, px.agent.cfg.bypassPatience, makes) {
		px.log.Debug("destination not remembered yet: the kernel is busy with other changes of nftables", "peer", s.dst)
		return 0
	}
	if !made {
		return 0
	}
	return ttl
}

// makeBypass makes an entry of the negative cache, and reports whether it is there.
func makeBypass(px *proxy, s *session, code agentapi.Code, ttl time.Duration) bool {
	if err := px.redirect.Bypass(s.dst, ttl); err != nil {
		px.log.Debug("destination not remembered", "peer", s.dst, "err", err) // all that this costs is one more rendezvous
		return false
	}
	if px.requires(s.peer()) {
		// The policies may have changed meanwhile, and update have forgotten all entries before this one was made:
		//
		//	makeBypass                update
		//	requires: no
		//	                          the policies require SMC-R
		//	                          Forget
		//	Bypass
		//	requires: yes
		if err := px.forgetDestinations(); err != nil {
			px.log.Warn("negative cache not emptied, so that new connections may be plain TCP though SMC-R is required", "peer", s.dst, "err", err)
		}
		return false
	}
	if px.life.Err() != nil {
		return false // the pod's entries are forgotten, or will be
	}
	px.agent.bypasses.add(agentapi.Bypass{Pod: s.pod.String(), Dest: s.dst, Reason: code, Until: time.Now().Add(ttl)})
	return true
}

// forgetDestinations empties the negative cache, and with it what the agent knows of its entries and of destinations
// that were asked for held SYNs.
func (px *proxy) forgetDestinations() error {
	if err := px.redirect.Forget(); err != nil {
		return err
	}
	px.hold.Load().forget()
	px.agent.bypasses.forget(podOf((*px.atts.Load())[0]).String())
	return nil
}

// temporary reports whether a reason passes by itself.
func temporary(r clc.Reason) bool {
	switch r {
	case clc.ReasonMem, clc.ReasonSyncErr, clc.ReasonNoActLink, clc.ReasonNoSrvLink, clc.ReasonInternal,
		clc.ReasonErrRToken, clc.ReasonErrReadyLnk, clc.ReasonErrRegBuf:
		return true
	}
	return false
}
