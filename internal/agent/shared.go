// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"slices"
	"sync"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// stackKey says which pods share an SMC-R stack: those of a namespace that want
// the same.
type stackKey struct {
	namespace string
	settings  config.Settings
}

// stackPool holds the stacks that pods share, and so their link groups.
type stackPool struct {
	mu  sync.Mutex // guards what is below
	all map[stackKey]*sharedStack
}

// sharedStack is a stack with several users. The last one to close it ends it.
type sharedStack struct {
	stack
	pool    *stackPool
	key     stackKey
	account *account // of the memory
	users   int      // guarded by pool.mu
}

// openStack gives the run a stack of its own, or one that it shares.
func (r *run) openStack() (stack, error) {
	if r.agent.incapable(r.set).code != "" {
		return noStack{}, nil
	}
	if !r.shares() {
		return r.agent.cfg.newStack(r.stackConfig(r.account))
	}
	p := &r.agent.stacks
	key := stackKey{podOf((*r.atts.Load())[0]).Namespace, r.settings}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.all[key]; s != nil {
		s.users++
		s.account.join(1)
		r.memory = s.account
		return s, nil
	}
	shared := r.agent.ledger.openShared(r.stackBudget().MemoryBytes)
	inner, err := r.agent.cfg.newStack(r.stackConfig(shared))
	if err != nil {
		shared.close()
		return nil, err
	}
	shared.join(1)
	r.memory = shared
	if p.all == nil {
		p.all = map[stackKey]*sharedStack{}
	}
	s := &sharedStack{stack: inner, pool: p, key: key, account: shared, users: 1}
	p.all[key] = s
	return s, nil
}

// Close gives the stack up.
func (s *sharedStack) Close() error {
	s.pool.mu.Lock()
	s.users--
	last := s.users == 0
	if last {
		delete(s.pool.all, s.key)
	}
	invariant.Must(s.users >= 0, "a shared stack was closed more often than opened")
	s.pool.mu.Unlock()
	s.account.join(-1)
	if !last {
		return nil
	}
	err := s.stack.Close()
	s.account.close()
	return err
}

// runs are the runs of the agent, those that it handed over included: they have
// link groups until they stop.
type runs struct {
	mu  sync.Mutex // guards what is below
	all map[*run]struct{}
}

func (rs *runs) add(r *run) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.all[r] = struct{}{}
}

func (rs *runs) remove(r *run) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	delete(rs.all, r)
}

func (rs *runs) list() []*run {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return slices.Collect(maps.Keys(rs.all))
}

// shares says whether the pod shares its stack. One with devices of its own does
// not: others have nothing to do with these.
func (r *run) shares() bool { return r.settings.Shared && r.set == nil }

// stackUse is a stack with who uses it.
type stackUse struct {
	pod   string // the name to show
	stack stack
	set   *deviceSet
}

// eachStack calls f for the stack of each run, and once for one that pods share.
func (a *agent) eachStack(f func(stackUse)) {
	seen := map[*sharedStack]bool{}
	for _, r := range a.runs.list() {
		pod := podOf((*r.atts.Load())[0])
		name := pod.String()
		if s, ok := r.stack.(*sharedStack); ok {
			if seen[s] {
				continue
			}
			seen[s] = true
			name = pod.Namespace + "/*"
		}
		f(stackUse{name, r.stack, r.set})
	}
}
