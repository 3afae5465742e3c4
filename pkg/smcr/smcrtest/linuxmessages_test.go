// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
)

func TestLinuxMessages_take(t *testing.T) {
	var s linuxMessages
	if ok, err := s.take(cdc.Message{Seq: 2}); ok || err == nil {
		t.Error("the first message has number 2")
	}
	for _, seq := range []uint16{1, 2} {
		if ok, err := s.take(cdc.Message{Seq: seq}); !ok || err != nil {
			t.Errorf("message %d: %t, %v", seq, ok, err)
		}
	}
	if ok, err := s.take(cdc.Message{Seq: 1}); ok || err == nil {
		t.Error("message 1 after 2, on one link")
	}
	if s.takeValidation(3) == nil {
		t.Error("the peer believes that message 3 arrived")
	}
	if err := s.takeValidation(2); err != nil {
		t.Error(err)
	}
	if ok, err := s.take(cdc.Message{Seq: 1}); ok || err != nil {
		t.Errorf("message 1 came late from the old link: %t, %v", ok, err)
	}
}

// Completions of a link that the connection has left count for nothing.
func TestLinuxMessages_delivered(t *testing.T) {
	before, now := &linuxLink{}, &linuxLink{slot: 1}
	s := linuxMessages{unacked: []linuxSent{{on: now, seq: 8, validation: true}, {on: now, seq: 9}}}
	if _, ok := s.delivered(before); ok {
		t.Error("delivered by the link that was left")
	}
	if m, ok := s.delivered(now); !ok || !m.validation || s.seqFin != 0 {
		t.Errorf("validation: %t, last delivered %d", ok, s.seqFin)
	}
	if _, ok := s.delivered(now); !ok || s.seqFin != 9 || !s.areOver() {
		t.Errorf("message: %t, last delivered %d, %d under way", ok, s.seqFin, len(s.unacked))
	}
}
