// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// resource is something that a budget bounds.
type resource uint8

const (
	memory  resource = iota // bytes registered for RDMA
	conns                   // connections on SMC-R
	relays                  // connections carried as plain TCP
	pending                 // connections before it is decided whether they are on SMC-R
	buffers                 // bytes that the kernel may use for sockets' buffers
	numResources
)

// The resources after those of the budget: the queue pairs of each of the node's devices.
const (
	queuePairs   = numResources
	allResources = numResources + linkgroup.MaxRNICs
)

// amounts has a number for each resource.
type amounts [allResources]int

func amountsOf(b config.Budget) amounts {
	return amounts{memory: b.MemoryBytes, conns: b.Conns, relays: b.Relays, pending: b.Pending, buffers: b.SocketBytes}
}

// Why there is no more of a resource.
const (
	podFull    = "the pod's budget is used up"
	nodeFull   = "the node's budget is used up, or what is left of it is kept for other pods"
	sourceFull = "the client has three quarters of what the pod has for all, and the rest is kept for others"
)

// ledger says what each pod uses of the node's budget, in one account per pod.
//
// Half of the budget is kept for the pods in equal shares: what a pod does not use of its share, no
// other pod can take. The other half goes to whoever comes first. With a budget of 1000 connections
// and 5 pods, for example, each share is 100, and one pod can have 600 if its own budget allows. The
// share of pending connections is at least leastPending, as far as the budget has so many for each
// pod.
//
// When a pod comes, the shares get smaller, but nothing is taken back: a pod may then have more
// than what the other shares leave, and gets nothing new until it has less.
type ledger struct {
	limit amounts // fixed, but for queue pairs, which mu guards

	mu       sync.Mutex          // guards what is below, and the accounts
	devices  map[string]resource // which resource the queue pairs of a device are
	used     amounts
	kept     amounts // the unused part of all shares
	pods     int
	freed    chan struct{} // closed when a waiter should call reserve again; nil: nobody waits
	accounts map[*account]struct{}
}

// account is one pod's part of the ledger. Pods that share a stack also share an account for its
// memory and queue pairs, which has the shares of all of them.
type account struct {
	ledger        *ledger
	limit         amounts       // fixed
	deviceRefused atomic.Uint64 // how often a device refused what a connection on the account's stack needs

	// guarded by ledger.mu:
	used, share amounts
	// relaysPending is how many relays count as pending connections, because the budget had no more
	// relays for them.
	relaysPending     int
	sources           map[netip.Addr]*sourceUse // clients that have inbound connections, or link groups
	pods              int                       // how many pods' shares it has
	shared            bool
	closed            bool
	memoryRefused     uint64 // how often memory was refused
	queuePairsRefused uint64 // how often a queue pair was refused
	memoryFull        string // the budget that was full when memory was refused last
}

func newLedger(limit config.Budget) *ledger {
	return &ledger{limit: amountsOf(limit), accounts: map[*account]struct{}{}, devices: map[string]resource{}}
}

// open makes the account of one pod. Its limit is no higher than the node's, which may be lower
// than the configuration says: see fitFiles.
func (l *ledger) open(limit config.Budget) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := amountsOf(limit)
	a.unboundQueuePairs()
	return l.add(a)
}

// openMember makes the account of a pod whose memory and queue pairs are in a shared account.
func (l *ledger) openMember(limit config.Budget) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := amountsOf(limit)
	a[memory] = 0
	return l.add(a)
}

// add enters a pod's account. ledger.mu is held.
func (l *ledger) add(limit amounts) *account {
	a := &account{ledger: l, limit: limit, pods: 1, sources: map[netip.Addr]*sourceUse{}}
	for r := range numResources {
		a.limit[r] = min(a.limit[r], l.limit[r])
	}
	l.accounts[a] = struct{}{}
	l.pods++
	l.reshare()
	return a
}

// openShared makes the account of a shared stack, for no pods yet: see join.
func (l *ledger) openShared(memoryBytes int) *account {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := &account{ledger: l, limit: amounts{memory: memoryBytes}, sources: map[netip.Addr]*sourceUse{}, shared: true}
	a.limit.unboundQueuePairs()
	l.accounts[a] = struct{}{}
	return a
}

// join adds n pods to a shared account, or removes them if n is negative.
func (a *account) join(n int) { a.ledger.join(a, n) }

func (l *ledger) join(a *account, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.pods += n
	l.reshare()
}

// close removes the account. All that it used is free again, since its stack is closed.
func (a *account) close() { a.ledger.close(a) }

func (l *ledger) close(a *account) {
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

// reshare computes the shares again, after pods came or went. ledger.mu is held.
func (l *ledger) reshare() {
	l.kept = amounts{}
	for a := range l.accounts {
		for r := range a.share {
			a.share[r] = min(a.limit[r], a.pods*l.shareOf(resource(r)))
			l.kept[r] += a.keeps(r)
		}
	}
	l.wake()
}

// shareOf is each pod's share of a resource.
func (l *ledger) shareOf(r resource) int {
	pods := max(1, l.pods)
	share := l.limit[r] / keptShare / pods
	if r == pending {
		share = max(share, min(leastPending, l.limit[r]/pods))
	}
	return share
}

// wake lets all who wait for a pending connection ask again.
func (l *ledger) wake() {
	if l.freed != nil {
		close(l.freed)
		l.freed = nil
	}
}

// keeps is the unused part of the account's share.
func (a *account) keeps(r int) int { return max(0, a.share[r]-a.used[r]) }

// takeBuffers takes best bytes of socket buffers if there is plenty, or else least. It never
// refuses, since a connection cannot do without, so the account may exceed its budget.
func (a *account) takeBuffers(best, least int) (got int) {
	got = least
	if plentyShare*best <= a.room(buffers) {
		got = best
	}
	if !a.closed {
		a.add(buffers, got)
	}
	return got
}

// room is how much more the account can take now. ledger.mu is held.
func (a *account) room(r resource) int {
	l, own := a.ledger, a.keeps(int(r))
	left := l.limit[r] - l.used[r]
	return max(0, min(a.limit[r]-a.used[r], left, max(own, left-(l.kept[r]-own))))
}

// take takes n of a resource, or says which budget is full.
func (a *account) take(r resource, n int) (full string) { return a.ledger.take(a, r, n) }

func (l *ledger) take(a *account, r resource, n int) (full string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return a.takeLocked(r, n)
}

// takeLocked is take with ledger.mu held.
func (a *account) takeLocked(r resource, n int) (full string) {
	if n <= a.room(r) && !a.closed {
		a.add(r, n)
		return ""
	}
	return a.refuse(r, a.fullFor(r, n))
}

// fullFor is the budget that has not n of a resource. ledger.mu is held.
func (a *account) fullFor(r resource, n int) string {
	if a.used[r]+n > a.limit[r] {
		return podFull
	}
	return nodeFull
}

// refuse counts a refusal because of a budget, which refuse returns. ledger.mu is held.
func (a *account) refuse(r resource, full string) string {
	switch {
	case r == memory:
		a.memoryRefused++
		a.memoryFull = full
	case r >= queuePairs:
		a.queuePairsRefused++
	}
	return full
}

// give gives n of a resource back.
func (a *account) give(r resource, n int) { a.ledger.give(a, r, n) }

func (l *ledger) give(a *account, r resource, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !a.closed {
		a.add(r, -n)
	}
}

// add changes what the account uses by n, which may be negative. ledger.mu is held.
func (a *account) add(r resource, n int) {
	l := a.ledger
	l.kept[r] -= a.keeps(int(r))
	a.used[r] += n
	l.used[r] += n
	l.kept[r] += a.keeps(int(r))
	if r == pending && n < 0 {
		l.wake()
	}
	invariant.Must(a.used[r] >= 0, "more was given back to a budget than taken")
}

// takeFor is take for a link group with a client, which gets no more than other clients leave to it: see sourceMost.
// The zero Addr is no client. A client that has its share is refused with ErrClientShare also where a budget is full: the end of
// others' idle link groups would not help that client, since a pod that uses less has more room, and the share stays as it was.
func (l *ledger) takeFor(a *account, client netip.Addr, r resource, n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a.hasMost(client, r) {
		_ = a.refuse(r, a.shareFull(r, n))
		return smcr.ErrClientShare
	}
	if full := a.takeLocked(r, n); full != "" {
		return errors.New(full)
	}
	a.countOf(client, r, n)
	return nil
}

// giveFor gives back what takeFor took.
func (l *ledger) giveFor(a *account, client netip.Addr, r resource, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !a.closed {
		a.add(r, -n)
		a.countOf(client, r, -n)
	}
}

// Take implements smcr.MemoryAccount.
func (a *account) Take(client netip.Addr, bytes int) error {
	return a.ledger.takeFor(a, client, memory, bytes)
}

// Give implements smcr.MemoryAccount.
func (a *account) Give(client netip.Addr, bytes int) { a.ledger.giveFor(a, client, memory, bytes) }

// Spare implements smcr.MemoryAccount: what is left of a quarter of the budgets of pod and node.
func (a *account) Spare() int {
	l := a.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	return min(a.room(memory), a.limit[memory]/smcr.GrowthShare-a.used[memory], l.limit[memory]/smcr.GrowthShare-l.used[memory])
}

// memoryRefusals is how often memory was refused, and the budget that was full the last time.
func (a *account) memoryRefusals() (n uint64, full string) { return a.ledger.memoryRefusals(a) }

func (l *ledger) memoryRefusals(a *account) (n uint64, full string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return a.memoryRefused, a.memoryFull
}

// nearlyFull is the budget of which the pod has so little left that its diversion should pause, or
// CodeOK: the pending connections, the relays (each pending connection may become one), or, if the
// pod has relays, the socket buffers.
func (a *account) nearlyFull() agentapi.Code {
	return a.over(func(used, room int) bool { return room <= 0 || pauseShare*room < used+room })
}

// halfFree reports whether enough is free again to end a pause.
func (a *account) halfFree() bool {
	return a.over(func(used, room int) bool { return room <= 0 || resumeShare*used >= used+room }) == agentapi.CodeOK
}

// over is the first budget for which mark returns true, given what the pod uses of it and what it
// can still take; CodeOK if there is none.
func (a *account) over(mark func(used, room int) bool) agentapi.Code { return a.ledger.over(a, mark) }

func (l *ledger) over(a *account, mark func(used, room int) bool) agentapi.Code {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := a.used[pending]
	switch {
	case mark(p, a.room(pending)):
		return agentapi.CodeBudgetPending
	case mark(a.used[relays]+p, a.room(relays)-p):
		return agentapi.CodeBudgetRelays
	case a.used[relays]+a.relaysPending > 0 && mark(a.used[buffers], a.room(buffers)):
		return agentapi.CodeBudgetSockets
	}
	return agentapi.CodeOK
}

// info describes the node's budget.
func (l *ledger) info() agentapi.Budget {
	l.mu.Lock()
	defer l.mu.Unlock()
	return budgetInfo(l.limit, l.used)
}

// info describes a pod's budget. m is the account of its memory.
func (a *account) info(m *account) agentapi.Budget { return a.ledger.podInfo(a, m) }

func (l *ledger) podInfo(a, m *account) agentapi.Budget {
	l.mu.Lock()
	defer l.mu.Unlock()
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
		SocketBytes: limit[buffers], SocketUsedBytes: used[buffers],
	}
}

// reservation is what one session has of its pod's account. It begins as a pending connection, and
// becomes a connection on SMC-R or a relay. It belongs to the session's goroutine.
type reservation struct {
	account *account
	source  netip.Addr // the client of an inbound session; invalid for an outbound one
	// guarded by ledger.mu:
	pending, conn, relay bool
	buffers              int // bytes
}

// sourceUse is what one client uses of an account: its inbound sessions, and the link groups with it.
type sourceUse amounts

// reserve takes a pending connection for a session, whose client is source if it is inbound. If rv
// is nil, freed is closed when it is worth asking again; freed is nil, too, if the client has
// sourceMost hundredths of what the pod can have. For a session that will be no relay, the client's
// relays do not count.
func (a *account) reserve(source netip.Addr, mayRelay bool) (rv *reservation, freed <-chan struct{}) {
	return a.ledger.reserve(a, source, mayRelay)
}

func (l *ledger) reserve(a *account, source netip.Addr, mayRelay bool) (rv *reservation, freed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if u := a.sources[source]; u != nil {
		mine := *u
		if !mayRelay {
			mine[relays] = 0
		}
		if mine.has(sourceMost, a.most(pending), a.most(relays)) {
			return nil, nil
		}
	}
	if a.takeLocked(pending, 1) == "" {
		rv = &reservation{account: a, source: source, pending: true}
		rv.count(pending, 1)
		return rv, nil
	}
	if l.freed == nil {
		l.freed = make(chan struct{})
	}
	return nil, l.freed
}

// most is what the account has, and what it could take now.
func (a *account) most(r resource) int { return a.used[r] + a.room(r) }

// hasMost reports whether a client has so much of a resource that it gets no more. What it took last may be more
// than was left to it, so that a client alone gets on with a small budget. ledger.mu is held.
func (a *account) hasMost(source netip.Addr, r resource) bool {
	u := a.sources[source]
	return u != nil && 100*u[r] >= sourceMost*a.most(r)
}

// shareFull is why a client that hasMost of a resource gets no n more of it: others get none either, or it is kept for them.
// ledger.mu is held.
func (a *account) shareFull(r resource, n int) string {
	if n > a.room(r) {
		return a.fullFor(r, n)
	}
	return sourceFull
}

// count adds to what the reservation's client uses.
func (rv *reservation) count(r resource, n int) { rv.account.countOf(rv.source, r, n) }

// countOf adds to what a client uses. ledger.mu is held.
func (a *account) countOf(source netip.Addr, r resource, n int) {
	if !source.IsValid() {
		return
	}
	u := a.sources[source]
	if u == nil {
		u = &sourceUse{}
		a.sources[source] = u
	}
	u[r] += n
	if *u == (sourceUse{}) {
		delete(a.sources, source)
	}
}

// has reports whether the client has at least part hundredths of the pending connections, or of the
// relays, each pending connection counting as one more relay.
func (u *sourceUse) has(part, ofPending, ofRelays int) bool {
	return 100*u[pending] >= part*ofPending || 100*(u[pending]+u[relays]) >= part*ofRelays
}

// greedy returns the clients that have more than sourceShare hundredths of what the pod can have
// now, and of the clients before those that have still more than sourceResume hundredths. They are
// sorted.
func (a *account) greedy(before []netip.Addr) []netip.Addr { return a.ledger.greedy(a, before) }

func (l *ledger) greedy(a *account, before []netip.Addr) []netip.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []netip.Addr
	ofPending, ofRelays := a.most(pending), a.most(relays)
	for source, u := range a.sources {
		if u.has(sourceShare, ofPending, ofRelays) || slices.Contains(before, source) && u.has(sourceResume, ofPending, ofRelays) {
			out = append(out, source)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// takeConn takes one of the connections on SMC-R, or says which budget is full.
func (rv *reservation) takeConn() (full string) { return rv.account.ledger.takeConn(rv) }

func (l *ledger) takeConn(rv *reservation) (full string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := rv.account
	if a.hasMost(rv.source, conns) {
		return a.shareFull(conns, 1)
	}
	if full = a.takeLocked(conns, 1); full == "" {
		rv.conn = true
		rv.count(conns, 1)
	}
	return full
}

// becomeConn turns a pending connection, for which takeConn succeeded, into one on SMC-R, and
// returns how large the buffers of the application's socket may be.
func (rv *reservation) becomeConn() (bufferBytes int) { return rv.account.ledger.becomeConn(rv) }

func (l *ledger) becomeConn(rv *reservation) (bufferBytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	invariant.Must(rv.conn, "a connection is on SMC-R without a place for it")
	rv.buffers = rv.account.takeBuffers(buffersPerSocket*connBufferBest, appSocketBytes)
	rv.dropPending()
	return rv.buffers / buffersPerSocket
}

// becomeRelay turns a pending connection into a relay, and returns how large the buffers of the
// network's socket may be. If the pod has no relays left, the relay still counts as a pending
// connection: it was accepted, and is not reset to satisfy a number. For one that is a relay already it changes nothing.
func (rv *reservation) becomeRelay() (bufferBytes int) { return rv.account.ledger.becomeRelay(rv) }

func (l *ledger) becomeRelay(rv *reservation) (bufferBytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := rv.account
	if rv.relay {
		return (rv.buffers - appSocketBytes) / buffersPerSocket
	}
	invariant.Must(rv.pending, "a relay that was not pending")
	rv.dropConn()
	rv.relay = true
	rv.count(relays, 1)
	rv.buffers = a.takeBuffers(appSocketBytes+buffersPerSocket*netBufferBest, appSocketBytes+buffersPerSocket*netBufferLeast)
	if a.takeLocked(relays, 1) == "" {
		rv.dropPending()
	} else {
		rv.pending = false // from now on the account's, see endRelay
		rv.count(pending, -1)
		a.relaysPending++
	}
	return (rv.buffers - appSocketBytes) / buffersPerSocket
}

// release gives back all that the reservation has.
func (rv *reservation) release() { rv.account.ledger.release(rv) }

func (l *ledger) release(rv *reservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rv.dropPending()
	rv.dropConn()
	if !rv.account.closed {
		rv.account.add(buffers, -rv.buffers)
	}
	rv.buffers = 0
	if rv.relay {
		rv.relay = false
		rv.count(relays, -1)
		rv.account.endRelay()
	}
}

func (rv *reservation) dropPending() {
	if rv.pending {
		rv.count(pending, -1)
	}
	rv.drop(&rv.pending, pending)
}

func (rv *reservation) dropConn() {
	if rv.conn {
		rv.count(conns, -1)
	}
	rv.drop(&rv.conn, conns)
}

// drop gives back one of a resource if *has is true.
func (rv *reservation) drop(has *bool, r resource) {
	if *has && !rv.account.closed {
		rv.account.add(r, -1)
	}
	*has = false
}

// endRelay gives back what one relay has. While relays count as pending connections, it frees a
// pending connection, whichever relay ended: one relay is as good as another, and sessions wait for
// pending connections.
func (a *account) endRelay() {
	switch {
	case a.closed:
	case a.relaysPending > 0:
		a.relaysPending--
		a.add(pending, -1)
	default:
		a.add(relays, -1)
	}
}

// fitFiles lowers the connections, relays and pending connections of a budget, in proportion, until
// they fit into the limit of open files. less says what was lowered; "" if nothing was.
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
	return fit, fmt.Sprintf("the agent may open %d files, which is too few for what its setting budgets.node allows: it carries at most %d of %d connections on SMC-R, %d of %d relays and %d of %d pending ones: raise the limit (LimitNOFILE of systemd, or of the container runtime), or lower the budget",
		files, fit.Conns, b.Conns, fit.Relays, b.Relays, fit.Pending, b.Pending)
}
