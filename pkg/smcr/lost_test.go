// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestStack_LostGroups: either side knows for a while that its link group was lost, and why, though it has it no more. It
// knows no more than smcr.MaxLost, the latest.
func TestStack_LostGroups(t *testing.T) {
	for _, atServer := range []bool{false, true} {
		p := newPair(t)
		c, other := p.dial(t)
		s := p.client
		if atServer {
			s, c, other = p.server, other, c
		}
		p.fabric.cut()
		if _, err := c.Write([]byte{1}); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the group is lost", func() bool { return len(s.LostGroups()) == 1 })
		g := s.LostGroups()[0]
		if g.ID != c.Info().GroupID || g.State != "DEAD" || g.Err == nil || !strings.Contains(g.Err.Error(), "link failed") || len(s.LinkGroups()) != 0 {
			t.Errorf("lost %+v, want group %d; present %+v", g, c.Info().GroupID, s.LinkGroups())
		}
		_, _ = c.Close(), other.Close()
		smcr.AgeLost(s)
		if lost := s.LostGroups(); len(lost) != 0 {
			t.Errorf("%d groups are still lost after their time", len(lost))
		}
		for i := range uint32(smcr.MaxLost + 2) {
			smcr.AddLost(s, smcr.GroupInfo{ID: i})
		}
		if lost := s.LostGroups(); len(lost) != smcr.MaxLost || lost[0].ID != 2 {
			t.Errorf("%d groups are lost, from %d on", len(lost), lost[0].ID)
		}
	}
}

// TestStack_LostGroups_orderly: a group that one side ended is not lost to either.
func TestStack_LostGroups_orderly(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	_, _ = a.Close(), b.Close()
	if err := p.server.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the group is over", func() bool { return len(p.client.LinkGroups()) == 0 })
	for _, s := range []*smcr.Stack{p.client, p.server} {
		if lost := s.LostGroups(); len(lost) != 0 {
			t.Errorf("lost %+v", lost)
		}
	}
}
