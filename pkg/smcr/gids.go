// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// gids are the rows of a device's GID table that a stack uses. A queue pair's
// packets travel as the type of its row says, and both ends must use the same
// type, which CLC does not tell: version 2 is RoCE v2. Version 1 is RoCE v1, as
// Linux has it, and RoCE v2 between devices that have no RoCE v1 at all, such
// as the software one.
type gids struct {
	v1, v2 rdma.GIDEntry
	gone   bool // the table has no such row any more
}

// of returns the row for a version of SMC-R.
func (g *gids) of(version uint8) rdma.GIDEntry {
	if version >= clc.V2 {
		return g.v2
	}
	return g.v1
}

// onLink reports whether another GID is in the subnet of ours.
func (g *gids) onLink(peer rdma.GID) bool { return g.v2.OnLink(peer) || g.v1.OnLink(peer) }

// pickGIDs chooses the first row of each type: devices list the preferred ones
// first.
func pickGIDs(d rdma.Device, versions VersionSet) (g gids, err error) {
	table := d.GIDs()
	row := func(t rdma.GIDType) (rdma.GIDEntry, bool) {
		i := slices.IndexFunc(table, func(e rdma.GIDEntry) bool { return e.Type == t })
		if i < 0 {
			return rdma.GIDEntry{}, false
		}
		return table[i], true
	}
	v2, ok2 := row(rdma.GIDTypeRoCEv2)
	v1, ok1 := row(rdma.GIDTypeRoCEv1)
	_, iwarp := row(rdma.GIDTypeIWARP)
	switch {
	case !ok2 && ok1 && versions == VersionsV1:
	case !ok2 && iwarp:
		return g, errors.New("it is an iWARP device, and SMC-R is for RoCE")
	case !ok2:
		return g, errors.New("no RoCE v2 GID: give its network interface an IP address")
	}
	if !ok1 {
		v1 = v2
	}
	return gids{v1: v1, v2: v2}, nil
}

// readGIDs takes a changed GID table over. Links whose row is gone have failed,
// but the last one of a group: that is as with a port that is down.
func (r *rnic) readGIDs(now time.Time) {
	next, err := pickGIDs(r.dev, r.s.cfg.Versions)
	if err != nil {
		r.s.failed("GID table", fmt.Errorf("device %s: %w", r.dev.Name(), err))
		next = gids{v1: r.gids.v1, v2: r.gids.v2, gone: true}
	}
	was, table := r.gids, r.dev.GIDs()
	r.gids = next
	lost := next.gone
	for _, l := range r.links {
		lost = lost || !slices.ContainsFunc(table, func(e rdma.GIDEntry) bool {
			return e.Index == l.row.Index && e.GID == l.row.GID && e.Type == l.row.Type
		})
	}
	if lost {
		r.s.portChanged(now, r, false)
	}
	if (lost || was != next) && r.active() {
		r.s.portChanged(now, r, true)
	}
}
