// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Each counter is shown under its own name.
func TestDevice_Stats(t *testing.T) {
	d := &Device{}
	s := &d.stats
	for reason, n := range map[int]uint64{
		rxPackets: 1, rxBadICRC: 2, rxMalformed: 3, rxUnknownQP: 4, rxOtherDevice: 5, rxWrongSource: 6,
	} {
		s.rx[reason].Store(n)
	}
	s.rxErrors.Store(7)
	s.txPackets.Store(8)
	s.txWaits.Store(9)
	s.txErrors.Store(10)
	want := Stats{
		RxPackets: 1, RxBadICRC: 2, RxMalformed: 3, RxUnknownQP: 4, RxOtherDevice: 5, RxWrongSource: 6, RxErrors: 7, Receivers: 1,
		TxPackets: 8, TxWaits: 9, TxErrors: 10,
	}
	if diff := cmp.Diff(want, d.Stats()); diff != "" {
		t.Error(diff)
	}
}
