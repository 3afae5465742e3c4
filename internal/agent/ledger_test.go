// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
)

func budget(each int) config.Budget {
	return config.Budget{MemoryBytes: each, Conns: each, Relays: each, Pending: each}
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
	pod.Take(7)
	pod.close()
	pod.Give(7) // by a stack that is late
	pod.close()
	if l.used != (amounts{}) || l.kept != (amounts{}) || len(l.accounts) != 0 || l.pods != 0 {
		t.Errorf("ledger after the end: %+v", l)
	}
	if pod.Take(1) {
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
	seed := rand.Uint64()
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

func TestPlace(t *testing.T) {
	l := newLedger(config.Budget{MemoryBytes: 1, Conns: 1, Relays: 1, Pending: 3})
	pod := l.open(config.Budget{MemoryBytes: 1, Conns: 1, Relays: 1, Pending: 3})
	enter := func() *place {
		t.Helper()
		p, full := pod.enter()
		if full != "" {
			t.Fatal(full)
		}
		return p
	}
	want := func(conns, relays, pending int) {
		t.Helper()
		if got := pod.used; got != (amounts{0, conns, relays, pending}) {
			t.Errorf("used %v, want %d on SMC-R, %d relays, %d pending", got, conns, relays, pending)
		}
	}
	carried, plain, none := enter(), enter(), enter()
	if _, full := pod.enter(); full != podFull {
		t.Errorf("a fourth: %q", full)
	}
	if full := carried.take(conns); full != "" {
		t.Error(full)
	}
	if full := plain.take(conns); full != podFull {
		t.Errorf("a second on SMC-R: %q", full)
	}
	want(1, 0, 3)
	carried.settle(conns)
	plain.settle(relays)
	want(1, 1, 1)
	if full := none.settle(relays); full == "" {
		t.Error("a second relay")
	}
	want(1, 1, 0)
	carried.settle(relays) // the rendezvous failed: there is no relay, and the place is free
	want(0, 1, 0)
	for _, p := range []*place{carried, plain, none} {
		p.leave()
		p.leave()
	}
	want(0, 0, 0)
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
			l := newLedger(config.Budget{Relays: 192, Pending: 1000})
			pod := l.open(config.Budget{Relays: 64, Pending: 32})
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
			if got := pod.crowded(); got != tt.crowded {
				t.Errorf("crowded %q, want %q: %v of %v", got, tt.crowded, pod.used, pod.limit)
			}
			if got := pod.calm(); got != tt.calm {
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

// TestRun_pauses: more connections than a pod may have as relays are reset, and
// its diversion pauses, which all answers say; it goes on when they are over.
func TestRun_pauses(t *testing.T) {
	for _, tt := range []struct {
		name, policies string
		wantOutbound   int // selections while it pauses
	}{
		{"prefer", preferAll, 0},
		{"another policy requires", "policies:\n- {name: all, ports: [1-65534]}\n- {name: must, mode: Required, ports: [65535]}\n", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, "  budgets: {pod: {connections: 0, relays: 32, pending: 32}}\n  negativeCacheTTL: 0s\n", tt.policies)
			p := b.attach("a", 1)
			p.dst = b.server()
			b.start()
			var before int
			p.redir.look(func() { before = len(p.redir.cfg.Outbound) })
			var carried []*net.TCPConn
			for range 100 { // one after the other, so that none is pending long
				c, err := dialTCP(t.Context(), b.door(p, 0))
				if errors.Is(err, syscall.ECONNRESET) {
					continue // before it was seen to be made
				}
				must(t, err)
				t.Cleanup(func() { _ = c.Close() })
				must(t, c.SetDeadline(time.Now().Add(waitLimit)))
				_, err = c.Write([]byte("x"))
				if err == nil {
					_, err = c.Read(make([]byte, 1))
				}
				if err == nil {
					carried = append(carried, c)
				}
			}
			eventually(t, func() string { // the last one may just be on its way out
				if s := b.status(); len(carried) != 32 || s.NodeBudget.RelaysUsed != 32 || s.Conns.Reset != 68 || s.Conns.Live != 32 {
					return fmt.Sprintf("%d carried, %+v, %+v", len(carried), s.NodeBudget, s.Conns)
				}
				return ""
			})
			eventually(t, func() string {
				var outbound, inbound int
				p.redir.look(func() { outbound, inbound = len(p.redir.cfg.Outbound), len(p.redir.cfg.Inbound) })
				if outbound != tt.wantOutbound || inbound != 0 {
					return fmt.Sprintf("%d destinations and %d ports are diverted", outbound, inbound)
				}
				return ""
			})
			if x, s := b.attachment("a"), b.status(); x.Paused != agentapi.CodeBudgetRelays || s.Pods.Paused != 1 || x.Budget.RelaysUsed != 32 || x.State != agentapi.StateReady {
				t.Errorf("attachment %+v, pods %+v", x, s.Pods)
			}
			if e := value(b.client.Explain(t.Context(), "test/a", "127.0.0.1:5"))(t); e.Code != agentapi.CodeBudgetRelays {
				t.Errorf("explanation %+v", e)
			}
			for _, line := range []string{"kube_smcr_paused_pods 1", "kube_smcr_relays 32", `kube_smcr_diversion_pauses_total{reason="BUDGET_RELAYS"} 1`, `kube_smcr_resets_total{reason="BUDGET_RELAYS"} 68`} {
				if _, text := b.get(agentapi.PathMetrics); !strings.Contains(text, line+"\n") {
					t.Errorf("metrics do not have %s", line)
				}
			}
			for _, c := range carried {
				must(t, c.Close())
			}
			eventually(t, func() string {
				var after int
				p.redir.look(func() { after = len(p.redir.cfg.Outbound) })
				if after != before || b.attachment("a").Paused != "" {
					return fmt.Sprintf("%d destinations are diverted, %d before", after, before)
				}
				return ""
			})
		})
	}
}
