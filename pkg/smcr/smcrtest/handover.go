// SPDX-License-Identifier: Apache-2.0

package smcrtest

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/linkgroup"
)

// encodeEach is how often a snapshot is encoded and decoded on its way: that takes longer
// than all the rest.
const encodeEach = 512

// Handovers is how often a group was replaced: see Config.Handover.
func (w *World) Handovers() int { return w.handovers }

// touch notes that something happened to the group.
func (e *engine) touch() { e.touched++ }

// handOver replaces the group with what linkgroup.Restore makes of its snapshot, if it is
// time to. There are no outputs.
func (e *engine) handOver(now time.Time) {
	every := e.w.cfg.Handover
	if every == 0 || e.touched < every {
		return
	}
	e.touched = 0
	e.w.handovers++
	g, err := e.moved(now)
	if err != nil {
		e.w.fault("%v cannot be handed over: %w", e, err)
		return
	}
	moves := func(c *engineConn) {
		if e.g.ConnAt(c.lc.Slot()) == c.lc {
			c.lc = g.ConnAt(c.lc.Slot())
		}
	}
	for _, c := range e.conns {
		moves(c)
	}
	for c := range e.ending {
		moves(c)
	}
	e.g = g
}

// moved is the group as another process has it.
func (e *engine) moved(now time.Time) (*linkgroup.Group, error) {
	s := e.g.Snapshot(now)
	if e.w.handovers%encodeEach == 0 {
		b, err := json.Marshal(s)
		if err != nil {
			return nil, fmt.Errorf("encode: %w", err)
		}
		s = linkgroup.Snapshot{}
		if err := json.Unmarshal(b, &s); err != nil {
			return nil, fmt.Errorf("decode: %w", err)
		}
	}
	return linkgroup.Restore(now, e.groupConfig, s)
}
