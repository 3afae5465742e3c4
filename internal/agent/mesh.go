// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// # Other redirectors
//
// The agent connects on behalf of a pod from inside the pod's namespace. A redirector of somebody
// else there, for example of a service mesh, may send the agent's connection to its own program;
// the connection of that program is diverted to the agent again, and so on without end. Three rules
// make a connection pass the agent once:
//
//   - The agent looks for rules of others before it sets a pod up, and then every
//     othersEvery. While another program redirects connections, only destinations
//     for which a policy requires SMC-R are diverted in the pod, and the agent
//     resets these connections before it dials anything (MESH).
//   - If such rules come between two looks, the kernel catches the first connection
//     of the agent that they redirect, before it gets anywhere.
//   - A destination that is to stay TCP is in the negative cache before the agent
//     dials it.
//
// So it is with rules that match the owner of packets, as a pod's own firewall may have, which forbids a user to connect: what
// the agent sends for the user's program has another owner. And with rules that change marks, by which packets find the agent, or
// that exclude packets from connection tracking, which keeps them from the agent: those are the pod's connections all the same, but where
// a policy requires SMC-R the table refuses them.
// Nothing catches a connection if such rules come between two looks.

// surroundings are the rules of others in a pod's namespace, as of one look. They do not change.
type surroundings struct {
	linux.Others
	caught bool // the kernel caught a connection of the agent that was redirected
	// quiet is since when there were no rules of others; zero: there are some.
	quiet time.Time
	// plain means that packets which are not diverted are kept from connection tracking.
	plain bool
}

// hindrance says which rules of others keep the pod's connections from the agent; "" if none do.
func (s *surroundings) hindrance() string {
	const redirects = "another program redirects connections in the pod: "
	switch {
	case s.Redirector != "":
		return redirects + s.Redirector
	case s.caught:
		return redirects + "a connection of the agent's was redirected"
	case s.Confused != "":
		return "rules in the pod " + s.Confused
	}
	return ""
}

// next returns the surroundings after s, which is nil before the first look. Packets that are kept
// from connection tracking are kept from the rules of others, too, and such rules mostly appear
// when a pod starts. So plain becomes true only when there were no rules of others for as long as
// patience, or if an earlier agent left it so (others.Untracked).
func (s *surroundings) next(others linux.Others, caught bool, now time.Time, patience time.Duration) *surroundings {
	n := &surroundings{Others: others, caught: caught}
	if others.Rules != "" || caught {
		return n
	}
	n.quiet, n.plain = now, others.Untracked
	if s != nil && !s.quiet.IsZero() {
		n.quiet, n.plain = s.quiet, s.plain || now.Sub(s.quiet) >= patience
	}
	return n
}

// meshed is why nothing can be on SMC-R in the pod because of the rules of others. The proxy may be
// nil.
func (px *proxy) meshed() unable {
	if px == nil {
		return unable{}
	}
	why := px.surroundings.Load().hindrance()
	if why == "" {
		return unable{}
	}
	return unable{why, agentapi.CodeMesh}
}

// unableFor is why nothing can be on SMC-R in a pod.
func (a *agent) unableFor(p *pod) unable {
	if lack := a.unableWith(p.set); lack.code != "" {
		return lack
	}
	return p.proxy.meshed()
}

// unreadableRules says which rules in the pod could not be read; "" if all could. The proxy may be
// nil.
func (px *proxy) unreadableRules() string {
	if px == nil || px.surroundings.Load().Unknown == "" {
		return ""
	}
	return "another program that redirects connections in the pod would be noticed only when it takes one, and rules that match the owner of packets not at all: " + px.surroundings.Load().Unknown
}

// lookPause is the pause before the next look for other redirectors. The more the last look cost,
// the longer is the pause, since a program in the pod can make it expensive.
func lookPause(cost time.Duration) time.Duration {
	return min(max(othersEvery, othersShare*cost), othersMost)
}

// findRedirectors looks for other redirectors before the pod's table is installed.
func (px *proxy) findRedirectors() error {
	others, err := px.net.others()
	if err != nil {
		return err
	}
	var none *surroundings
	is := none.next(others, false, time.Now(), px.agent.cfg.untrackAfter)
	px.surroundings.Store(is)
	px.logMesh(&surroundings{}, is)
	return nil
}

// recheckRedirectors looks again. If something changed, the manager's next round updates the table.
func (px *proxy) recheckRedirectors(now time.Time) error {
	others, err := px.net.others()
	caught, cerr := px.redirect.Caught()
	if err := errors.Join(err, cerr); err != nil {
		return err
	}
	was := px.surroundings.Load()
	is := was.next(others, caught, now, px.agent.cfg.untrackAfter)
	px.surroundings.Store(is)
	px.logMesh(was, is)
	if was.hindrance() != is.hindrance() || was.plain != is.plain {
		px.tableStale.Store(true)
	}
	return nil
}

// logMesh logs rules of others that came or went, and rules that cannot be read.
func (px *proxy) logMesh(was, is *surroundings) {
	switch why, before := is.hindrance(), was.hindrance(); {
	case why != "" && why != before:
		px.log.Warn("rules of another program in the pod; nothing is on SMC-R there", "why", why)
	case why == "" && before != "":
		px.log.Info("no rules of other programs hinder the pod's connections any more")
	}
	if is.Unknown != "" && is.Unknown != was.Unknown {
		px.log.Warn("rules in the pod cannot be read; a redirector is noticed when it takes a connection of the agent's", "why", is.Unknown)
	}
}
