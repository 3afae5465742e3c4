// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

func budget(each int) config.Budget {
	return config.Budget{MemoryBytes: each, Conns: each, Relays: each, Pending: each, SocketBytes: each}
}

func TestAccount_takesFromBoth(t *testing.T) {
	l := newLedger(budget(25))
	pod := l.open(budget(20))
	for _, step := range []struct {
		name string
		take int
		want string
		used int
	}{
		{"some", 10, "", 10},
		{"all that the pod may have", 10, "", 20},
		{"one too many", 1, podFull, 20},
		{"given back", -20, "", 0},
		{"more than the pod may have at once", 21, podFull, 0},
	} {
		t.Run(step.name, func(t *testing.T) {
			for r := range numResources {
				full := ""
				if step.take < 0 {
					pod.give(r, -step.take)
				} else {
					full = pod.take(r, step.take)
				}
				if full != step.want || pod.used[r] != step.used || l.used[r] != step.used {
					t.Errorf("resource %d: %q, pod uses %d, node %d; want %q and %d", r, full, pod.used[r], l.used[r], step.want, step.used)
				}
			}
		})
	}
	if n, full := pod.memoryRefusals(); n != 2 || full != podFull {
		t.Errorf("%d refusals of memory, %q", n, full)
	}
	must(t, pod.Take(netip.Addr{}, 7))
	pod.close()
	pod.Give(netip.Addr{}, 7) // by a stack that is late
	pod.close()
	if l.used != (amounts{}) || l.kept != (amounts{}) || len(l.accounts) != 0 || l.pods != 0 {
		t.Errorf("ledger after the end: %+v", l)
	}
	if pod.Take(netip.Addr{}, 1) == nil {
		t.Error("a closed account takes")
	}
}

// TestAttack_greedyPod: of three pods one takes whatever it gets. The others have
// their shares all the same, also one that comes when everything is taken.
func TestAttack_greedyPod(t *testing.T) {
	const node = 1200
	all := func(a *account) (n int) {
		for a.take(memory, 1) == "" {
			n++
		}
		return n
	}
	l := newLedger(budget(node))
	greedy, modest := l.open(budget(node)), l.open(budget(node))
	if got := all(greedy); got != node-300 { // but the other's share of half the node
		t.Errorf("the greedy one took %d", got)
	}
	if full := greedy.take(memory, 1); full != nodeFull {
		t.Errorf("refused because %q", full)
	}
	late := l.open(budget(node)) // now shares are 200
	if full := late.take(memory, 1); full != "" {
		t.Errorf("who came late: %s", full)
	}
	late.give(memory, 1)
	if got := all(greedy); got != 0 {
		t.Errorf("the greedy one took %d more", got)
	}
	if got := all(modest); got != 200 {
		t.Errorf("the modest one has %d, want its share", got)
	}
	if got := all(late); got != 100 { // the rest: nothing is taken back
		t.Errorf("the late one has %d", got)
	}
	greedy.give(memory, 100)
	if got := all(greedy); got != 0 {
		t.Errorf("the greedy one got %d again of what the late one's share lacks", got)
	}
	if got := all(late); got != 100 {
		t.Errorf("the late one got %d, want the rest of its share", got)
	}
	late.close()
	if got := all(greedy); got != 100 { // the late one's 200 without what the modest one's share is larger by
		t.Errorf("the greedy one got %d of what is free", got)
	}
}

// TestLedger_random: in any order of pods that come, go, take and give, nobody
// has more than its budget, all together no more than the node's, a pod always
// gets its share as far as it is not overdrawn, and the sums are right.
func TestLedger_random(t *testing.T) {
	seed := testenv.Seed(t)
	rnd := rand.New(rand.NewPCG(seed, 1))
	l := newLedger(budget(1000))
	var open []*account
	for step := range 20_000 {
		switch n := rnd.IntN(100); {
		case n < 2 && len(open) < 20:
			open = append(open, l.open(budget(rnd.IntN(600))))
		case n < 3:
			shared := l.openShared(rnd.IntN(900))
			shared.join(1 + rnd.IntN(3))
			open = append(open, shared)
		case n < 5 && len(open) > 0:
			i := rnd.IntN(len(open))
			open[i].close()
			open = append(open[:i], open[i+1:]...)
		case len(open) > 0:
			a, r := open[rnd.IntN(len(open))], resource(rnd.IntN(int(numResources)))
			n := rnd.IntN(200)
			if rnd.IntN(2) == 0 {
				a.give(r, min(n, a.used[r]))
				break
			}
			within, overdrawn := n <= a.share[r]-a.used[r], l.kept[r] > l.limit[r]-l.used[r]
			if full := a.take(r, n); full != "" && within && !overdrawn {
				t.Fatalf("seed %d, step %d: %d within the share refused: %s", seed, step, n, full)
			}
		}
		var used, kept amounts
		for _, a := range open {
			for r := range used {
				used[r] += a.used[r]
				kept[r] += a.keeps(r)
				if a.used[r] > a.limit[r] {
					t.Fatalf("seed %d, step %d: an account has %d of %d", seed, step, a.used[r], a.limit[r])
				}
			}
		}
		for r := range used {
			if used[r] != l.used[r] || kept[r] != l.kept[r] || used[r] > l.limit[r] {
				t.Fatalf("seed %d, step %d: sums %v %v, ledger %v %v of %v", seed, step, used, kept, l.used, l.kept, l.limit)
			}
		}
	}
}

func TestReservation(t *testing.T) {
	l := newLedger(config.Budget{MemoryBytes: 1, Conns: 1, Relays: 1, Pending: 3})
	pod := l.open(config.Budget{MemoryBytes: 1, Conns: 1, Relays: 1, Pending: 3})
	enter := func() *reservation {
		t.Helper()
		rv, _ := pod.reserve(netip.Addr{}, true)
		if rv == nil {
			t.Fatal("no pending place")
		}
		return rv
	}
	want := func(conns, relays, pending int) {
		t.Helper()
		if got := pod.used; got[memory] != 0 || !slices.Equal(got[1:buffers], []int{conns, relays, pending}) {
			t.Errorf("used %v, want %d on SMC-R, %d relays, %d pending", got, conns, relays, pending)
		}
	}
	carried, plain, plain2 := enter(), enter(), enter()
	none, freed := pod.reserve(netip.Addr{}, true)
	if none != nil {
		t.Error("a fourth has a place")
	}
	if full := carried.takeConn(); full != "" {
		t.Error(full)
	}
	if full := plain.takeConn(); full != podFull {
		t.Errorf("a second on SMC-R: %q", full)
	}
	want(1, 0, 3)
	select {
	case <-freed:
		t.Error("said to be free while all are used")
	default:
	}
	carried.becomeConn()
	<-freed
	plain.becomeRelay()
	want(1, 1, 1)
	plain2.becomeRelay() // there is no second relay: it keeps its pending reservation
	want(1, 1, 1)
	plain.release() // the second one has the relay's place now
	want(1, 1, 0)
	plain2.release()
	want(1, 0, 0)
	failed := enter()
	carried.release()
	if full := failed.takeConn(); full != "" {
		t.Error(full)
	}
	failed.becomeRelay() // the rendezvous failed
	want(0, 1, 0)
	late := enter()
	late.becomeRelay()
	want(0, 1, 1)
	pod.close()
	for _, rv := range []*reservation{carried, plain, plain2, failed, late} {
		rv.release()
		rv.release()
	}
	if l.used != (amounts{}) {
		t.Errorf("ledger after the end: %v", l.used)
	}
}

// TestLedger_keepsPending: two pods take every pending reservation that they get; each of
// a hundred others still has leastPending of its own, and more than those where the
// node has more.
func TestLedger_keepsPending(t *testing.T) {
	for _, tt := range []struct {
		name       string
		node, each int
		pods, want int
	}{
		{"the default, a hundred pods", 16384, 1024, 100, 64 + 16},
		{"fewer than leastPending for each", 4096, 1024, 100, 4096 / 102},
		{"the pod's own limit", 16384, 10, 100, 10},
		{"few pods", 4096, 1024, 2, 4096 / 2 / 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			all := func(a *account) (n int) {
				for {
					if rv, _ := a.reserve(netip.Addr{}, true); rv == nil {
						return n
					}
					n++
				}
			}
			l := newLedger(config.Budget{Pending: tt.node})
			greedy := []*account{l.open(config.Budget{Pending: tt.node}), l.open(config.Budget{Pending: tt.node})}
			var others []*account
			for range tt.pods {
				others = append(others, l.open(config.Budget{Pending: tt.each}))
			}
			for _, a := range greedy {
				all(a)
			}
			for i, a := range others {
				if got := all(a); got != tt.want {
					t.Fatalf("pod %d got %d pending places, want %d", i, got, tt.want)
				}
			}
		})
	}
}

// TestAccount_greedy: a client that has a quarter of what a pod can have is greedy
// until it has an eighth, and gets no more than three quarters. What the pod's own
// connections use is nobody's share.
func TestAccount_greedy(t *testing.T) {
	one, two := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	b := config.Budget{Conns: 1000, Relays: 64, Pending: 64}
	l := newLedger(config.Budget{Conns: 1000, Relays: 1000, Pending: 1000})
	pod := l.open(b)
	places := map[netip.Addr][]*reservation{}
	enter := func(source netip.Addr, n int) {
		t.Helper()
		for range n {
			rv, _ := pod.reserve(source, true)
			if rv == nil {
				t.Fatalf("no place for %v: %+v", source, pod.used)
			}
			places[source] = append(places[source], rv)
		}
	}
	leave := func(source netip.Addr, n int) {
		for range n {
			places[source][0].release()
			places[source] = places[source][1:]
		}
	}
	var now []netip.Addr
	want := func(want ...netip.Addr) {
		t.Helper()
		if now = pod.greedy(now); !slices.Equal(now, want) {
			t.Errorf("greedy: %v, want %v; %+v", now, want, pod.used)
		}
	}
	enter(netip.Addr{}, 20)
	want()
	enter(one, 15)
	want()
	enter(one, 1)
	want(one)
	enter(two, 5)
	want(one)
	leave(one, 7)
	want(one) // it has an eighth still
	leave(one, 2)
	want()
	for _, rv := range places[one] {
		rv.becomeRelay()
	}
	enter(one, 8) // with the 7 relays, 15
	want()
	for _, rv := range places[one][7:] {
		must(t, fullError(rv.takeConn()))
		rv.becomeConn()
	}
	enter(one, 16-7) // those on SMC-R do not count
	want(one)
	leave(netip.Addr{}, 15)
	enter(one, 48-16)
	if rv, freed := pod.reserve(one, true); rv != nil || freed != nil {
		t.Error("a client has more than three quarters of the relays")
	}
	rv, _ := pod.reserve(one, false)
	if rv == nil {
		t.Fatal("a connection that becomes no relay is refused because of relays")
	}
	rv.release()
	enter(two, 1)
	enter(netip.Addr{}, 1)
	for _, source := range []netip.Addr{one, two, {}} {
		leave(source, len(places[source]))
	}
	want()
	if len(pod.sources) != 0 || pod.used != (amounts{}) {
		t.Errorf("left: %v, %v", pod.sources, pod.used)
	}
}

// TestAccount_connsOfOne: one client has no more than three quarters of a pod's
// connections on SMC-R, and others get the rest.
func TestAccount_connsOfOne(t *testing.T) {
	l := newLedger(config.Budget{Conns: 100, Relays: 100, Pending: 100})
	pod := l.open(config.Budget{Conns: 8, Relays: 100, Pending: 100})
	conn := func(source string) (*reservation, string) {
		t.Helper()
		rv, _ := pod.reserve(netip.MustParseAddr(source), true)
		full := rv.takeConn()
		if full == "" {
			rv.becomeConn()
		} else {
			rv.becomeRelay()
		}
		return rv, full
	}
	var all []*reservation
	for i, want := range []string{"", "", "", "", "", "", sourceFull, sourceFull} {
		rv, full := conn("10.0.0.1")
		if all = append(all, rv); full != want {
			t.Errorf("connection %d: %q, want %q", i, full, want)
		}
	}
	for i, want := range []string{"", "", podFull} {
		rv, full := conn("10.0.0.2")
		if all = append(all, rv); full != want {
			t.Errorf("connection %d of another client: %q, want %q", i, full, want)
		}
	}
	all[0].release()
	rv, full := conn("10.0.0.1")
	if all = append(all, rv); full != "" {
		t.Errorf("after one has ended: %q", full)
	}
	for _, rv := range all {
		rv.release()
	}
	if len(pod.sources) != 0 || pod.used != (amounts{}) {
		t.Errorf("left: %v, %v", pod.sources, pod.used)
	}
}

// TestAccount_shareOfFullNode: where other pods have filled the node, a pod's client is refused for that, and not because something
// is kept for other clients, though it has all that the pod uses. Where the pod's budget is full, that is why. In each case the
// client has its share: it gets nothing of what ends of others.
func TestAccount_shareOfFullNode(t *testing.T) {
	client := netip.MustParseAddr("10.0.0.1")
	for _, tt := range []struct {
		name      string
		node, pod int // budgets
		has, own  int // what the client has, and the pod's own connections
		want      string
	}{
		{"the other pod has filled the node", 80, 80, 30, 0, nodeFull},
		{"and the pod has something of its own", 80, 80, 30, 10, nodeFull},
		{"the pod's budget is full", 200, 16, 12, 4, podFull},
		{"there is room", 200, 16, 12, 0, sourceFull},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := config.Budget{MemoryBytes: tt.node, Conns: tt.node, Relays: 100, Pending: 100}
			l := newLedger(b)
			other := l.open(b)
			b.MemoryBytes, b.Conns = tt.pod, tt.pod
			pod := l.open(b)
			must(t, pod.Take(netip.Addr{}, tt.own))
			must(t, fullError(pod.take(conns, tt.own)))
			conn := func() string {
				rv, _ := pod.reserve(client, true)
				full := rv.takeConn()
				if full == "" {
					rv.becomeConn()
				}
				return full
			}
			for range tt.has {
				must(t, pod.Take(client, 1))
				must(t, fullError(conn()))
			}
			for other.Take(netip.Addr{}, 1) == nil {
				must(t, fullError(other.take(conns, 1)))
			}
			if err := pod.Take(client, 1); !errors.Is(err, smcr.ErrClientShare) {
				t.Errorf("more memory: %v", err)
			}
			if _, full := pod.memoryRefusals(); full != tt.want {
				t.Errorf("memory: %q, want %q", full, tt.want)
			}
			if full := conn(); full != tt.want {
				t.Errorf("connections: %q, want %q", full, tt.want)
			}
			if tt.own > 0 {
				pod.Give(netip.Addr{}, 1)
				if err := pod.Take(client, 1); !errors.Is(err, smcr.ErrClientShare) {
					t.Errorf("after something of the pod's own ended: %v", err)
				}
			}
		})
	}
}

// TestAccount_crowdedNode: what other pods hold bounds what one client gets of a pod, too.
func TestAccount_crowdedNode(t *testing.T) {
	const node, pods = 800, 8
	b := config.Budget{Conns: 10, Relays: 1000, Pending: node}
	l := newLedger(config.Budget{Conns: 10, Relays: 1000, Pending: node})
	var all []*account
	for range pods {
		all = append(all, l.open(b))
	}
	for _, a := range all[1:] {
		for {
			if rv, _ := a.reserve(netip.Addr{}, true); rv == nil {
				break
			}
		}
	}
	greedy, other := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	got := 0
	for ; got < node; got++ {
		if rv, _ := all[0].reserve(greedy, true); rv == nil {
			break
		}
	}
	if rv, _ := all[0].reserve(other, true); rv == nil {
		t.Errorf("one client has all %d places that the pod can have", got)
	}
}

func fullError(full string) error {
	if full != "" {
		return errors.New(full)
	}
	return nil
}

// TestReservation_buffers: sockets have the best buffers as long as there is plenty left,
// and then the least, if need be more than the budget. Relays make the pod's
// diversion pause then; connections on SMC-R alone do not.
func TestReservation_buffers(t *testing.T) {
	const (
		most  = 64 << 20
		best  = appSocketBytes + buffersPerSocket*netBufferBest
		least = appSocketBytes + buffersPerSocket*netBufferLeast
	)
	b := config.Budget{Conns: 1000, Relays: 1000, Pending: 1000, SocketBytes: most}
	l := newLedger(b)
	pod := l.open(b)
	enter := func() *reservation {
		rv, _ := pod.reserve(netip.Addr{}, true)
		return rv
	}
	var places []*reservation
	used, code := 0, agentapi.CodeOK
	for i := 0; code == agentapi.CodeOK; i++ {
		rv := enter()
		places = append(places, rv)
		want := netBufferLeast
		if most-used >= plentyShare*best {
			want = netBufferBest
		}
		if got := rv.becomeRelay(); got != want {
			t.Fatalf("relay %d: buffers of %d bytes, want %d; %d are used", i, got, want, used)
		}
		used += appSocketBytes + buffersPerSocket*want
		if code = pod.nearlyFull(); pod.used[buffers] != used || code == agentapi.CodeOK && most-used < most/pauseShare {
			t.Fatalf("relay %d: %d bytes used, want %d; pauses because of %q", i, pod.used[buffers], used, code)
		}
	}
	if code != agentapi.CodeBudgetSockets || most-used > most/pauseShare {
		t.Errorf("pauses at %d of %d bytes because of %q", used, most, code)
	}
	for range 64 { // what was on its way
		rv := enter()
		rv.becomeRelay()
		places = append(places, rv)
		used += least
	}
	if i := pod.info(pod); used < most || i.SocketUsedBytes != used || i.SocketBytes != most || l.info().SocketUsedBytes != used {
		t.Errorf("%+v, want %d bytes", i, used)
	}
	for _, rv := range places {
		rv.release()
	}
	conns := map[int]int{} // by the size of their buffers
	for range most/appSocketBytes + 1 {
		rv, want := enter(), appBufferBytes
		if most-pod.used[buffers] >= plentyShare*buffersPerSocket*connBufferBest {
			want = connBufferBest
		}
		must(t, fullError(rv.takeConn()))
		used := pod.used[buffers]
		if got := rv.becomeConn(); got != want || pod.used[buffers] != used+buffersPerSocket*want {
			t.Fatalf("buffers of %d bytes, want %d; %d are used, %d were", got, want, pod.used[buffers], used)
		}
		conns[want]++
	}
	if conns[connBufferBest] == 0 || conns[appBufferBytes] == 0 {
		t.Errorf("connections by the size of their buffers: %v, want some of both", conns)
	}
	if code := pod.nearlyFull(); code != agentapi.CodeOK {
		t.Errorf("connections on SMC-R make the diversion pause: %s", code)
	}
	if used := pod.used[buffers]; used <= most {
		t.Errorf("%d bytes used", used)
	}
	pod.close()
	if l.used != (amounts{}) {
		t.Errorf("left: %v", l.used)
	}
}

// TestAccount_waits: who waits for a pending reservation is told of each that may be free:
// its own pod's, another one's, and what a pod's end leaves.
func TestAccount_waits(t *testing.T) {
	for _, tt := range []struct {
		name string
		free func(own, other *account, rv, others *reservation)
	}{
		{"its own", func(_, _ *account, rv, _ *reservation) { rv.release() }},
		{"another pod's", func(_, _ *account, _, others *reservation) { others.release() }},
		{"another pod ends", func(_, other *account, _, _ *reservation) { other.close() }},
		{"it becomes a relay", func(_, _ *account, rv, _ *reservation) { rv.becomeRelay() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLedger(config.Budget{Relays: 2, Pending: 2})
			own, other := l.open(config.Budget{Relays: 2, Pending: 2}), l.open(config.Budget{Relays: 2, Pending: 2})
			rv, _ := own.reserve(netip.Addr{}, true)
			others, _ := other.reserve(netip.Addr{}, true)
			none, freed := own.reserve(netip.Addr{}, true)
			if none != nil || freed == nil {
				t.Fatal("a third place of two")
			}
			tt.free(own, other, rv, others)
			select {
			case <-freed:
			default:
				t.Error("who waits is not told")
			}
		})
	}
}

// TestAccount_pauses goes through the marks of a pause.
func TestAccount_pauses(t *testing.T) {
	for _, tt := range []struct {
		name            string
		relays, pending int // used by the pod
		others          int // relays
		crowded         agentapi.Code
		calm            bool
	}{
		{"idle", 0, 0, 0, "", true},
		{"below half", 31, 0, 0, "", true},
		{"half of the relays", 32, 0, 0, "", false},
		{"seven eighths of the relays", 56, 0, 0, "", false},
		{"more", 57, 0, 0, agentapi.CodeBudgetRelays, false},
		{"pending ones count as relays", 40, 17, 0, agentapi.CodeBudgetRelays, false},
		{"pending", 0, 29, 0, agentapi.CodeBudgetPending, false},
		{"others have all but the share", 0, 0, 160, "", true},
		{"and the share is used", 30, 0, 160, agentapi.CodeBudgetRelays, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLedger(config.Budget{Relays: 192, Pending: 1000, SocketBytes: 1})
			pod := l.open(config.Budget{Relays: 64, Pending: 32, SocketBytes: 1})
			others := []*account{l.open(config.Budget{Relays: 160}), l.open(config.Budget{Relays: 160})}
			for range tt.others {
				if others[0].take(relays, 1) != "" && others[1].take(relays, 1) != "" {
					break
				}
			}
			for range tt.relays {
				pod.take(relays, 1)
			}
			for range tt.pending {
				pod.take(pending, 1)
			}
			if got := pod.nearlyFull(); got != tt.crowded {
				t.Errorf("crowded %q, want %q: %v of %v", got, tt.crowded, pod.used, pod.limit)
			}
			if got := pod.halfFree(); got != tt.calm {
				t.Errorf("calm %t", got)
			}
		})
	}
}

func TestFitFiles(t *testing.T) {
	b := config.Budget{MemoryBytes: 5, Conns: 8000, Relays: 1000, Pending: 1000}
	for _, tt := range []struct {
		files uint64
		want  config.Budget
	}{
		{1 << 63, b},
		{reservedFiles + 20_000, b},
		{reservedFiles + 10_000, config.Budget{MemoryBytes: 5, Conns: 4000, Relays: 500, Pending: 500}},
		{1024, config.Budget{MemoryBytes: 5, Conns: 204, Relays: 25, Pending: 25}},
		{2, config.Budget{MemoryBytes: 5, Conns: 1, Relays: 1, Pending: 1}},
	} {
		t.Run(fmt.Sprint(tt.files), func(t *testing.T) {
			got, less := fitFiles(b, tt.files)
			if got != tt.want || (less != "") != (got != b) {
				t.Errorf("fits %+v, %q", got, less)
			}
			if less != "" && !strings.Contains(less, fmt.Sprintf("at most %d of 8000", got.Conns)) {
				t.Error(less)
			}
		})
	}
}

// Rings may be larger than configured while less than a quarter of the memory of the pod and of the node is in use.
func TestAccount_Spare(t *testing.T) {
	l := newLedger(config.Budget{MemoryBytes: 400})
	pods := []*account{l.open(config.Budget{MemoryBytes: 200}), l.open(config.Budget{MemoryBytes: 400})}
	for i, step := range []struct {
		pod, take  int
		want, also int // what the two pods have
	}{
		{0, 0, 50, 100},
		{0, 20, 30, 80},
		{1, 60, 20, 20},
		{0, 20, 0, 0},
		{1, -60, 10, 60},
	} {
		if step.take > 0 && pods[step.pod].Take(netip.Addr{}, step.take) != nil {
			t.Fatalf("step %d: refused", i)
		} else if step.take < 0 {
			pods[step.pod].Give(netip.Addr{}, -step.take)
		}
		if got, also := pods[0].Spare(), pods[1].Spare(); got != step.want || also != step.also {
			t.Errorf("step %d: %d and %d to spare, want %d and %d", i, got, also, step.want, step.also)
		}
	}
}
