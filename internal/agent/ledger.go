// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"sync"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// resource is what a budget bounds.
type resource uint8

const (
	memory  resource = iota // bytes registered for RDMA
	conns                   // connections on SMC-R
	relays                  // connections carried as plain TCP
	pending                 // connections of which it is not settled yet
	numResources
)

// amounts are of each resource.
type amounts [numResources]int

func amountsOf(b config.Budget) amounts {
	return amounts{memory: b.MemoryBytes, conns: b.Conns, relays: b.Relays, pending: b.Pending}
}

// The two budgets that may be full.
const (
	podFull  = "the pod's budget is used up"
	nodeFull = "the node's budget is used up, or what is left of it is kept for other pods"
)

// ledger is what the pods of the node use of its budget, in one account each.
//
// Half of the node's budget is kept for the pods, in equal shares: what an
// account does not use of its share nobody else can take. The other half goes to
// whoever comes first. A pod more makes the shares smaller, and takes nothing
// back: an account may then use more than the others' shares leave, and its pod
// gets nothing new until it does no longer.
type ledger struct {
	limit amounts // does not change

	mu       sync.Mutex // guards what is below, and the accounts
	used     amounts
	kept     amounts // what accounts do not use of their shares
	pods     int
	accounts map[*account]struct{}
}

// account is one pod's part of the ledger. The memory of pods that share a
// stack is in an account that they share, with a share for each of them.
type account struct {
	ledger *ledger
	limit  amounts // does not change

	// guarded by ledger.mu
	used, share amounts
	pods        int // whose shares it has
	shared      bool
	closed      bool
	refusals    uint64 // of memory
	full        string // what refused memory last
}

func newLedger(limit config.Budget) *ledger {
	return &ledger{limit: amountsOf(limit), accounts: map[*account]struct{}{}}
}

// open makes the account of one pod.
func (l *ledger) open(limit config.Budget) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := &account{ledger: l, limit: amountsOf(limit), pods: 1}
	l.accounts[a] = struct{}{}
	l.pods++
	l.reshare()
	return a
}

// openShared makes the account of a stack that pods share; join says how many.
func (l *ledger) openShared(memoryBytes int) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := &account{ledger: l, limit: amounts{memory: memoryBytes}, shared: true}
	l.accounts[a] = struct{}{}
	return a
}

// join makes the account that of n more pods, or fewer.
func (a *account) join(n int) {
	a.ledger.mu.Lock()
	defer a.ledger.mu.Unlock()
	a.pods += n
	a.ledger.reshare()
}

// close takes the account off the ledger. What it still has is free: its stack
// is closed, and with it all that was registered.
func (a *account) close() {
	l := a.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if a.closed {
		return
	}
	a.closed = true
	delete(l.accounts, a)
	if !a.shared {
		l.pods--
	}
	for r := range a.used {
		l.used[r] -= a.used[r]
	}
	l.reshare()
}

// reshare computes the shares anew, after pods came or went.
func (l *ledger) reshare() {
	l.kept = amounts{}
	for a := range l.accounts {
		for r := range a.share {
			a.share[r] = min(a.limit[r], a.pods*(l.limit[r]/keptShare/max(1, l.pods)))
			l.kept[r] += a.keeps(r)
		}
	}
}

// keeps is what the account does not use of its share.
func (a *account) keeps(r int) int { return max(0, a.share[r]-a.used[r]) }

// room is how much more the account may have now; the ledger is locked.
func (a *account) room(r resource) int {
	l, own := a.ledger, a.keeps(int(r))
	left := l.limit[r] - l.used[r]
	return max(0, min(a.limit[r]-a.used[r], left, max(own, left-(l.kept[r]-own))))
}

// take takes n of a resource, or says which budget is full.
func (a *account) take(r resource, n int) (full string) {
	l := a.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if n > a.room(r) || a.closed {
		full = nodeFull
		if a.used[r]+n > a.limit[r] {
			full = podFull
		}
		if r == memory {
			a.refusals++
			a.full = full
		}
		return full
	}
	a.add(r, n)
	return ""
}

func (a *account) give(r resource, n int) {
	l := a.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	if !a.closed {
		a.add(r, -n)
	}
}

func (a *account) add(r resource, n int) {
	l := a.ledger
	l.kept[r] -= a.keeps(int(r))
	a.used[r] += n
	l.used[r] += n
	l.kept[r] += a.keeps(int(r))
	invariant.Must(a.used[r] >= 0, "more was given back to a budget than taken")
}

// Take implements smcr.MemoryAccount.
func (a *account) Take(bytes int) bool { return a.take(memory, bytes) == "" }

// Give implements smcr.MemoryAccount.
func (a *account) Give(bytes int) { a.give(memory, bytes) }

// memoryRefusals counts how often there was no memory, and says which budget
// was full the last time.
func (a *account) memoryRefusals() (n uint64, full string) {
	a.ledger.mu.Lock()
	defer a.ledger.mu.Unlock()
	return a.refusals, a.full
}

// crowded says what there is so little left of that the pod's diversion should
// pause: of places for connections that are not settled, or of relays, which
// each of those may become.
func (a *account) crowded() agentapi.Code {
	return a.over(func(used, room int) bool { return room <= 0 || pauseShare*room < used+room })
}

// calm reports whether a pause may end.
func (a *account) calm() bool {
	return a.over(func(used, room int) bool { return room <= 0 || resumeShare*used >= used+room }) == agentapi.CodeOK
}

func (a *account) over(mark func(used, room int) bool) agentapi.Code {
	a.ledger.mu.Lock()
	defer a.ledger.mu.Unlock()
	p := a.used[pending]
	switch {
	case mark(p, a.room(pending)):
		return agentapi.CodeBudgetPending
	case mark(a.used[relays]+p, a.room(relays)-p):
		return agentapi.CodeBudgetRelays
	}
	return agentapi.CodeOK
}

// info describes the node's budget.
func (l *ledger) info() agentapi.Budget {
	l.mu.Lock()
	defer l.mu.Unlock()
	return budgetInfo(l.limit, l.used)
}

// info describes a pod's budget, with its memory in m.
func (a *account) info(m *account) agentapi.Budget {
	a.ledger.mu.Lock()
	defer a.ledger.mu.Unlock()
	limit, used := a.limit, a.used
	limit[memory], used[memory] = m.limit[memory], m.used[memory]
	b := budgetInfo(limit, used)
	b.MemoryKeptBytes = m.share[memory]
	return b
}

func budgetInfo(limit, used amounts) agentapi.Budget {
	return agentapi.Budget{
		MemoryBytes: limit[memory], MemoryUsedBytes: used[memory], Conns: limit[conns], ConnsUsed: used[conns],
		Relays: limit[relays], RelaysUsed: used[relays], Pending: limit[pending], PendingUsed: used[pending],
	}
}

// place is what one connection has of its pod's account: a pending one until it
// is settled, then one on SMC-R or a relay. It belongs to the flow's goroutine.
type place struct {
	of  *account
	has [numResources]bool
}

// enter takes a pending place.
func (a *account) enter() (p *place, full string) {
	p = &place{of: a}
	return p, p.take(pending)
}

func (p *place) take(r resource) (full string) {
	if full = p.of.take(r, 1); full == "" {
		p.has[r] = true
	}
	return full
}

func (p *place) give(r resource) {
	if p.has[r] {
		p.has[r] = false
		p.of.give(r, 1)
	}
}

// settle says what carries the connection: conns, which it has, or relays.
func (p *place) settle(r resource) (full string) {
	if !p.has[r] {
		full = p.take(r)
	}
	for other := conns; other < numResources; other++ {
		if other != r {
			p.give(other)
		}
	}
	return full
}

// leave gives all back.
func (p *place) leave() {
	for r := conns; r < numResources; r++ {
		p.give(r)
	}
}

// fitFiles makes a budget smaller until its connections fit into so many open
// files, in proportion. It says what is less, "" if nothing.
func fitFiles(b config.Budget, files uint64) (_ config.Budget, less string) {
	most := int(min(files, 1<<31))
	most = max(most-reservedFiles, most/2) / filesPerConn
	want := b.Conns + b.Relays + b.Pending
	if want <= most {
		return b, ""
	}
	fit := b
	for _, n := range []*int{&fit.Conns, &fit.Relays, &fit.Pending} {
		*n = max(1, int(int64(*n)*int64(most)/int64(want)))
	}
	return fit, fmt.Sprintf("the agent may open %d files, which is too few for what node.budgets.node allows: it carries at most %d of %d connections on SMC-R, %d of %d relays and %d of %d pending ones: raise the limit (LimitNOFILE of systemd, or of the container runtime), or lower the budget",
		files, fit.Conns, b.Conns, fit.Relays, b.Relays, fit.Pending, b.Pending)
}
