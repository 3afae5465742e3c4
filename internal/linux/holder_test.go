// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"testing"
	"time"
)

// TestHolder_Counters: they can be had while the kernel carries verdicts out.
func TestHolder_Counters(t *testing.T) {
	h := &Holder{shown: HolderCounters{NotSYN: 1}}
	h.mu.Lock() // as during pollLocked
	defer h.mu.Unlock()
	got := make(chan HolderCounters, 1)
	go func() { got <- h.Counters() }()
	select {
	case c := <-got:
		if c.NotSYN != 1 {
			t.Errorf("counters %+v", c)
		}
	case <-time.After(waitLimit):
		t.Error("the counters wait for the verdicts")
	}
}

// settled are a holder's counters when no verdict is under way: a packet goes on before it counts.
func settled(h *Holder) HolderCounters {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.Counters()
}
