// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// stackKey tells which pods share a stack: those of one namespace with the same settings.
type stackKey struct {
	namespace string
	settings  config.Settings
}

// stackPool has the stacks that pods share, and with them their link groups.
type stackPool struct {
	mu  sync.Mutex // guards what is below
	all map[stackKey]*sharedStack
}

// sharedStack is a stack that several proxies use. Close by the last of them closes it.
type sharedStack struct {
	stack
	pool    *stackPool
	key     stackKey
	account *account // of the stack's memory and queue pairs
	users   int      // guarded by pool.mu
}

// openStack returns a stack for the proxy: its own, or one that it shares.
func (px *proxy) openStack() (stack, error) {
	if px.agent.unableWith(px.set).code != "" {
		return noStack{}, nil
	}
	if !px.sharesStack() {
		return px.agent.newStack(px.stackConfig(px.account), px.log)
	}
	p := &px.agent.stacks
	key := stackKey{podOf((*px.atts.Load())[0]).Namespace, px.settings}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.all[key]; s != nil {
		s.users++
		s.account.join(1)
		px.memory = s.account
		return s, nil
	}
	shared := px.agent.ledger.openShared(px.stackBudget().MemoryBytes)
	inner, err := px.agent.newStack(px.stackConfig(shared), px.log)
	if err != nil {
		shared.close()
		return nil, err
	}
	shared.join(1)
	px.memory = shared
	if p.all == nil {
		p.all = map[stackKey]*sharedStack{}
	}
	s := &sharedStack{stack: inner, pool: p, key: key, account: shared, users: 1}
	p.all[key] = s
	return s, nil
}

// partialStack is a stack that was made without one of its proxy's devices.
type partialStack struct{ stack }

// lacksDevice reports whether a stack was made without one of its devices.
func lacksDevice(s stack) bool {
	if shared, ok := s.(*sharedStack); ok {
		s = shared.stack
	}
	_, ok := s.(partialStack)
	return ok
}

// newStack makes a stack. If that fails because of one of its devices, as one that has no resources
// left, the stack is made without that one.
func (a *agent) newStack(cfg smcr.Config, log *slog.Logger) (stack, error) {
	s, err := a.cfg.newStack(cfg)
	if err == nil || len(cfg.Devices) < 2 {
		return s, err
	}
	all := cfg.Devices
	for i, d := range all {
		cfg.Devices = slices.Concat(all[:i], all[i+1:])
		if s, again := a.cfg.newStack(cfg); again == nil {
			log.Warn("RDMA device left out of the pod's stack; it is tried again", "device", d.Name(), "err", err)
			return partialStack{s}, nil
		}
	}
	return nil, err
}

// Close ends the use by one proxy.
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

// resign ends the use by one proxy, which does not call Close then, if others use the stack, and reports whether they do. Of
// proxies that stop together exactly one is the last, and knows so before it closes the stack:
//
//	pod A                      pod B
//	resign: B uses the stack
//	                           resign: the last one
//	stops                      waits, and stops: Close
func (s *sharedStack) resign() bool {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	if s.users == 1 {
		return false
	}
	s.users--
	s.account.join(-1)
	return true
}

// proxies are all proxies of the agent, those that it handed over included, since they have link
// groups until they stop.
type proxies struct {
	mu  sync.Mutex // guards what is below
	all map[*proxy]struct{}
}

func (ps *proxies) add(px *proxy) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.all[px] = struct{}{}
}

func (ps *proxies) remove(px *proxy) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	delete(ps.all, px)
}

func (ps *proxies) list() []*proxy {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return slices.Collect(maps.Keys(ps.all))
}

// sharesStack reports whether the pod shares its stack. A pod with devices of its own does not,
// since its stack runs on these.
func (px *proxy) sharesStack() bool { return px.settings.Shared && !px.set.Own() }

// stackUse is a stack and the pods that use it.
type stackUse struct {
	pod   string // POD or, if pods share the stack, NAMESPACE/*
	stack stack
	set   *rnics.Set
}

// eachStack calls f once for each stack.
func (a *agent) eachStack(f func(stackUse)) {
	seen := map[*sharedStack]bool{}
	for _, px := range a.proxies.list() {
		pod := podOf((*px.atts.Load())[0])
		name := pod.String()
		if s, ok := px.stack.(*sharedStack); ok {
			if seen[s] {
				continue
			}
			seen[s] = true
			name = pod.Namespace + "/*"
		}
		f(stackUse{name, px.stack, px.set})
	}
}
