// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// WireConfig says who may send RoCEv2 packets to this machine's RDMA devices.
type WireConfig struct {
	// Own are the addresses of this node's devices. Packets to other addresses are not
	// filtered on their way in.
	Own []netip.Addr
	// Nodes are the addresses of the devices of other nodes. Their packets may come by
	// Interfaces, or by the interface of the route back to them.
	Nodes []netip.Addr
	// Peers are configured networks that may send. Their packets may come by Interfaces
	// only. The route back is not enough: a network may contain pods of this node, and
	// the route back to a pod leads to the pod's interface.
	Peers []netip.Prefix
	// Interfaces are network interfaces without pods behind them: those of Own, and
	// configured ones.
	Interfaces []string
	// UID is the user whose processes may send to all these addresses.
	UID uint32
}

// Validate says what cannot be used.
func (c *WireConfig) Validate() error {
	if len(c.Own) > maxWireOwn || len(c.Interfaces) > maxWireOwn {
		return &ConfigError{Field: "Own", Reason: fmt.Sprintf("%d addresses and %d interfaces, at most %d are allowed", len(c.Own), len(c.Interfaces), maxWireOwn)}
	}
	if len(c.Nodes) > maxWireNodes {
		return &ConfigError{Field: "Nodes", Reason: fmt.Sprintf("%d addresses, at most %d are allowed: give networks instead", len(c.Nodes), maxWireNodes)}
	}
	if len(c.Peers) > maxWirePeers {
		return &ConfigError{Field: "Peers", Reason: fmt.Sprintf("%d networks, at most %d are allowed: use fewer, wider ones", len(c.Peers), maxWirePeers)}
	}
	for _, a := range slices.Concat(c.Own, c.Nodes) {
		if !a.IsValid() || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() {
			return &ConfigError{Field: "Nodes", Reason: fmt.Sprintf("%v is no address of a device", a)}
		}
	}
	for _, p := range c.Peers {
		if !p.IsValid() || p.Addr().Is4In6() {
			return &ConfigError{Field: "Peers", Reason: fmt.Sprintf("%v is no network", p)}
		}
	}
	for _, name := range c.Interfaces {
		if name == "" || len(name) >= unix.IFNAMSIZ {
			return &ConfigError{Field: "Interfaces", Reason: fmt.Sprintf("%q is no name of a network interface", name)}
		}
	}
	return nil
}

// WireReason is why a RoCE packet was dropped.
type WireReason uint8

// Reasons.
const (
	WireUnknownSource  WireReason = iota // the source is no device of the cluster and no configured peer
	WireWrongInterface                   // the source is known, but the packet came by a wrong interface, a pod's for example
	WireOwnAddress                       // the source is an address of this node, but the packet came from outside
	WireMalformed                        // the packet is shorter than any RoCE packet
	WireForwarded                        // a pod, or a host outside, sent it to another node's device
	WireLocalUser                        // a local process sent it that is not the agent
	numWireReasons
)

// String is the name of the counter, too.
func (r WireReason) String() string {
	switch r {
	case WireUnknownSource:
		return "unknown-source"
	case WireWrongInterface:
		return "wrong-interface"
	case WireOwnAddress:
		return "own-address"
	case WireMalformed:
		return "malformed"
	case WireForwarded:
		return "forwarded"
	case WireLocalUser:
		return "local-user"
	case numWireReasons:
	}
	return fmt.Sprintf("reason %d", uint8(r))
}

// WireReasons are all reasons.
func WireReasons() []WireReason {
	out := make([]WireReason, numWireReasons)
	for i := range out {
		out[i] = WireReason(i)
	}
	return out
}

// WireDrops counts packets that were dropped, by [WireReason].
type WireDrops [numWireReasons]uint64

// Names that an administrator sees in "nft list ruleset".
const (
	wireTableName = "kube-smcr-wire"

	setOwn        = "own"
	setNodes      = "nodes"
	setPeers      = "peers"
	setInterfaces = "interfaces"

	chainPrerouting = "prerouting"
	chainUntracked  = "untracked"
	chainInput      = "input"
	chainToOwn      = "to-own"
	chainFrom       = "from" // and 4 or 6
	chainFromOwn    = "from-own"
	chainByRoute    = "by-route"
	chainByName     = "by-name"
	chainWhole      = "whole"
	chainForward    = "forward"
	chainTransit    = "transit"
	chainThrough    = "through" // and 4 or 6
	chainOutput     = "output"
	chainOutgoing   = "outgoing"
	chainLocal      = "local"
	chainLocalUser  = "local-user"
)

const (
	rocePort = 4791
	// minRoCE is the length of UDP header, BTH and ICRC, which every RoCEv2
	// packet has.
	minRoCE = 8 + 12 + 4
)

// wireRules is the table of a WireConfig as values.
type wireRules struct {
	sets   []wireSet
	chains []wireChain
}

type wireSet struct {
	set   nftables.Set
	elems []nftables.SetElement
}

type wireChain struct {
	chain nftables.Chain
	rules [][]expr.Any
}

// renderWire makes the table:
//
//	prerouting, raw   packets to an own device are not tracked, so that a flood does
//	                  not fill the table of connection tracking, and a hostPort of a
//	                  pod does not get the packets
//	input             packets to an own device are accepted from a node or peer, by the
//	                  right interface and of full length, or from an own address over
//	                  loopback
//	forward           packets to a node's or peer's device are accepted by the same
//	                  test; others are of pods
//	output, raw       packets to any of the devices are not tracked
//	output            packets to any of the devices are accepted from the agent's user
//	                  and from the kernel
//
// All that grows with the configuration is in sets. A good packet costs three lookups in
// input: by its destination, source and interface. What drops comes after everything that
// rewrites destinations and ports, so that a Service or hostPort cannot get around the
// table. routes says that the kernel can look up the route back to a source.
func renderWire(cfg WireConfig, routes bool) wireRules {
	var w wireRules
	own, nodes, peers := w.addresses(setOwn, maxWireOwn, cfg.Own), w.addresses(setNodes, maxWireNodes, without(cfg.Nodes, cfg.Own)), w.networks(setPeers, cfg.Peers)
	interfaces := w.interfaces(cfg.Interfaces)
	families := []bool{true, false}

	base := func(name string, hook *nftables.ChainHook, priority nftables.ChainPriority, next string, only ...expr.Any) {
		w.chain(nftables.Chain{Name: name, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: &priority},
			rule(roce(), only, goToName(next)))
	}
	early := *nftables.ChainPriorityRaw
	before := *nftables.ChainPriorityFilter - 10 // a firewall's accept or drop comes later

	w.chain(nftables.Chain{Name: chainWhole}, rule(shorter(minRoCE), drop(WireMalformed)))
	w.chain(nftables.Chain{Name: chainByName},
		rule(loadInterface(), lookup(regA, interfaces, false), goToName(chainWhole)),
		rule(drop(WireWrongInterface)))
	byRoute := [][]expr.Any{
		rule(loadInterface(), lookup(regA, interfaces, false), goToName(chainWhole)),
		rule(fromLinkLocal(), drop(WireWrongInterface)), // there is a route to these on every interface
	}
	if routes {
		byRoute = append(byRoute, rule(routeBack(), goToName(chainWhole)))
	}
	w.chain(nftables.Chain{Name: chainByRoute}, append(byRoute, rule(drop(WireWrongInterface)))...)
	w.chain(nftables.Chain{Name: chainFromOwn}, rule(overLoopback(), goToName(chainWhole)), rule(drop(WireOwnAddress)))

	var untracked, toOwn, transit, outgoing, localUser [][]expr.Any
	for i, is4 := range families {
		from, through := ofFamily(chainFrom, is4), ofFamily(chainThrough, is4)
		source := func(s *nftables.Set, next string) []expr.Any {
			return rule(loadAddress(is4, true), lookup(regA, s, false), goToName(next))
		}
		sources := func(chain string, stranger WireReason) {
			w.chain(nftables.Chain{Name: chain},
				source(nodes[i], chainByRoute), source(own[i], chainFromOwn), source(peers[i], chainByName), rule(drop(stranger)))
		}
		sources(from, WireUnknownSource)
		sources(through, WireForwarded)

		to := func(s *nftables.Set, then []expr.Any) []expr.Any {
			return rule(family(is4), loadAddress(is4, false), lookup(regA, s, false), then)
		}
		notrack := []expr.Any{&expr.Notrack{}}
		untracked = append(untracked, to(own[i], notrack))
		toOwn = append(toOwn, to(own[i], goToName(from)))
		for _, s := range []*nftables.Set{nodes[i], peers[i]} {
			transit = append(transit, to(s, goToName(through)))
		}
		for _, s := range []*nftables.Set{nodes[i], peers[i], own[i]} {
			outgoing = append(outgoing, to(s, notrack))
			localUser = append(localUser, to(s, drop(WireLocalUser)))
		}
	}
	w.chain(nftables.Chain{Name: chainUntracked}, untracked...)
	w.chain(nftables.Chain{Name: chainToOwn}, toOwn...)
	w.chain(nftables.Chain{Name: chainTransit}, transit...)
	w.chain(nftables.Chain{Name: chainOutgoing}, outgoing...)
	w.chain(nftables.Chain{Name: chainLocalUser}, localUser...)

	base(chainPrerouting, nftables.ChainHookPrerouting, early, chainUntracked)
	base(chainInput, nftables.ChainHookInput, before, chainToOwn)
	base(chainForward, nftables.ChainHookForward, before, chainTransit)
	base(chainOutput, nftables.ChainHookOutput, early, chainOutgoing)
	base(chainLocal, nftables.ChainHookOutput, before, chainLocalUser, notUser(cfg.UID)...)
	return w
}

func ofFamily(name string, is4 bool) string {
	if is4 {
		return name + "4"
	}
	return name + "6"
}

func (w *wireRules) add(s nftables.Set, elems []nftables.SetElement) *nftables.Set {
	s.ID = uint32(len(w.sets) + 1)
	w.sets = append(w.sets, wireSet{s, elems})
	return &s
}

func (w *wireRules) chain(c nftables.Chain, rules ...[]expr.Any) {
	w.chains = append(w.chains, wireChain{c, rules})
}

// addresses are the two sets of a list of no more than most: IPv4, IPv6.
func (w *wireRules) addresses(name string, most uint32, all []netip.Addr) (out [2]*nftables.Set) {
	for i, is4 := range []bool{true, false} {
		var elems []nftables.SetElement
		for _, a := range sorted(all) {
			if a.Is4() == is4 {
				elems = append(elems, nftables.SetElement{Key: a.AsSlice()})
			}
		}
		// The kernel takes a quicker kind of set if it knows the size, which stays when the set is changed in place. Until the end
		// of that transaction the old elements need room, too.
		out[i] = w.add(nftables.Set{Name: ofFamily(name, is4), KeyType: addressType(is4), Size: 2 * most}, elems)
	}
	return out
}

// networks are the two interval sets of a list of networks.
func (w *wireRules) networks(name string, all []netip.Prefix) (out [2]*nftables.Set) {
	for i, is4 := range []bool{true, false} {
		var elems []nftables.SetElement
		for _, r := range mergePrefixes(all, is4) {
			elems = append(elems, nftables.SetElement{Key: r.first.AsSlice()})
			if end := r.last.Next(); end.IsValid() {
				elems = append(elems, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
			}
		}
		out[i] = w.add(nftables.Set{Name: ofFamily(name, is4), KeyType: addressType(is4), Interval: true}, elems)
	}
	return out
}

func (w *wireRules) interfaces(names []string) *nftables.Set {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	elems := make([]nftables.SetElement, len(names))
	for i, n := range names {
		elems[i].Key = ifname(n)
	}
	return w.add(nftables.Set{Name: setInterfaces, KeyType: nftables.TypeIFName, KeyByteOrder: binaryutil.NativeEndian}, elems)
}

func addressType(is4 bool) nftables.SetDatatype {
	if is4 {
		return nftables.TypeIPAddr
	}
	return nftables.TypeIP6Addr
}

// sorted returns the addresses in order, each once.
func sorted(all []netip.Addr) []netip.Addr {
	out := slices.Clone(all)
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// without returns the addresses that are not among some others.
func without(all, others []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return slices.Contains(others, a) })
}

// mergePrefixes returns the networks of a family as ranges that neither overlap nor
// touch.
func mergePrefixes(all []netip.Prefix, is4 bool) []addrRange {
	var out []addrRange
	for _, p := range all {
		if p.Addr().Is4() == is4 {
			out = append(out, prefixRange(p))
		}
	}
	return mergeRanges(out)
}

// The following functions return pieces of rules, which their comments have in nft's syntax.

func rule(parts ...[]expr.Any) []expr.Any { return slices.Concat(parts...) }

// roce is "udp dport 4791".
func roce() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regA},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: regA, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: be16(rocePort)},
	}
}

// shorter is "udp length < n".
func shorter(n uint16) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: regA, Base: expr.PayloadBaseTransportHeader, Offset: 4, Len: 2},
		&expr.Cmp{Op: expr.CmpOpLt, Register: regA, Data: be16(n)},
	}
}

// loadAddress is "ip saddr" or daddr, or of ip6.
func loadAddress(is4, source bool) []expr.Any {
	p := expr.Payload{DestRegister: regA, Base: expr.PayloadBaseNetworkHeader, Offset: 24, Len: 16}
	switch {
	case is4 && source:
		p.Offset, p.Len = 12, 4
	case is4:
		p.Offset, p.Len = 16, 4
	case source:
		p.Offset = 8
	}
	return []expr.Any{&p}
}

// fromLinkLocal is "ip6 saddr fe80::/10".
func fromLinkLocal() []expr.Any {
	return append(append(family(false), loadAddress(false, true)...),
		&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 16, Mask: append([]byte{0xff, 0xc0}, make([]byte, 14)...), Xor: make([]byte, 16)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: append([]byte{0xfe, 0x80}, make([]byte, 14)...)})
}

func loadInterface() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regA}}
}

// overLoopback is "iifname lo".
func overLoopback() []expr.Any {
	return append(loadInterface(), &expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: ifname("lo")})
}

// routeBack is "fib saddr . iif oif exists": the route back to the source leaves by the
// interface that the packet came by.
func routeBack() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: regA, FlagSADDR: true, FlagIIF: true, ResultOIF: true, FlagPRESENT: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{1}},
	}
}

// notUser is "meta skuid != uid". It does not match packets that the kernel itself sends,
// as rxe does: they have no user.
func notUser(uid uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeySKUID, Register: regA},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: regA, Data: nativeU32(uid)},
	}
}

// drop is "counter name drop".
func drop(why WireReason) []expr.Any {
	return []expr.Any{
		&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: why.String()},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}
}

func goToName(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}
