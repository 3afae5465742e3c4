// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// # Other redirectors
//
// A connection that the agent makes for a pod is made in the pod's namespace, so
// somebody else's redirector there, a service mesh's say, may send it to its own
// program, whose connection is then diverted to the agent, and so on. A connection
// passes the agent once because
//
//   - the rules of others are looked for before the pod is set up, and then
//     every othersEvery. While there are any that redirect, nothing is diverted
//     in the pod but what a policy does not want without SMC-R, which is reset
//     before anything is dialed (MESH);
//   - rules that come in between are caught in the kernel by the first connection
//     of the agent's that they redirect, before it gets anywhere;
//   - the destination of a connection that is to stay TCP is in the negative cache
//     before it is dialed.

// surroundings is what others do in a pod's namespace. It does not change.
type surroundings struct {
	linux.Others
	caught bool // one of the agent's connections was redirected
	// quiet is since when nobody had rules there; zero: somebody has.
	quiet time.Time
	// plain: what is not diverted is kept from connection tracking.
	plain bool
}

// redirector says who else redirects connections, "" being nobody.
func (s *surroundings) redirector() string {
	switch {
	case s.Redirector != "":
		return s.Redirector
	case s.caught:
		return "a connection of the agent's was redirected"
	}
	return ""
}

// next is what follows the surroundings s, nil being none, when others and caught
// were found. Rules of others appear when a pod starts, mostly, and packets that
// are kept from connection tracking are kept from those rules: so nothing is
// before nobody had any for a while, but where an agent did so before.
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

// meshed is why nothing can be on SMC-R in the pod because of another redirector;
// its code is empty if there is none. A nil run has none.
func (r *run) meshed() unable {
	if r == nil {
		return unable{}
	}
	who := r.around.Load().redirector()
	if who == "" {
		return unable{}
	}
	return unable{fmt.Sprintf("another program redirects connections in the pod: %s", who), agentapi.CodeMesh}
}

// lackOf is why nothing can be on SMC-R in a pod.
func (a *agent) lackOf(p *pod) unable {
	if lack := a.incapable(p.set); lack.code != "" {
		return lack
	}
	return p.run.meshed()
}

// explore looks for other redirectors before there is a redirection.
func (r *run) explore() error {
	others, err := r.net.others()
	if err != nil {
		return err
	}
	var none *surroundings
	r.around.Store(none.next(others, false, time.Now(), r.agent.cfg.untrackAfter))
	r.tellMesh("")
	return nil
}

// lookAround looks again. When there is something new, the manager brings the
// redirection in line with it.
func (r *run) lookAround(now time.Time) error {
	others, err := r.net.others()
	caught, cerr := r.redirect.Caught()
	if err := errors.Join(err, cerr); err != nil {
		return err
	}
	was := r.around.Load()
	is := was.next(others, caught, now, r.agent.cfg.untrackAfter)
	r.around.Store(is)
	if was.redirector() != is.redirector() || was.plain != is.plain {
		r.moved.Store(true)
		r.tellMesh(was.redirector())
	}
	return nil
}

// tellMesh logs that a redirector came or went.
func (r *run) tellMesh(before string) {
	switch who := r.around.Load().redirector(); {
	case who != "" && who != before:
		r.log.Warn("another program redirects connections in the pod; nothing is on SMC-R there", "redirector", who)
	case who == "" && before != "":
		r.log.Info("no other program redirects connections in the pod any more")
	}
}
