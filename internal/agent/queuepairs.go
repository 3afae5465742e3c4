// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"math"
	"net/netip"
)

// Each link of a pod's link group takes one queue pair of one of the node's devices, which have a
// limited number. The ledger shares these out like the node's budget: half of a device's queue
// pairs is kept for the pods in equal shares, and the other half goes to whoever comes first. A
// pod's own devices are not in the ledger.

// unboundQueuePairs sets no limit for a pod's queue pairs: its share and what the others leave
// bound them.
func (a *amounts) unboundQueuePairs() {
	for r := queuePairs; r < allResources; r++ {
		a[r] = math.MaxInt32
	}
}

// setQueuePairs enters how many queue pairs a device of the node has.
func (l *ledger) setQueuePairs(device string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, known := l.devices[device]
	if !known {
		r = queuePairs + resource(len(l.devices))
		if r >= allResources {
			return // no stack can use so many devices
		}
		l.devices[device] = r
	}
	l.limit[r] = n
	l.reshare()
}

// raiseQueuePairs enters that a device of the node has more queue pairs than was known; fewer
// change nothing.
func (l *ledger) raiseQueuePairs(device string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r, known := l.devices[device]; known && n > l.limit[r] {
		l.limit[r] = n
		l.reshare()
	}
}

// raiseQueuePairs enters what the node's devices have said since they were opened. Those that say how
// many queue pairs are left said too little then, while another agent on the node had some.
func (a *agent) raiseQueuePairs() {
	for _, d := range a.rnics.Node().States() {
		if c, ok := d.Open.(interface{ QueuePairs() int }); ok {
			a.ledger.raiseQueuePairs(d.Name, c.QueuePairs())
		}
	}
}

// TakeQP implements smcr.QueuePairAccount.
func (a *account) TakeQP(client netip.Addr, device string) error {
	r, shared := a.ledger.queuePairsOf(device)
	if !shared {
		return nil
	}
	return a.ledger.takeFor(a, client, r, 1)
}

// GiveQP implements smcr.QueuePairAccount.
func (a *account) GiveQP(client netip.Addr, device string) {
	if r, shared := a.ledger.queuePairsOf(device); shared {
		a.ledger.giveFor(a, client, r, 1)
	}
}

func (l *ledger) queuePairsOf(device string) (_ resource, shared bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.devices[device]
	return r, ok
}

// queuePairRefusals is how often a queue pair was refused.
func (a *account) queuePairRefusals() uint64 { return a.ledger.queuePairRefusals(a) }

func (l *ledger) queuePairRefusals(a *account) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return a.queuePairsRefused
}
