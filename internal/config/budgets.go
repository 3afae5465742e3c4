// SPDX-License-Identifier: Apache-2.0

package config

import "cmp"

// budgets reads the budgets of the node, of each pod, and what policies may
// give to one.
func (d *decoder) budgets(f field, n *Node) {
	fs := d.mapping(f, "node", "pod", "podMax")
	one := func(key string, b *Budget, keys ...string) (given fields) {
		bf, ok := fs.get(key)
		if !ok {
			return fields{}
		}
		given = d.mapping(bf, append([]string{"memory", "connections"}, keys...)...)
		d.size(given, "memory", &b.MemoryBytes)
		d.integer(given, "connections", &b.Conns, 0, maxConns)
		d.integer(given, "relays", &b.Relays, minRelays, maxConns)
		d.integer(given, "pending", &b.Pending, minPending, maxConns)
		return given
	}
	one("node", &n.NodeBudget, "relays", "pending")
	pod := one("pod", &n.PodBudget, "relays", "pending")
	// What is left out gives way: who makes the node's small says nothing of the
	// pods'.
	if !pod.has("relays") {
		n.PodBudget.Relays = min(n.PodBudget.Relays, n.NodeBudget.Relays)
	}
	if !pod.has("pending") {
		n.PodBudget.Pending = min(n.PodBudget.Pending, n.NodeBudget.Pending)
	}
	d.notMore(fs, "pod", "of a pod", n.PodBudget, "of the node", n.NodeBudget)
	n.PodMax = Budget{}
	one("podMax", &n.PodMax)
	most := defaultPodMax(n)
	n.PodMax.MemoryBytes = cmp.Or(n.PodMax.MemoryBytes, most.MemoryBytes)
	n.PodMax.Conns = cmp.Or(n.PodMax.Conns, most.Conns)
	if _, ok := fs.get("podMax"); ok {
		d.notMore(fs, "podMax", "that policies may give to a pod", n.PodMax, "of the node", n.NodeBudget)
		d.notMore(fs, "podMax", "of a pod", Budget{MemoryBytes: n.PodBudget.MemoryBytes, Conns: n.PodBudget.Conns}, "that policies may give to it", n.PodMax)
	}
	if need := ConnsPerRegion * (n.RMBEBytes + n.SendBufferBytes); n.PodBudget.MemoryBytes < need {
		d.errorf(fs.where("pod"), "memory (%d bytes) is less than the rmbe and sendBuffer of %d connections (%d), which are registered at a time", n.PodBudget.MemoryBytes, ConnsPerRegion, need)
	}
}

// defaultPodMax is what policies may give to a pod if the operator does not
// say.
func defaultPodMax(n *Node) Budget {
	return Budget{
		MemoryBytes: min(defaultPodMaxShare*n.PodBudget.MemoryBytes, n.NodeBudget.MemoryBytes),
		Conns:       min(defaultPodMaxShare*n.PodBudget.Conns, n.NodeBudget.Conns),
	}
}

// notMore complains about each part of a budget that is more than another
// budget's.
func (d *decoder) notMore(fs fields, at, whose string, b Budget, whoseMost string, most Budget) {
	for _, part := range []struct {
		name, unit string
		is, may    int
	}{
		{"memory", " bytes", b.MemoryBytes, most.MemoryBytes},
		{"connections", "", b.Conns, most.Conns},
		{"relays", "", b.Relays, most.Relays},
		{"pending", "", b.Pending, most.Pending},
	} {
		if part.is > part.may {
			d.errorf(fs.where(at), "%s %s (%d%s) is more than %s (%d)", part.name, whose, part.is, part.unit, whoseMost, part.may)
		}
	}
}
