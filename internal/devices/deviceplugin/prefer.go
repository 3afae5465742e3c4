// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"slices"
)

// candidate is a device of which some IDs are available.
type candidate struct {
	device Device
	ids    []string // available ones, in kubelet's order
	taken  int      // how many of its slots are chosen already
}

// prefer chooses size of the available IDs, all of must among them. It prefers different
// devices, then different rails, then the same NUMA node, then the least used devices.
func (o offer) prefer(available, must []string, size int) []string {
	chosen := slices.Clone(must)
	cs := o.candidates(available, must)
	for len(chosen) < size {
		best := -1
		for i := range cs {
			if len(cs[i].ids) > 0 && (best < 0 || worth(cs, i, best) < 0) {
				best = i
			}
		}
		if best < 0 {
			break // there are no more; kubelet adds other IDs, or refuses the pod
		}
		c := &cs[best]
		chosen, c.ids = append(chosen, c.ids[0]), c.ids[1:]
		c.taken++
	}
	return chosen
}

func (o offer) candidates(available, must []string) []candidate {
	var cs []candidate
	at := func(id string) *candidate {
		d, err := o.find(id)
		if err != nil {
			return nil
		}
		i := slices.IndexFunc(cs, func(c candidate) bool { return c.device.ID == d.ID })
		if i < 0 {
			i = len(cs)
			cs = append(cs, candidate{device: d})
		}
		return &cs[i]
	}
	for _, id := range available {
		if c := at(id); c != nil && !slices.Contains(must, id) {
			c.ids = append(c.ids, id)
		}
	}
	for _, id := range must {
		if c := at(id); c != nil {
			c.taken++
		}
	}
	slices.SortFunc(cs, func(a, b candidate) int { return byRail(a.device, b.device) })
	return cs
}

// worth compares two candidates for the next choice: negative if i is better.
func worth(cs []candidate, i, j int) int {
	onRail := func(rail int) (n int) {
		for k := range cs {
			if cs[k].device.Rail == rail {
				n += cs[k].taken
			}
		}
		return n
	}
	// far counts the chosen candidates on other NUMA nodes.
	far := func(node int) (n int) {
		for k := range cs {
			if other := cs[k].device.NUMANode; node >= 0 && other >= 0 && other != node {
				n += cs[k].taken
			}
		}
		return n
	}
	// free counts the slots that a rail has left. A VF counts as one slot.
	free := func(rail int) (n int) {
		for k := range cs {
			if cs[k].device.Rail == rail {
				n += len(cs[k].ids)
			}
		}
		return n
	}
	a, b := &cs[i], &cs[j]
	return cmp.Or(
		cmp.Compare(a.taken, b.taken),
		cmp.Compare(onRail(a.device.Rail), onRail(b.device.Rail)),
		cmp.Compare(far(a.device.NUMANode), far(b.device.NUMANode)),
		cmp.Compare(free(b.device.Rail), free(a.device.Rail)),
		cmp.Compare(len(b.ids), len(a.ids)),
		cmp.Compare(i, j),
	)
}
