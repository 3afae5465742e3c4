// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// linuxTokens are the peer's RMBs, as the kernel's model knows them.
type linuxTokens struct{ list []*linuxToken }

// linuxToken is one of the peer's RMBs, by link.
type linuxToken struct {
	on    [linuxLinks]llc.RToken
	known [linuxLinks]bool
}

// find finds the peer's RMB by the key it has on a link.
func (s *linuxTokens) find(slot int, k rdma.RKey) *linuxToken {
	for _, t := range s.list {
		if t.known[slot] && t.on[slot].RKey == k {
			return t
		}
	}
	return nil
}

// learn remembers an RMB of the peer; nil when the table is full.
func (s *linuxTokens) learn(slot int, k llc.RToken) *linuxToken {
	t := s.find(slot, k.RKey)
	if t == nil {
		if len(s.list) >= linuxRTokens {
			return nil
		}
		t = &linuxToken{}
		s.list = append(s.list, t)
	}
	t.on[slot], t.known[slot] = k, true
	return t
}

func (s *linuxTokens) forget(slot int, k rdma.RKey) bool {
	for i, t := range s.list {
		if t.known[slot] && t.on[slot].RKey == k {
			s.list = append(s.list[:i:i], s.list[i+1:]...)
			return true
		}
	}
	return false
}

// learnPairs takes the peer's keys on a new link; what it does not know on the
// old one it skips.
func (s *linuxTokens) learnPairs(lk, n *linuxLink, pairs []llc.RTokenPair) {
	for _, p := range pairs {
		if t := s.find(lk.slot, p.Reference); t != nil {
			t.on[n.slot], t.known[n.slot] = p.New, true
		}
	}
}
