// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOffer_prefer(t *testing.T) {
	shared := func(id string, rail, numa int) Device { return Device{ID: id, Rail: rail, NUMANode: numa} }
	slots := func(id string, from, to int) (out []string) {
		for i := from; i < to; i++ {
			out = append(out, slotID(id, i))
		}
		return out
	}
	join := func(lists ...[]string) (out []string) {
		for _, l := range lists {
			out = append(out, l...)
		}
		return out
	}
	two := []Device{shared("a", 0, 0), shared("b", 1, 1)}
	four := []Device{shared("a0", 0, 0), shared("a1", 0, 1), shared("b0", 1, 0), shared("b1", 1, 1)}
	vfs := []Device{vf("0000:01:10.0", 0, 0), vf("0000:01:10.2", 0, 0), vf("0000:02:10.0", 1, 1), vf("0000:02:10.2", 1, 1)}
	tests := []struct {
		name      string
		devices   []Device
		available []string
		must      []string
		size      int
		want      []string
	}{
		{"one: the lowest rail", two, join(slots("a", 0, 4), slots("b", 0, 4)), nil, 1, []string{"a/0"}},
		{"one: the rail that is used less", two, join(slots("a", 2, 4), slots("b", 0, 4)), nil, 1, []string{"b/0"}},
		{"two: of different rails", two, join(slots("a", 0, 1), slots("b", 0, 4)), nil, 2, []string{"b/0", "a/0"}},
		{"three of two: one twice", two, join(slots("a", 0, 4), slots("b", 0, 4)), nil, 3, []string{"a/0", "b/0", "a/1"}},
		{"rails before NUMA", two, join(slots("a", 0, 4), slots("b", 0, 4)), []string{"a/0"}, 2, []string{"a/0", "b/0"}},
		{"the NUMA node of the one that must be", four, join(slots("a0", 0, 4), slots("a1", 0, 4), slots("b0", 3, 4), slots("b1", 0, 4)), []string{"a0/0"}, 2, []string{"a0/0", "b0/3"}},
		{"all that must be", two, slots("a", 0, 4), []string{"a/1", "a/3"}, 2, []string{"a/1", "a/3"}},
		{"fewer than wanted", two, slots("a", 0, 1), nil, 3, []string{"a/0"}},
		{"unknown ones are left to kubelet", two, []string{"z/0", "a/0"}, nil, 2, []string{"a/0"}},
		{"VF of the emptier rail", vfs, []string{"0000:01:10.2", "0000:02:10.0", "0000:02:10.2"}, nil, 1, []string{"0000:02:10.0"}},
		{"VFs of both rails", vfs, []string{"0000:01:10.0", "0000:01:10.2", "0000:02:10.0", "0000:02:10.2"}, nil, 2, []string{"0000:01:10.0", "0000:02:10.0"}},
		{"none", two, nil, nil, 1, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			o := newOffer(tt.devices, tt.devices[0].VF, 4)
			if diff := cmp.Diff(tt.want, o.prefer(tt.available, tt.must, tt.size)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestOffer_balanced: pods one after the other spread over the rails.
func TestOffer_balanced(t *testing.T) {
	o := newOffer([]Device{soft("a", 0, ""), soft("b", 1, "")}, false, 10)
	free := map[string]bool{}
	for _, d := range o.list().GetDevices() {
		free[d.GetID()] = true
	}
	got := map[string]int{}
	for range 10 {
		var available []string
		for id := range free {
			available = append(available, id)
		}
		ids := o.prefer(available, nil, 1)
		if len(ids) != 1 {
			t.Fatalf("preferred %v", ids)
		}
		delete(free, ids[0])
		got[DeviceID(ids[0])]++
	}
	if diff := cmp.Diff(map[string]int{"a": 5, "b": 5}, got); diff != "" {
		t.Errorf("pods of each device (-want +got):\n%s", diff)
	}
}

func TestNewOffer_limits(t *testing.T) {
	var all []Device
	for i := range maxDevices + 10 {
		all = append(all, soft(fmt.Sprintf("d%04d", i), 0, ""))
	}
	all = append(all, all[0])
	if o := newOffer(all, false, 1); len(o.devices) != maxDevices {
		t.Errorf("%d devices", len(o.devices))
	}
	if o := newOffer([]Device{soft("a", 0, ""), soft("a", 1, "")}, false, 1); len(o.devices) != 1 {
		t.Errorf("a device twice: %v", o.devices)
	}
}
