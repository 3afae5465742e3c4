// SPDX-License-Identifier: Apache-2.0

package config

import "cmp"

// budgets reads the budget of the node, of each pod, and the most that policies may give
// to a pod.
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
		d.size(given, "sockets", &b.SocketBytes)
		return given
	}
	one("node", &n.NodeBudget, "relays", "pending", "sockets")
	pod := one("pod", &n.PodBudget, "relays", "pending", "sockets")
	// A pod's limit that the file leaves out has a default, which must not exceed the
	// node's limit. For example, a file with node: {relays: 100} only is no mistake.
	if !pod.has("relays") {
		n.PodBudget.Relays = min(n.PodBudget.Relays, n.NodeBudget.Relays)
	}
	if !pod.has("pending") {
		n.PodBudget.Pending = min(n.PodBudget.Pending, n.NodeBudget.Pending)
	}
	if !pod.has("sockets") {
		n.PodBudget.SocketBytes = min(n.PodBudget.SocketBytes, n.NodeBudget.SocketBytes)
	}
	if n.PodBudget.SocketBytes < minSocketBytes {
		d.errorf(fs.where("pod"), "sockets (%d bytes) is less than %d, which some relays need", n.PodBudget.SocketBytes, minSocketBytes)
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

// defaultPodMax is the most that policies may give to a pod if the file does not say.
func defaultPodMax(n *Node) Budget {
	return Budget{
		MemoryBytes: min(defaultPodMaxShare*n.PodBudget.MemoryBytes, n.NodeBudget.MemoryBytes),
		Conns:       min(defaultPodMaxShare*n.PodBudget.Conns, n.NodeBudget.Conns),
	}
}

// ConnSocketBytes is what the kernel may use for the buffers of the sockets of one connection
// on SMC-R: of the one to the application, to send and to receive.
const ConnSocketBytes = 2 * (128 << 10)

// Room is how many connections on SMC-R a budget has room for with the node's buffers.
type Room struct {
	// Conns is how many there can be if peers have many of them, Peers with how many peers
	// there can be one: for the first one with a peer two RMBEs are registered.
	Conns, Peers int
}

// RoomOf returns the room that a budget of the node or of a pod has. Messages take a
// little of the memory, too, which is not counted here.
func (n *Node) RoomOf(b Budget) Room {
	most := min(b.Conns, b.SocketBytes/ConnSocketBytes)
	peers := b.MemoryBytes
	if n.RMBEBytes == maxBufferBytes && n.SendBufferBytes == maxBufferBytes {
		// On devices in software first connections have four times as much, of a quarter of the memory.
		peers = peers/4*3 + peers/4/4
	}
	return Room{
		Conns: min(most, b.MemoryBytes/(n.RMBEBytes+n.SendBufferBytes)),
		Peers: min(most, peers/(2*n.RMBEBytes+n.SendBufferBytes)),
	}
}

// notMore reports each part of budget b that is more than that of budget most.
func (d *decoder) notMore(fs fields, at, whose string, b Budget, whoseMost string, most Budget) {
	for _, part := range []struct {
		name, unit string
		is, may    int
	}{
		{"memory", " bytes", b.MemoryBytes, most.MemoryBytes},
		{"connections", "", b.Conns, most.Conns},
		{"relays", "", b.Relays, most.Relays},
		{"pending", "", b.Pending, most.Pending},
		{"sockets", " bytes", b.SocketBytes, most.SocketBytes},
	} {
		if part.is > part.may {
			d.errorf(fs.where(at), "%s %s (%d%s) is more than %s (%d)", part.name, whose, part.is, part.unit, whoseMost, part.may)
		}
	}
}
