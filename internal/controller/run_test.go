// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// quick makes leader election fail over within seconds.
func quick(c *Config) {
	c.LeaderElect = true
	c.LeaseDuration, c.RenewDeadline, c.RetryPeriod = 2*time.Second, 1500*time.Millisecond, 250*time.Millisecond
}

// One of two replicas works; when it ends, or loses the API server, the other
// one does.
func TestLeaderFailover(t *testing.T) {
	w := newWorld(t)
	proxy, through := server.NewProxy(t)
	api := w.limited(through, "controller.yaml", "kube-smcr-controller")
	p := w.policy("web")
	observed := func(generation int64) func() error {
		return func() error {
			if err := w.get(p); err != nil {
				return err
			}
			if p.Status.ObservedGeneration != generation {
				return fmt.Errorf("observedGeneration is %d, want %d", p.Status.ObservedGeneration, generation)
			}
			return nil
		}
	}
	// The first one leads before the second one is there.
	stopFirst := w.run(api, quick)
	w.eventually("the first replica works", observed(1))
	direct := w.direct(api)
	stopSecond := w.run(direct, quick)

	proxy.TakeAway()
	began := time.Now()
	update(w, p, func(p *v1alpha1.SMCRPolicy) { p.Spec.Priority = 1 })
	w.eventually("the second replica takes over when the first loses the API server", observed(2))
	t.Logf("failover took %v with leases of 2 s", time.Since(began))
	proxy.GiveBack()

	// The first one has started again in its process, and waits for the lease.
	stopSecond()
	update(w, p, func(p *v1alpha1.SMCRPolicy) { p.Spec.Priority = 2 })
	w.eventually("the first replica takes over again", observed(3))
	stopFirst()
}

// A single controller goes on when the API server comes back, whatever it did
// meanwhile.
func TestAPIServerLoss(t *testing.T) {
	const outage = 3 * time.Second // longer than the lease
	w := newWorld(t)
	w.node("n-" + w.ns)
	proxy, through := server.NewProxy(t)
	p := w.policy("web")
	w.run(w.limited(through, "controller.yaml", "kube-smcr-controller"), quick)
	matched := func(n int32) func() error {
		return func() error {
			if err := w.get(p); err != nil {
				return err
			}
			if p.Status.Pods.Matched != n || p.Status.ObservedGeneration == 0 {
				return fmt.Errorf("matched is %d, want %d", p.Status.Pods.Matched, n)
			}
			return nil
		}
	}
	w.eventually("the controller works", matched(0))
	for _, fault := range []struct {
		name  string
		works bool // meanwhile
		do    func()
	}{
		{name: "no answer", do: proxy.TakeAway},
		{name: "errors", do: func() { proxy.Answer(500) }},
		{name: "too many requests", do: func() { proxy.Answer(429) }},
		{name: "slow", works: true, do: func() { proxy.Delay(700 * time.Millisecond) }},
	} {
		fault.do()
		p0 := p.Status.Pods.Matched
		w.pod(fmt.Sprintf("p%d", p0), "n-"+w.ns, fmt.Sprintf("10.4.0.%d", p0+1))
		if fault.works {
			w.eventually(fault.name+": the controller works", matched(p0+1))
		} else {
			w.never(fault.name+": the controller writes", outage, matched(p0))
		}
		proxy.GiveBack()
		began := time.Now()
		w.eventually(fault.name+": the controller works again", matched(p0+1))
		t.Logf("%s: converged %v after it ended", fault.name, time.Since(began))
	}
}
