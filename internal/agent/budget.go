// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sync"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// pool is a budget and what is taken from it.
type pool struct {
	limit config.Budget // does not change

	mu   sync.Mutex // guards used
	used config.Budget
}

// take takes one connection with its buffers, or says what there is too little
// of.
func (p *pool) take(bytes int) agentapi.Code {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.used.Conns >= p.limit.Conns:
		return agentapi.CodeBudgetConns
	case p.used.MemoryBytes+bytes > p.limit.MemoryBytes:
		return agentapi.CodeBudgetMemory
	}
	p.used.Conns++
	p.used.MemoryBytes += bytes
	return agentapi.CodeOK
}

func (p *pool) give(bytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used.Conns--
	p.used.MemoryBytes -= bytes
	invariant.Must(p.used.Conns >= 0 && p.used.MemoryBytes >= 0, "more was given back to a budget than taken")
}

func (p *pool) info() agentapi.Budget {
	p.mu.Lock()
	defer p.mu.Unlock()
	return agentapi.Budget{
		MemoryBytes: p.limit.MemoryBytes, MemoryUsedBytes: p.used.MemoryBytes,
		Conns: p.limit.Conns, ConnsUsed: p.used.Conns,
	}
}

// ticket is what one connection took from both pools.
type ticket struct {
	pod, node *pool
	bytes     int
}

// admit takes from the pod's pool and the node's, from both or none.
func admit(pod, node *pool, bytes int) (*ticket, agentapi.Code) {
	if code := pod.take(bytes); code != agentapi.CodeOK {
		return nil, code
	}
	if code := node.take(bytes); code != agentapi.CodeOK {
		pod.give(bytes)
		return nil, code
	}
	return &ticket{pod: pod, node: node, bytes: bytes}, agentapi.CodeOK
}

// release gives back; nil and a second call do nothing.
func (t *ticket) release() {
	if t == nil || t.pod == nil {
		return
	}
	t.pod.give(t.bytes)
	t.node.give(t.bytes)
	t.pod = nil
}
