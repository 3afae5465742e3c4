// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// gidDevice is a device with a GID table and nothing else.
type gidDevice struct {
	rdma.Device
	table []rdma.GIDEntry
}

func (d gidDevice) GIDs() []rdma.GIDEntry { return d.table }

func TestPickGIDs(t *testing.T) {
	row := func(i int, typ rdma.GIDType) rdma.GIDEntry {
		return rdma.GIDEntry{Index: i, Type: typ, GID: gid("192.0.2.1")}
	}
	v1, v2, other, iwarp := row(0, rdma.GIDTypeRoCEv1), row(1, rdma.GIDTypeRoCEv2), row(2, rdma.GIDTypeRoCEv2), row(0, rdma.GIDTypeIWARP)
	for _, tc := range []struct {
		name     string
		table    []rdma.GIDEntry
		versions VersionSet
		v1, v2   rdma.GIDEntry
		ok       bool
	}{
		{"both types", []rdma.GIDEntry{v1, v2, other}, VersionsBoth, v1, v2, true},
		{"the first of a type", []rdma.GIDEntry{other, v2}, VersionsBoth, other, other, true},
		{"RoCE v2 alone, for version 1 too", []rdma.GIDEntry{v2}, VersionsV1, v2, v2, true},
		{"RoCE v1 alone, for version 1", []rdma.GIDEntry{v1}, VersionsV1, v1, rdma.GIDEntry{}, true},
		{"RoCE v1 alone, for both", []rdma.GIDEntry{v1}, VersionsBoth, rdma.GIDEntry{}, rdma.GIDEntry{}, false},
		{"iWARP", []rdma.GIDEntry{iwarp}, VersionsBoth, rdma.GIDEntry{}, rdma.GIDEntry{}, false},
		{"no address", nil, VersionsBoth, rdma.GIDEntry{}, rdma.GIDEntry{}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g, err := pickGIDs(gidDevice{table: tc.table}, tc.versions)
			if (err == nil) != tc.ok || g.v1 != tc.v1 || g.v2 != tc.v2 {
				t.Errorf("%+v, %v; want %+v, %+v", g, err, tc.v1, tc.v2)
			}
			if g.of(1) != tc.v1 || g.of(2) != tc.v2 {
				t.Errorf("for version 1 %+v, for version 2 %+v", g.of(1), g.of(2))
			}
		})
	}
}
