// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"reflect"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// A pod's diversion pauses while the pod has nearly used up its pending places or
// its relays: new connections then go directly, as they would without an agent,
// and cost it nothing. Those that are carried go on. What policies require to be
// on SMC-R is diverted all the same, and reset where it does not fit.

// pause is why and since when a pod's diversion pauses.
type pause struct {
	code  agentapi.Code
	since time.Time
}

// paused is why the pod's diversion pauses, CodeOK if it does not.
func (r *run) paused() agentapi.Code {
	if p := r.pausing.Load(); p != nil {
		return p.code
	}
	return agentapi.CodeOK
}

// press makes govern look at the account.
func (r *run) press() {
	select {
	case r.pressed <- struct{}{}:
	default: // it is about to look
	}
}

// govern pauses and resumes the pod's diversion.
func (r *run) govern() {
	for {
		var look <-chan time.Time
		if r.pausing.Load() != nil {
			look = time.After(pauseLook)
		}
		select {
		case <-r.pressed:
		case <-look:
		case <-r.life.Done():
			return
		}
		if r.draining.Load() || r.released.Load() {
			return
		}
		r.steer(time.Now())
	}
}

// steer pauses the diversion if the pod's account is nearly used up, and ends a
// pause when half of it is free again.
func (r *run) steer(now time.Time) {
	p := r.pausing.Load()
	switch {
	case p == nil:
		code := r.account.crowded()
		if code == agentapi.CodeOK {
			return
		}
		r.pausing.Store(&pause{code, now})
		r.agent.metrics.pauses.WithLabelValues(string(code)).Inc()
		r.log.Warn("diversion pauses: new connections go directly", "reason", code, "detail", code.Text())
	case now.Sub(p.since) < pauseLeast || !r.account.calm():
		return
	default:
		r.pausing.Store(nil)
		r.log.Info("diversion goes on", "paused", now.Sub(p.since).Round(time.Millisecond))
	}
	if err := r.retable(); err != nil && !errors.Is(err, linux.ErrClosed) {
		r.log.Warn("redirection not updated; the old one stays in force until that works", "err", err)
		r.moved.Store(true) // the manager's next look tries again
	}
}

// retable brings the pod's table in line with the policies in force, and with a
// pause. The same again costs a transaction in each pod of the node, for each
// change in one of them. A table that somebody damaged is the heartbeat's.
func (r *run) retable() error {
	r.tabling.Lock()
	defer r.tabling.Unlock()
	cfg := r.redirectConfig()
	if reflect.DeepEqual(cfg, *r.install.Load()) {
		return nil
	}
	if err := r.redirect.Update(cfg); err != nil {
		return err
	}
	r.install.Store(&cfg)
	return nil
}

// repair puts back a table that somebody deleted.
func (r *run) repair() error {
	r.tabling.Lock()
	defer r.tabling.Unlock()
	return r.redirect.Update(*r.install.Load())
}

// selections are the destinations that are diverted in a pod now: in a pause, or with
// another redirector, only those of which the policies want nothing without SMC-R.
func (r *run) selections(n *config.Node, pod config.Pod) []config.Selection {
	if r.paused() != agentapi.CodeOK || r.meshed().code != "" {
		return n.OutboundRequired(pod)
	}
	return n.Outbound(pod)
}
