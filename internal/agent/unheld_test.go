// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

// endingHolder is a holder whose queue breaks, or that serves its queue until it is told to end.
type endingHolder struct {
	holder
	err error
}

func (h endingHolder) Run(ctx context.Context) error {
	if h.err == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	return h.err
}

func (endingHolder) Counters() linux.HolderCounters { return linux.HolderCounters{} }

// TestHold_unheld: that the SYNs of a pod are not held, or not any more, stands with its attachment and
// among the node's problems, with the cause.
func TestHold_unheld(t *testing.T) {
	for _, tt := range []struct {
		name   string
		before func(t *testing.T, px *proxy)
		want   string // "": nothing
	}{
		{
			"the queue cannot be bound", func(t *testing.T, px *proxy) { px.openHold() },
			"SYNs not held: connect() of the pod's programs succeeds before their destination answers: no queues",
		},
		{"the queue breaks", func(_ *testing.T, px *proxy) {
			h := &hold{px: px, holder: endingHolder{err: errors.New("message too long")}, ended: make(chan struct{})}
			h.start()
			<-h.ended
			h.stop()
		}, "SYNs not held until the queue is opened again: the pod's new connections go directly, and are dropped where SMC-R is required: message too long"},
		{"the queue is closed", func(_ *testing.T, px *proxy) {
			h := &hold{px: px, holder: endingHolder{}, ended: make(chan struct{})}
			h.start()
			h.stop()
			<-h.ended
		}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBare(t, newBench(t, "", preferAll))
			b.openDevices()
			b.a.holds.on = true
			px := b.proxy("a").px
			b.manage(px, nil)
			tt.before(t, px)
			v := View{b.a}
			if got := v.Attachments().Attachments[0].Detail; got != tt.want {
				t.Errorf("detail %q, want %q", got, tt.want)
			}
			if got := strings.Join(v.Status().Problems, "\n"); strings.Contains(got, "SYNs are not held") != (tt.want != "") {
				t.Errorf("problems %q", got)
			}
		})
	}
}

// answeringHolder keeps the verdicts.
type answeringHolder struct {
	holder
	answers []synqueue.Decision
}

func (h *answeringHolder) Answer(_ synqueue.Conn, d synqueue.Decision, _ synqueue.Finding) (bool, error) {
	h.answers = append(h.answers, d)
	return true, nil
}

// TestHold_withoutPlace: a SYN for which there is no pending place goes on, and if SMC-R is required, TCP is to repeat it until
// there was none for pendingPatience; then it is refused. Explain says why from the beginning.
func TestHold_withoutPlace(t *testing.T) {
	const drop, refuse, pass = synqueue.Drop, synqueue.Reset, synqueue.Pass
	for _, tt := range []struct {
		name, policies string
		want           []synqueue.Decision // at once, after most of the patience, after it, long after, and when a place came and went in between
		code           agentapi.Code
		waits          float64
		fallbacks      uint64
		resets         uint64
	}{
		{"required", requireAll, []synqueue.Decision{drop, drop, refuse, drop, drop}, agentapi.CodeRequired, 4, 1, 1},
		{"preferred", preferAll, []synqueue.Decision{pass, pass, pass, pass, pass}, agentapi.CodeBudgetPending, 0, 5, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newAbleBare(t, fullPod, tt.policies)
				p := b.proxy("a")
				one := p.fill(t)
				answers := &answeringHolder{}
				h := &hold{px: p.px, holder: answers, arrivals: map[way][]*arrival{}}
				c := synqueue.Conn{Src: netip.MustParseAddrPort("127.0.0.1:40000"), Dst: netip.MustParseAddrPort("192.0.2.9:80")}
				ask := func() {
					h.decide(c, true)
					if d := b.decided(); d.Reason != tt.code || tt.code == agentapi.CodeRequired && !strings.HasPrefix(d.Detail, "BUDGET_PENDING: ") {
						t.Errorf("after %d verdicts: decision %+v", len(answers.answers), d)
					}
				}
				ask()
				<-time.After(pendingPatience - time.Millisecond)
				ask()
				<-time.After(time.Millisecond)
				ask()
				<-time.After(2 * pendingPatience)
				ask()
				<-time.After(pendingPatience)
				one.release()
				h.withoutPlace(false, time.Now())
				p.reservation(t)
				ask()
				if d := cmp.Diff(tt.want, answers.answers); d != "" {
					t.Errorf("verdicts (-want +got):\n%s", d)
				}
				if isNoted := !h.shortLast.IsZero(); isNoted != (tt.code == agentapi.CodeRequired) {
					t.Errorf("a shortage is noted: %t", isNoted)
				}
				if got := testutil.ToFloat64(b.a.metrics.pendingWaits); got != tt.waits {
					t.Errorf("%v waits counted, want %v", got, tt.waits)
				}
				if got := b.a.metrics.sum(); got.reasons[agentapi.CodeBudgetPending] != tt.fallbacks || got.resets != tt.resets {
					t.Errorf("metrics %+v, want %d fallbacks and %d resets", got, tt.fallbacks, tt.resets)
				}
			})
		})
	}
}

// numberedHolder is a holder with a queue of its own, which ends with an error when broken is closed.
type numberedHolder struct {
	holder
	number uint16
	broken chan struct{}
	closed bool
}

func (h *numberedHolder) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-h.broken:
		return errors.New("no buffer space available")
	}
}

func (h *numberedHolder) Number() uint16 { return h.number }

func (h *numberedHolder) Counters() linux.HolderCounters {
	return linux.HolderCounters{NotSYN: uint64(h.number)}
}

func (h *numberedHolder) Close() error {
	h.closed = true
	return nil
}

// TestHold_repaired: when a pod's queue ends by itself, the manager's rounds open another one with pauses between the
// tries, and the table gets its number. While there is none the table diverts without. The pod's proxy and
// its sessions stay.
func TestHold_repaired(t *testing.T) {
	b := newAbleBare(t, "", "policies:\n- {name: must, mode: Required}\n")
	b.a.holds.enable(b.a)
	b.a.holds.on = true
	p := b.proxy("a")
	px := p.px
	var made []*numberedHolder
	var fail error
	p.queue = func() (holder, error) {
		if fail != nil {
			return nil, fail
		}
		made = append(made, &numberedHolder{number: uint16(len(made)) + 1, broken: make(chan struct{})})
		return made[len(made)-1], nil
	}
	px.openHold()
	px.hold.Load().start()
	must(t, px.updateTable())
	now := time.Now()
	pod := b.manage(px, nil)
	round := func(after time.Duration, queue uint16) {
		t.Helper()
		now = now.Add(after)
		next := b.a.manager.step(t.Context(), *pod, pod.atts, now, false)
		pod = &next
		got := uint16(0)
		if h := p.redir.cfg.Hold; h != nil {
			got = h.Queue
		}
		if pod.proxy != px || got != queue {
			t.Errorf("the table holds SYNs in queue %d, want %d of the same proxy", got, queue)
		}
	}
	end := func() {
		h := px.hold.Load()
		close(h.holder.(*numberedHolder).broken)
		<-h.ended
	}
	session, _, leave := px.register(px.life, nil, &session{dir: agentapi.Outbound})
	defer leave()
	round(time.Second, 1) // nothing happened
	end()
	round(time.Second, 2)
	if !made[0].closed || made[1].closed || px.whyUnheld() != "" {
		t.Errorf("the first one is closed: %v, the second: %v; %q", made[0].closed, made[1].closed, px.whyUnheld())
	}
	end()
	round(retryFirst/2, 2) // not so soon
	fail = errors.New("no queues")
	round(retryFirst, 0)
	if px.whyUnheld() == "" || !made[1].closed {
		t.Errorf("%q, the second one is closed: %v", px.whyUnheld(), made[1].closed)
	}
	fail = nil
	round(retryFirst, 0)
	round(2*retryFirst, 3)
	if session.endedBy() != "" || len(made) != 3 || b.a.holds.counters().NotSYN != 6 {
		t.Errorf("session ended by %q, %d queues, counted %d", session.endedBy(), len(made), b.a.holds.counters().NotSYN)
	}
	must(t, px.hold.Load().close())
}

// slowHolder is a holder that counts only when slow is closed.
type slowHolder struct {
	holder
	asked, slow chan struct{}
}

func (h *slowHolder) Counters() linux.HolderCounters {
	h.asked <- struct{}{}
	<-h.slow
	return linux.HolderCounters{NotSYN: 2}
}

// TestHolds_counters: while one pod's holder is asked what it counted, also when it is closed, connections of other pods do
// not wait.
func TestHolds_counters(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	b.a.holds.enable(b.a)
	h := &slowHolder{asked: make(chan struct{}), slow: make(chan struct{})}
	pod := &hold{px: b.proxy("a").px, holder: h}
	b.a.holds.opened(pod)
	sums := make(chan uint64, 2)
	go func() { sums <- b.a.holds.counters().NotSYN }()
	<-h.asked
	go func() {
		b.a.holds.closed(pod)
		sums <- b.a.holds.counters().NotSYN
	}()
	<-h.asked
	local := make(chan bool, 1)
	go func() {
		from := netip.MustParseAddrPort("192.0.2.9:80")
		defer b.a.holds.begin(from, &atomic.Bool{})()
		local <- b.a.holds.isLocal(from)
	}()
	select {
	case yes := <-local:
		if !yes {
			t.Error("a connection of this node is not known as one")
		}
	case <-time.After(waitLimit):
		t.Error("a connection of another pod waits")
	}
	close(h.slow)
	if one, two := <-sums, <-sums; one != 2 || two != 2 {
		t.Errorf("counted %d and %d, want 2", one, two)
	}
}
