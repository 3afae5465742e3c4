// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Names that an administrator sees in "nft list ruleset".
const (
	tableName = "kube-smcr"

	setAlive   = "alive"
	setBypass4 = "bypass4"
	setBypass6 = "bypass6"
	setTo4     = "to4"
	setTo6     = "to6"
	setPorts   = "ports"
	setMarks   = "marks"
	setCaught  = "caught"
	setFound   = "found"

	chainOutbound   = "outbound"
	chainOutboundTo = "outbound-to"
	chainInbound    = "inbound"
	chainInboundTo  = "inbound-to"
	chainDoors      = "doors"
	chainDoorsTo    = "doors-to"
	chainCaughtOut  = "caught-out"
	chainCaughtIn   = "caught-in"
	chainPlainOut   = "untracked-out"
	chainPlainIn    = "untracked-in"
)

// RFC 7609 appendix A.1: an experimental TCP option of six bytes, the kind, the
// length and an identifier of four bytes.
const (
	smcOptionKind = 254
	smcOptionID   = 0xE2D4C3D9
)

// Registers. A concatenation lies in consecutive 32-bit registers, which share
// their space with the 128-bit ones: reg32(0) is the start of register 1.
const (
	regA      = unix.NFT_REG_1
	regB      = unix.NFT_REG_2
	reg32Base = unix.NFT_REG32_00
)

// ruleset builds the messages of one transaction. The library numbers sets by
// a counter that all its connections share without a lock, so the numbers are
// given here; they only need to differ within one transaction.
type ruleset struct {
	conn   *nftables.Conn
	table  *nftables.Table
	nextID uint32
	rules  []*nftables.Rule
	err    error
}

func kubeTable() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: tableName}
}

func newRuleset(conn *nftables.Conn) *ruleset { return &ruleset{conn: conn, table: kubeTable()} }

// Sets that are changed on their own, outside a replacement of the table.
// Concatenated types are padded to four bytes each.
func aliveSet(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: setAlive, KeyType: nftables.TypeInetProto, HasTimeout: true}
}

func caughtSet(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: setCaught, KeyType: nftables.TypeInetProto, HasTimeout: true, Dynamic: true, Size: 1}
}

func marksSet(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: setMarks, KeyType: nftables.TypeMark}
}

// markElements are the marks of the agent's sockets.
func markElements(cfg RedirectConfig) []nftables.SetElement {
	elems := []nftables.SetElement{{Key: nativeU32(cfg.Mark)}, {Key: nativeU32(cfg.AppMark)}}
	if cfg.PlainMark != 0 {
		elems = append(elems, nftables.SetElement{Key: nativeU32(cfg.PlainMark)})
	}
	return elems
}

// bypassSet has room for elements that have expired and were not collected yet.
func bypassSet(t *nftables.Table, is4 bool) *nftables.Set {
	s := destinationSet(t, is4)
	s.Name, s.HasTimeout, s.Size = setBypass6, true, 2*maxBypass
	if is4 {
		s.Name = setBypass4
	}
	return s
}

func destinationSet(t *nftables.Table, is4 bool) *nftables.Set {
	s := &nftables.Set{Table: t, Name: setTo6, Concatenation: true}
	addr := nftables.TypeIP6Addr
	if is4 {
		s.Name, addr = setTo4, nftables.TypeIPAddr
	}
	s.KeyType = nftables.MustConcatSetType(addr, nftables.TypeInetService)
	return s
}

// destinationKey is the key of address and port in a concatenated set.
func destinationKey(a netip.Addr, port uint16) []byte {
	b := binary.BigEndian.AppendUint16(a.AsSlice(), port)
	return append(b, 0, 0)
}

// aliveElement is the heartbeat: the protocol number that every diverted
// packet has, so that one lookup tests both.
func aliveElement(ttl time.Duration) []nftables.SetElement {
	return []nftables.SetElement{{Key: []byte{unix.IPPROTO_TCP}, Timeout: ttl}}
}

func (r *ruleset) set(s *nftables.Set, elems []nftables.SetElement) *nftables.Set {
	r.nextID++
	s.ID = r.nextID
	r.put(s, elems)
	return s
}

// put adds a set that has its number.
func (r *ruleset) put(s *nftables.Set, elems []nftables.SetElement) {
	err := r.conn.AddSet(s, nil)
	for part := range slices.Chunk(elems, maxElementsPerMessage) {
		err = errors.Join(err, r.conn.SetAddElements(s, part))
	}
	if err != nil && r.err == nil {
		r.err = fmt.Errorf("encode set %s: %w", s.Name, err)
	}
}

func (r *ruleset) chain(c nftables.Chain) *nftables.Chain {
	c.Table = r.table
	return r.conn.AddChain(&c)
}

// rule collects a rule: they come last, when all chains and sets are there. They
// are few: whatever grows with the policy is in sets.
func (r *ruleset) rule(c *nftables.Chain, exprs ...[]expr.Any) {
	rule := &nftables.Rule{Table: r.table, Chain: c}
	for _, e := range exprs {
		rule.Exprs = append(rule.Exprs, e...)
	}
	r.rules = append(r.rules, rule)
}

// commit sends the transaction.
func (r *ruleset) commit() error {
	for _, rule := range r.rules {
		r.conn.AddRule(rule)
	}
	if r.err != nil {
		return r.err
	}
	return r.conn.Flush()
}

// dropTable removes the table whether it exists or not.
func (r *ruleset) dropTable() {
	r.conn.AddTable(r.table)
	r.conn.DelTable(r.table)
}

// content is what a table is made of besides its configuration.
type content struct {
	bypass map[netip.AddrPort]time.Duration
	caught time.Duration // how long a redirector still counts as seen; 0: none was
	found  map[sysctl]uint32
	// looseOff: connection tracking takes up no TCP connection in its middle.
	looseOff bool
}

// build puts the whole table for cfg into the transaction.
func (r *ruleset) build(cfg RedirectConfig, c content) {
	r.dropTable()
	r.conn.AddTable(r.table)
	r.set(foundSet(r.table), foundElements(c.found))

	s := sets{
		alive: r.set(aliveSet(r.table), aliveElement(cfg.ttl())),
		marks: r.set(marksSet(r.table), markElements(cfg)),
	}
	var caught []nftables.SetElement
	if c.caught > 0 {
		caught = aliveElement(c.caught)
	}
	s.caught = r.set(caughtSet(r.table), caught)
	for i, is4 := range bothFamilies {
		s.to[i], s.skip[i] = r.destinations(cfg, is4), r.set(bypassSet(r.table, is4), bypassElements(c.bypass, is4))
	}
	if !cfg.InboundAll {
		s.ports = r.set(portSet(r.table, cfg.Inbound))
	}
	r.outbound(cfg, &s)
	r.inbound(cfg, &s)
	r.doors(cfg)
	r.caught(&s)
	if cfg.Untracked {
		r.untracked(&s, c.looseOff)
	}
}

// sets are those that the rules look into.
type sets struct {
	alive, marks, caught *nftables.Set
	to, skip             [2]*nftables.Set // IPv4, IPv6
	ports                *nftables.Set    // nil: all
}

var bothFamilies = [...]bool{true, false} // is it IPv4?

// notOurs is "meta mark != @marks": not one of the agent's own sockets.
func (s *sets) notOurs() []expr.Any {
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: regA}}, lookup(regA, s.marks, true)...)
}

// outbound brings what the application sends to a selected destination to the
// agent's listener.
func (r *ruleset) outbound(cfg RedirectConfig, s *sets) {
	to := r.chain(nftables.Chain{Name: chainOutboundTo})
	out := r.chain(nftables.Chain{
		Name: chainOutbound, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityNATDest,
	})
	match := [][]expr.Any{tcpIn(s.alive), s.notOurs(), metaNot(expr.MetaKeyOIFNAME, ifname("lo"))}
	if cfg.WhenCaught == CaughtDirect {
		match = append(match, tcpNotIn(s.caught))
	}
	r.rule(out, append(match, goTo(to))...)
	for i, is4 := range bothFamilies {
		selected := append(append(loadDestination(is4), lookup(reg32Base, s.skip[i], true)...), lookup(reg32Base, s.to[i], false)...)
		if cfg.WhenCaught == CaughtDrop {
			r.rule(to, selected, tcpIn(s.caught), counted(expr.VerdictDrop))
		}
		r.rule(to, selected, []expr.Any{
			&expr.Counter{},
			&expr.Immediate{Register: regA, Data: be16(cfg.OutboundPort)},
			&expr.Redir{RegisterProtoMin: regA},
		})
	}
}

// inbound hands SYNs with the option to the agent's transparent listener. A
// program may listen on the port of the listener, on another address: its
// connections are never taken, so that a connection to that port is none of ours.
func (r *ruleset) inbound(cfg RedirectConfig, s *sets) {
	to := r.chain(nftables.Chain{Name: chainInboundTo})
	in := r.chain(nftables.Chain{
		Name: chainInbound, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})
	match := [][]expr.Any{
		tcpIn(s.alive), tcpNotIn(s.caught), s.notOurs(), metaNot(expr.MetaKeyIIFNAME, ifname("lo")), synOnly(), smcOption(), hasSocket(),
		loadPort(regA),
		{&expr.Cmp{Op: expr.CmpOpNeq, Register: regA, Data: be16(cfg.InboundPort)}},
	}
	if s.ports != nil {
		match = append(match, lookup(regA, s.ports, false))
	}
	r.rule(in, append(match, goTo(to))...)
	for _, is4 := range bothFamilies {
		r.rule(to, family(is4), tproxy(is4, cfg.InboundPort))
	}
}

// doors refuses connections to the agent's listeners that were not diverted:
// whoever makes them is told what a port says on which nobody listens. Diverted
// outbound ones have a changed destination, inbound ones keep that which they had.
func (r *ruleset) doors(cfg RedirectConfig) {
	to := r.chain(nftables.Chain{Name: chainDoorsTo})
	doors := r.chain(nftables.Chain{
		Name: chainDoors, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
	})
	r.rule(doors, metaIs(expr.MetaKeyIIFNAME, ifname("lo")), tcpHeader(), synOnly(), goTo(to))
	r.rule(to, loadPort(regA), []expr.Any{&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: be16(cfg.OutboundPort)}},
		destinationChanged(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}})
	for _, is4 := range bothFamilies {
		for _, port := range []uint16{cfg.OutboundPort, cfg.InboundPort} {
			r.rule(to, loadDestination(is4),
				[]expr.Any{&expr.Cmp{Op: expr.CmpOpEq, Register: reg32Base, Data: loopback(is4).AsSlice()}},
				loadPort(regA), []expr.Any{
					&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: be16(port)},
					&expr.Counter{}, &expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
				})
		}
	}
}

// caught notices somebody else's redirector in the act, before what it redirects
// can come round: an agent's connection whose destination was changed, or a
// connection for the agent's listener. From then on nothing is diverted for
// caughtTTL. The latter's SYN is dropped; its repetition goes where it would
// without us.
func (r *ruleset) caught(s *sets) {
	out := r.chain(nftables.Chain{
		Name: chainCaughtOut, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter,
	})
	in := r.chain(nftables.Chain{
		Name: chainCaughtIn, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(*nftables.ChainPriorityNATDest + 1),
	})
	note := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regA},
		&expr.Dynset{SrcRegKey: regA, SetName: s.caught.Name, SetID: s.caught.ID, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: caughtTTL},
	}
	tcp := tcpHeader()
	own := append([]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: regA}}, lookup(regA, s.marks, false)...)
	r.rule(out, own, tcp, synOnly(), destinationChanged(), note, counted(expr.VerdictReturn))
	r.rule(in, tcpNotIn(s.caught), metaNot(expr.MetaKeyIIFNAME, ifname("lo")), tcp, synOnly(), destinationChanged(),
		[]expr.Any{
			&expr.Socket{Key: expr.SocketKeyTransparent, Register: regA},
			&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{1}},
		}, note, counted(expr.VerdictDrop))
}

// untracked keeps from connection tracking, which the table loads, what can never
// be diverted: all but TCP, and with tcp also connections that no set selects.
// Their SYNs decide: what follows belongs to no connection that is known, and
// is not taken up in its middle, see looseTracking.
func (r *ruleset) untracked(s *sets, tcp bool) {
	out := r.chain(nftables.Chain{
		Name: chainPlainOut, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRaw,
	})
	in := r.chain(nftables.Chain{
		Name: chainPlainIn, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw,
	})
	notrack := []expr.Any{&expr.Notrack{}}
	for _, c := range []*nftables.Chain{out, in} {
		r.rule(c, metaNot(expr.MetaKeyL4PROTO, []byte{unix.IPPROTO_TCP}), notrack)
	}
	if !tcp {
		return
	}
	syn := append(tcpHeader(), synOnly()...)
	r.rule(in, syn, notrack)
	r.rule(out, metaIs(expr.MetaKeyOIFNAME, ifname("lo")), syn, notrack)
	for i, is4 := range bothFamilies {
		r.rule(out, syn, s.notOurs(), loadDestination(is4), lookup(reg32Base, s.to[i], true), notrack)
		r.rule(out, syn, s.notOurs(), loadDestination(is4), lookup(reg32Base, s.skip[i], false), notrack)
	}
}

// destinations adds the set of the selected destinations of one family.
func (r *ruleset) destinations(cfg RedirectConfig, is4 bool) *nftables.Set {
	blocks := compile(cfg.Outbound, is4)
	if len(blocks) > maxOutboundElements && r.err == nil {
		r.err = &ConfigError{
			Field:  "Outbound",
			Reason: fmt.Sprintf("needs %d set elements, at most %d are allowed: use fewer, wider rules", len(blocks), maxOutboundElements),
		}
	}
	elems := make([]nftables.SetElement, 0, len(blocks))
	for _, b := range blocks {
		elems = append(elems, nftables.SetElement{
			Key:    destinationKey(b.first, b.ports.First),
			KeyEnd: destinationKey(b.last, b.ports.Last),
		})
	}
	s := destinationSet(r.table, is4)
	s.Interval = true
	return r.set(s, elems)
}

// portSet is the interval set of ranges: each range is its first port and the
// end mark behind its last one, which the last range may lack.
func portSet(t *nftables.Table, ranges []PortRange) (*nftables.Set, []nftables.SetElement) {
	var elems []nftables.SetElement
	for _, p := range mergePorts(ranges) {
		elems = append(elems, nftables.SetElement{Key: be16(p.First)})
		if p.Last < 1<<16-1 {
			elems = append(elems, nftables.SetElement{Key: be16(p.Last + 1), IntervalEnd: true})
		}
	}
	return &nftables.Set{Table: t, Name: setPorts, KeyType: nftables.TypeInetService, Interval: true}, elems
}

func bypassElements(m map[netip.AddrPort]time.Duration, is4 bool) []nftables.SetElement {
	var elems []nftables.SetElement
	for dst, ttl := range m {
		if dst.Addr().Is4() == is4 {
			elems = append(elems, nftables.SetElement{Key: destinationKey(dst.Addr(), dst.Port()), Timeout: ttl})
		}
	}
	return elems
}

// What follows are the pieces of rules, in the words of nft.

// tcpIn is "meta l4proto @s".
func tcpIn(s *nftables.Set) []expr.Any {
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regA}}, lookup(regA, s, false)...)
}

// tcpNotIn is "meta l4proto != @s".
func tcpNotIn(s *nftables.Set) []expr.Any {
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regA}}, lookup(regA, s, true)...)
}

// metaNot is "meta key != value".
func metaNot(key expr.MetaKey, value []byte) []expr.Any { return metaCmp(key, expr.CmpOpNeq, value) }

// metaIs is "meta key == value".
func metaIs(key expr.MetaKey, value []byte) []expr.Any { return metaCmp(key, expr.CmpOpEq, value) }

func metaCmp(key expr.MetaKey, op expr.CmpOp, value []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: regA}, &expr.Cmp{Op: op, Register: regA, Data: value}}
}

// counted is "counter" with a verdict.
func counted(v expr.VerdictKind) []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: v}}
}

// destinationChanged is "ct status dnat". A packet that is not tracked ends the
// rule.
func destinationChanged() []expr.Any {
	const dnat = 1 << 5 // IPS_DST_NAT
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: regA},
		&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 4, Mask: nativeU32(dnat), Xor: nativeU32(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: regA, Data: nativeU32(0)},
	}
}

// family is "meta nfproto ipv4" or ipv6.
func family(is4 bool) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: regA},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{nfproto(is4)}},
	}
}

func nfproto(is4 bool) byte {
	if is4 {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

func loadPort(reg uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}}
}

// loadDestination is "ip daddr . tcp dport", or ip6, into reg32Base.
func loadDestination(is4 bool) []expr.Any {
	offset, size := uint32(24), uint32(16)
	if is4 {
		offset, size = 16, 4
	}
	return append(append(family(is4),
		&expr.Payload{DestRegister: reg32Base, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size}),
		loadPort(reg32Base+size/4)...)
}

func lookup(reg uint32, s *nftables.Set, invert bool) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: reg, SetName: s.Name, SetID: s.ID, Invert: invert}}
}

func goTo(c *nftables.Chain) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: c.Name}}
}

// synOnly is "tcp flags & (syn|ack) == syn".
func synOnly() []expr.Any {
	const syn, ack = 0x02, 0x10
	return []expr.Any{
		&expr.Payload{DestRegister: regA, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{syn}},
	}
}

// smcOption is "tcp option @254,16,32 0xe2d4c3d9". The kernel looks at the
// first option of the kind only.
func smcOption() []expr.Any {
	return []expr.Any{
		&expr.Exthdr{DestRegister: regA, Op: expr.ExthdrOpTcpopt, Type: smcOptionKind, Offset: 2, Len: 4},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: binary.BigEndian.AppendUint32(nil, smcOptionID)},
	}
}

// hasSocket matches if a socket waits for the packet: loading anything about it
// ends the rule if there is none. A SYN to a port that nobody listens on must
// reach the kernel's refusal and not the agent, who would accept it.
func hasSocket() []expr.Any {
	return []expr.Any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: regA}}
}

// tproxy is "counter tproxy to 127.0.0.1:port", or ::1. If nothing listens
// there, the packet goes on to the application.
func tproxy(is4 bool, port uint16) []expr.Any {
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: regA, Data: loopback(is4).AsSlice()},
		&expr.Immediate{Register: regB, Data: be16(port)},
		&expr.TProxy{Family: nfproto(is4), TableFamily: unix.NFPROTO_INET, RegAddr: regA, RegPort: regB},
	}
}

func loopback(is4 bool) netip.Addr {
	if is4 {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}

func be16(v uint16) []byte      { return binary.BigEndian.AppendUint16(nil, v) }
func nativeU32(v uint32) []byte { return binaryutil.NativeEndian.PutUint32(v) }

// ifname is an interface name as the kernel compares it: padded to IFNAMSIZ.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// openNFT opens a netlink socket in ns that stays open, so that a renewal is
// one exchange without entering the namespace.
func openNFT(ns *NetNS) (*nftables.Conn, error) {
	var conn *nftables.Conn
	err := ns.Do(func() (err error) {
		conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(prepareNFT))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open nftables in %s: %w", ns, err)
	}
	return conn, nil
}

// prepareNFT gives the socket room for whole transactions, and keeps the echoes
// of rules away from it. The library asks for them and counts on at most one
// datagram of them; the kernel packs as many as fit into one.
func prepareNFT(c *netlink.Conn) error {
	const typeOffset, newRule = 4, unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE
	filter, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: typeOffset, Size: 2},
		// The type is in the machine's byte order, and the filter reads the network's.
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, newRule))), SkipTrue: 1},
		bpf.RetConstant{Val: 1<<32 - 1},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return err
	}
	return errors.Join(c.SetReadBuffer(netlinkBufferBytes), c.SetWriteBuffer(netlinkBufferBytes), c.SetBPF(filter))
}

// noTable turns the kernel's answer for a missing table into ErrNoTable.
func noTable(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return errors.Join(ErrNoTable, err)
	}
	return err
}
