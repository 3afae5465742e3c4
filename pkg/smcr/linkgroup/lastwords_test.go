// SPDX-License-Identifier: Apache-2.0

package linkgroup_test

import (
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// A group that is over queues no more answers for a peer that does not take them than a live group
// does. Once the peer has taken the answers, the group answers the peer's next request.
func TestGroup_lastWordsAreBounded(t *testing.T) {
	r := ready(t, linkgroup.Server)
	r.g.Terminate(r.now, llc.DeleteOperator)
	r.poll()
	if r.g.State() != linkgroup.Dead || r.g.PeerKnows() {
		t.Fatalf("group is %v, its peer knows: %t", r.g.State(), r.g.PeerKnows())
	}
	r.held = true
	ask := func() {
		for range 2 * linkgroup.SendBudget {
			r.recv(llc.DeleteRKey{Count: 1})
			r.poll()
		}
	}
	ask()
	if n := len(r.waiting); n != linkgroup.SendBudget {
		t.Errorf("%d answers are under way, want %d", n, linkgroup.SendBudget)
	}
	r.complete(1)
	ask()
	if n := len(r.waiting); n != linkgroup.SendBudget {
		t.Errorf("%d answers are under way after one was taken, want %d", n, linkgroup.SendBudget)
	}
}

// Messages that were on their way when the group ended count towards the send budget.
func TestGroup_lastWordsCountWhatIsUnderWay(t *testing.T) {
	r := ready(t, linkgroup.Client)
	r.held = true
	for range 10 {
		r.recv(llc.TestLink{})
	}
	r.poll()
	underWay := len(r.waiting)
	r.recv(llc.DeleteLink{All: true})
	r.g.Terminate(r.now, llc.DeleteOperator)
	r.poll()
	r.advance(2 * linkgroup.ExchangeTimeout) // nobody takes the answer to DELETE LINK
	if r.g.State() != linkgroup.Dead || underWay != 10 {
		t.Fatalf("group is %v with %d SENDs", r.g.State(), underWay)
	}
	r.waiting = nil
	for range 2 * linkgroup.SendBudget {
		r.recv(llc.DeleteRKey{Count: 1})
		r.poll()
	}
	if n := len(r.waiting); n != linkgroup.SendBudget-underWay-1 {
		t.Errorf("%d answers, want %d", n, linkgroup.SendBudget-underWay-1)
	}
}

// A group stops repeating that it is over, whatever the peer does.
func TestGroup_lastWordsEnd(t *testing.T) {
	r := ready(t, linkgroup.Server)
	r.g.Terminate(r.now, llc.DeleteOperator)
	r.poll()
	for range 100 {
		r.recv(llc.AddLink{Header: llc.Header{Response: true}, Dialect: r.g.Dialect()})
		r.poll()
		r.advance(100 * time.Millisecond)
	}
	if next, ok := r.g.NextTimeout(); ok {
		t.Errorf("there is something to do at %v", next)
	}
}
