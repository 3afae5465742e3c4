// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

// revoker is kernelpath.Revoke, for pods.
type revoker interface {
	// revoke ends the connections on SMC-R of a pod that a filter refuses.
	revoke(n podNet, f linux.OptionFilterConfig, allowed []uint64) (kernelpath.Revocation, error)
}

// revoked is how far a pod's connections on its kernel's SMC-R are in line with the pod's filter.
type revoked struct {
	until   time.Time // they are looked at in each round until then, and as long as some are unsettled
	lookAt  time.Time // when they are looked at next after that, until a handshake that began before is over
	retryAt time.Time // when some could not be ended, after a pause that doubles
	pause   time.Duration
	// unsettled and allowed are what the last look found.
	unsettled bool
	allowed   []uint64
	// problem is why connections live that the filter refuses; "" if none does.
	problem string
	// said is what the pod's policies said when the filter was made, and spared what their filters selected since they say that:
	// such connections may go on.
	said   [][]config.Policy
	spared []linux.OutboundRule
}

// saidOf is what the policies of a pod say, of each attachment, whichever pods their peer selectors find.
func saidOf(n *config.Node, atts []cni.Attachment) [][]config.Policy {
	out := make([][]config.Policy, len(atts))
	for i, att := range atts {
		out[i] = slices.Clone(n.PoliciesFor(podOf(att)))
		for j := range out[i] {
			out[i][j].Addresses, out[i][j].NoPeers = nil, false
		}
	}
	return out
}

// after is where looking at the pod's connections begins when the filter was, and is now another one. As long as the policies say the same,
// what left the filter are the addresses of peers that their selectors do not find any more, and isForbidden of a session says
// why these are spared. Rules do not name their policy, so another form of any of them ends that.
func (r revoked) after(said [][]config.Policy, was, is linux.OptionFilterConfig) revoked {
	next := revoked{said: said}
	if !reflect.DeepEqual(said, r.said) {
		return next
	}
	for _, x := range slices.Concat(was.Peers, r.spared) {
		same := func(y linux.OutboundRule) bool {
			return x.Prefix == y.Prefix && x.Exclude == y.Exclude && slices.Equal(x.Ports, y.Ports)
		}
		if len(next.spared) < maxSpared && !slices.ContainsFunc(is.Peers, same) && !slices.ContainsFunc(next.spared, same) {
			next.spared = append(next.spared, x)
		}
	}
	return next
}

// revokeAgain looks once more at the connections of a pod whose filter did not change, if there may be
// some to end.
func (m *manager) revokeAgain(p *pod, f linux.OptionFilterConfig, now time.Time) {
	r := p.kernel.revoked
	settled := !r.unsettled && now.After(r.until) && (now.Before(r.lookAt) || now.After(r.until.Add(handshakeLife)))
	if r.problem != "" && now.Before(r.retryAt) || r.problem == "" && settled {
		return
	}
	m.revoke(p, f, now)
}

// revoke ends the connections of a pod on its kernel's SMC-R that the pod's filter refuses, but for those that are spared.
func (m *manager) revoke(p *pod, f linux.OptionFilterConfig, now time.Time) {
	k := *p.kernel
	was := k.revoked.problem
	if k.revoked.until.IsZero() {
		k.revoked.until = now.Add(revokeFor)
	}
	k.revoked.lookAt = now.Add(leaveEvery)
	f.Peers = slices.Concat(f.Peers, k.revoked.spared)
	found, err := m.a.kernelPath.get().revoke(k.net, f, k.revoked.allowed)
	k.revoked.unsettled, k.revoked.allowed, k.revoked.problem = found.Unsettled, found.Allowed, ""
	if err != nil {
		k.revoked.problem = fmt.Sprintf("connections on SMC-R may live on that no policy allows any more, and it is tried again: %v", err)
		if found.Left > 0 {
			k.revoked.problem = fmt.Sprintf("%d connections on SMC-R live on that no policy allows any more, and it is tried again: %v", found.Left, err)
		}
		k.revoked.pause = min(max(2*k.revoked.pause, retryFirst), retryMost) // a search may take most of a second
		k.revoked.retryAt = now.Add(k.revoked.pause)
	} else {
		k.revoked.pause = 0
	}
	p.kernel = &k
	for _, e := range found.Ended {
		m.recordEnded(p.atts, &k, e)
	}
	if k.revoked.problem != "" && was == "" {
		k.log.Warn("connections on the pod's kernel's SMC-R not ended", "conns", found.Left, "err", err)
	}
}

// isTooMuch tells whether a pod's kernel cannot be told all that the pod's policies want, which lasts until they or the node's pods change.
func isTooMuch(err error) bool {
	var bounds *linux.ConfigError
	return errors.Is(err, config.ErrTooMany) || errors.As(err, &bounds)
}

// withhold makes new connections TCP of a pod whose policies want too much, which why says, and ends those that they do not allow: under
// an earlier filter peers would stay that no policy selects any more. The error is why. A pod that was not attached stays so.
func (m *manager) withhold(p *pod, cfg kernelpath.PodConfig, why error, now time.Time) error {
	switch {
	case p.kernel == nil && (!m.isInherited(p) || m.untouched(p, why) == nil), p.kernel != nil && p.kernel.leaving:
		return why
	case p.kernel == nil:
		if _, err := m.a.kernelPath.acquire(); err != nil {
			return errors.Join(why, err)
		}
		if err := m.inherit(p); err != nil {
			return errors.Join(why, err)
		}
		m.a.kernelStats.begin(p.kernel)
	}
	k, said := *p.kernel, saidOf(m.a.node.Load(), p.atts)
	cfg.SendBufferBytes, cfg.RMBEBytes = k.cfg.SendBufferBytes, k.cfg.RMBEBytes
	none := cfg
	none.Filter = linux.OptionFilterConfig{}
	if err := m.a.kernelPath.get().attach(k.net, none); err != nil {
		return errors.Join(why, err)
	}
	problem := k.revoked.problem
	k.withheld, k.revoked = true, k.revoked.after(said, k.cfg.Filter, cfg.Filter)
	k.revoked.problem = problem // it was told
	k.cfg = cfg                 // as if it had that filter: so what leaves it is spared
	p.kernel = &k
	m.revoke(p, cfg.Filter, now)
	return why
}

// recordEnded records that a policy's change, or the pod's deletion, ended a connection of a pod's kernel.
func (m *manager) recordEnded(atts []cni.Attachment, k *kernelPod, e kernelpath.Ended) {
	pod := podOf(attachmentWith(atts, e.Local.Addr()))
	d := agentapi.Decision{
		Pod: pod.String(), Direction: agentapi.Outbound, Source: e.Local.Addr(), Dest: e.Peer,
		Mode: agentapi.ModeEnded, Reason: m.a.changeCode(pod), Last: time.Now(),
	}
	if e.Role == smcnl.Server {
		d.Direction, d.Source, d.Dest = agentapi.Inbound, e.Peer.Addr(), e.Local
	}
	m.a.metrics.ended.WithLabelValues(string(d.Reason)).Inc()
	m.a.decisions.record(d)
	if ok, dropped := m.a.logLimit.allow(d.Last); ok {
		k.log.Warn("connection on the pod's kernel's SMC-R ended", "direction", d.Direction, "source", d.Source, "destination", d.Dest,
			"reason", d.Reason, "leftOut", dropped)
	}
}

// attachmentWith is that of a pod's attachments that has an address, the first one if none has.
func attachmentWith(atts []cni.Attachment, addr netip.Addr) cni.Attachment {
	for _, att := range atts {
		if slices.ContainsFunc(att.Addresses(), func(p netip.Prefix) bool { return p.Addr() == addr }) {
			return att
		}
	}
	return atts[0]
}
