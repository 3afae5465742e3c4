// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// leases knows which agents renew their Leases. Its methods may be called by any goroutine.
//
// leases has a clock of its own, which only goes while renewals of any Lease arrive: those of
// other agents, and that of the leading controller every second. If the API server hangs, or
// the controller does not reach it, no renewals arrive, the clock stands, and no agent counts
// as silent because of that:
//
//	0 s    agent a, agent b and the leader renew; then the API server hangs
//	60 s   the API server goes on; the leader renews: the gap is longer than maxLeaseGap,
//	       so the clock says 0 s still
//	62 s   a and the leader have renewed, b has not: it is silent for 2 s, since 60 s
//
// All Leases come by one watch, in the order of their renewals: a watch that lags behind
// makes no agent silent, either.
//
// All times are those at which this machine learned of a renewal. The times in the Leases are
// other machines', and are not used.
type leases struct {
	mu     sync.Mutex
	clock  time.Duration
	last   time.Time // of the last renewal of any Lease
	agents map[string]renewal
	news   map[string]bool // nodes whose agents are new, back or have lost their Lease
}

// renewal is what is known of one agent's Lease.
type renewal struct {
	at time.Duration // the clock when the Lease was renewed last, or first seen
	// live says that the Lease was renewed since it was first seen. A Lease that a controller
	// finds when it starts may be that of an agent that has been gone for weeks.
	live bool
}

func newLeases() *leases { return &leases{agents: map[string]renewal{}, news: map[string]bool{}} }

// verdict is what an agent's Lease says of the agent.
type verdict uint8

const (
	noLease  verdict = iota // there is no Lease: an agent of an earlier version
	unproved                // the Lease was not renewed yet since it was first seen
	renewed                 // the Lease was renewed not long ago
	silent                  // the Lease was not renewed for silentAfter
)

// saw notes that the Lease of the agent with the label was made or renewed; "" is a Lease
// of somebody else. node is the node that the Lease says to be of.
func (l *leases) saw(label, node string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if gap := now.Sub(l.last); gap < maxLeaseGap {
		l.clock += gap
	}
	l.last = now
	if label == "" {
		return
	}
	was, known := l.agents[label]
	l.agents[label] = renewal{at: l.clock, live: known}
	if !known || !was.live || l.clock-was.at >= silentAfter {
		l.news[node] = true
	}
}

// forget notes that the Lease of the agent with the label is gone.
func (l *leases) forget(label, node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.agents, label)
	l.news[node] = true
}

// takeNews returns the nodes of which there is news since the last call.
func (l *leases) takeNews() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := slices.Collect(maps.Keys(l.news))
	clear(l.news)
	return out
}

// judge says what the Lease of the agent with the label says, and, unless that is noLease or
// silent, when to ask again.
func (l *leases) judge(label string) (v verdict, again time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.agents[label]
	left := silentAfter - (l.clock - r.at)
	switch {
	case !ok:
		return noLease, 0
	case left <= 0:
		return silent, 0
	case !r.live:
		return unproved, max(left, minLeaseCheck)
	}
	return renewed, max(left, minLeaseCheck)
}

// follow returns a handler that notes renewals. Each replica follows the Leases, not only the
// leader: if the leader is lost together with a node, the next one knows by then whose agent
// is silent.
func (l *leases) follow() toolscache.ResourceEventHandler {
	saw := func(lease *coordinationv1.Lease) {
		label, node := agentOf(lease)
		l.saw(label, node, time.Now())
	}
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if lease, ok := obj.(*coordinationv1.Lease); ok {
				saw(lease)
			}
		},
		UpdateFunc: func(old, now any) {
			was, ok1 := old.(*coordinationv1.Lease)
			is, ok2 := now.(*coordinationv1.Lease)
			if ok1 && ok2 && !was.Spec.RenewTime.Equal(is.Spec.RenewTime) {
				saw(is)
			}
		},
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(toolscache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if lease, ok := obj.(*coordinationv1.Lease); ok {
				if label, node := agentOf(lease); label != "" {
					l.forget(label, node)
				}
			}
		},
	}
}

// queue returns a handler that queues the nodes of which there is news. For each renewal, this
// handler and that of follow run in any order: news that follow notes too late are queued with
// the next renewal of any Lease.
func (l *leases) queue() handler.EventHandler {
	add := func(q queue) {
		for _, node := range l.takeNews() {
			q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: node}})
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, _ event.CreateEvent, q queue) { add(q) },
		UpdateFunc: func(_ context.Context, _ event.UpdateEvent, q queue) { add(q) },
		DeleteFunc: func(_ context.Context, _ event.DeleteEvent, q queue) { add(q) },
	}
}

// agentOf returns the label of the agent that has the Lease, "" if it is not the Lease of an
// agent, and the node that the Lease names. The label is certain, as the chart's admission
// policy checks it. The node only says which node to look at.
func agentOf(lease client.Object) (label, node string) {
	label, ok := strings.CutPrefix(lease.GetName(), v1alpha1.AgentLeasePrefix)
	if !ok {
		return "", ""
	}
	if owners := lease.GetOwnerReferences(); len(owners) > 0 {
		return label, owners[0].Name
	}
	return label, label
}
