// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// A pod's diversion pauses while the pod has nearly used up its pending connections or relays. New
// connections then go directly, as they would without an agent, and cost it nothing. Sessions go
// on. What policies require to be on SMC-R is still diverted, both ways, and reset if it does not
// fit. For example, a pod whose programs open 1000 connections at once to peers without SMC-R:
//
//	7/8 of the pending connections are used   the table is replaced: new connections go directly
//	connections end, less than 1/2 is used    the table diverts again, if pauseLeast is over
//
// Before that, connections of a single client that has more than its share go directly, and the
// pod's other clients notice nothing.

// pause is a pause of a pod's diversion.
type pause struct {
	code  agentapi.Code
	since time.Time
}

// greedy are the clients whose connections to a pod are not diverted.
type greedy struct {
	sources []netip.Addr
	since   time.Time // when the list changed
}

// greedySources are the pod's greedy clients now.
func (px *proxy) greedySources() []netip.Addr {
	if g := px.greedy.Load(); g != nil {
		return g.sources
	}
	return nil
}

// paused is why the pod's diversion pauses; CodeOK if it does not.
func (px *proxy) paused() agentapi.Code {
	if p := px.pausing.Load(); p != nil {
		return p.code
	}
	return agentapi.CodeOK
}

// notifyBudget tells watchBudget that the pod's account changed.
func (px *proxy) notifyBudget() {
	select {
	case px.budgetUsed <- struct{}{}:
	default: // watchBudget is about to look anyway
	}
}

// watchBudget pauses and resumes the pod's diversion, until the proxy drains.
func (px *proxy) watchBudget() {
	for {
		var look <-chan time.Time
		if px.pausing.Load() != nil || len(px.greedySources()) > 0 {
			look = time.After(pauseLook)
		}
		select {
		case <-px.budgetUsed:
		case <-look:
		case <-px.life.Done():
			return
		}
		if px.draining.Load() || px.released.Load() {
			return
		}
		px.adjustDiversion(time.Now())
	}
}

// adjustDiversion changes the pod's table if the use of the pod's account calls for it.
func (px *proxy) adjustDiversion(now time.Time) {
	bySource, all := px.adjustSources(now), px.adjustPause(now)
	if !bySource && !all {
		return
	}
	if err := px.updateTable(); err != nil && !errors.Is(err, linux.ErrClosed) {
		px.log.Warn("redirection not updated; the old one stays in force until that works", "err", err)
		px.tableStale.Store(true) // the manager's next round tries again
	}
}

// adjustSources enters the clients that have more than sourceShare, and removes those that have
// less than sourceResume. It reports whether the list changed.
func (px *proxy) adjustSources(now time.Time) (changed bool) {
	var before greedy
	if g := px.greedy.Load(); g != nil {
		before = *g
	}
	sources := px.account.greedy(before.sources)
	if now.Sub(before.since) < pauseLeast {
		sources = append(sources, before.sources...)
		slices.SortFunc(sources, netip.Addr.Compare)
		sources = slices.Compact(sources)
	}
	sources = sources[:min(len(sources), maxGreedy)]
	if slices.Equal(sources, before.sources) {
		return false
	}
	for _, s := range sources {
		if !slices.Contains(before.sources, s) {
			code := agentapi.CodeBudgetSource
			px.agent.metrics.pauses.WithLabelValues(string(code)).Inc()
			px.log.Warn("diversion pauses for a client: its new connections go directly", "peer", s, "reason", code, "detail", code.Text())
		}
	}
	for _, s := range before.sources {
		if !slices.Contains(sources, s) {
			px.log.Info("diversion goes on for a client", "peer", s)
		}
	}
	px.greedy.Store(&greedy{sources, now})
	return true
}

// adjustPause begins a pause if the pod's account is nearly full, and ends it when half is free
// again. It reports whether something changed.
func (px *proxy) adjustPause(now time.Time) (changed bool) {
	p := px.pausing.Load()
	switch {
	case p == nil:
		code := px.account.nearlyFull()
		if code == agentapi.CodeOK {
			return false
		}
		px.pausing.Store(&pause{code, now})
		px.agent.metrics.pauses.WithLabelValues(string(code)).Inc()
		px.log.Warn("diversion pauses: new connections go directly", "reason", code, "detail", code.Text())
	case now.Sub(p.since) < pauseLeast || !px.account.halfFree():
		return false
	default:
		px.pausing.Store(nil)
		px.log.Info("diversion goes on", "paused", now.Sub(p.since).Round(time.Millisecond))
	}
	return true
}

// updateTable replaces the pod's table if the policies, or a pause, want another one than is
// installed. An update is a transaction in the pod; without this comparison one changed policy
// would cost a transaction in each pod of the node. A table that somebody deleted is put back by
// heartbeat.
func (px *proxy) updateTable() error {
	px.tableMu.Lock()
	defer px.tableMu.Unlock()
	cfg := px.redirectConfig()
	if reflect.DeepEqual(cfg, *px.tableConfig.Load()) {
		return nil
	}
	if err := px.redirect.Update(cfg); err != nil {
		return err
	}
	px.tableConfig.Store(&cfg)
	return nil
}

// restoreTable puts the table back after somebody deleted it.
func (px *proxy) restoreTable() error {
	px.tableMu.Lock()
	defer px.tableMu.Unlock()
	return px.redirect.Update(*px.tableConfig.Load())
}

// divertInbound sets the ports whose SYNs with the option are diverted. In a pause these are only
// the ports for which a policy requires SMC-R, and these hold for greedy clients, too.
func (px *proxy) divertInbound(cfg *linux.RedirectConfig, n *config.Node, pods []config.Pod) {
	required, allRequired := n.InboundPortsRequired(pods...)
	ports, all := required, allRequired
	if px.paused() == agentapi.CodeOK {
		ports, all = n.InboundPorts(pods...)
	}
	cfg.InboundAll = all
	cfg.Inbound, cfg.InboundAlways = portRanges(ports), portRanges(required)
	if allRequired {
		cfg.InboundAlways = append(cfg.InboundAlways, linux.PortRange{First: 0, Last: 1<<16 - 1})
	}
}

// selections are the destinations that are diverted in a pod. In a pause, or with another
// redirector, these are only the destinations for which a policy requires SMC-R.
func (px *proxy) selections(n *config.Node, pods []config.Pod) []config.Selection {
	if px.paused() != agentapi.CodeOK || px.meshed().code != "" {
		return n.OutboundRequired(pods...)
	}
	return n.Outbound(pods...)
}
