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
	setMust4   = "must4"
	setMust6   = "must6"
	setPorts   = "ports"
	setExcept4 = "except4"
	setExcept6 = "except6"
	setAlways  = "always"
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
	chainRenew      = "renew"
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

// ruleset builds the messages of one transaction. It numbers the sets itself, because the
// library's counter is shared by all connections without a lock. The numbers only need to
// differ within one transaction.
type ruleset struct {
	conn   *nftConn
	table  *nftables.Table
	nextID uint32
	rules  []*nftables.Rule
	err    error
	// inPlace says that a set may be there already, and is to have the new elements only.
	inPlace bool
}

func kubeTable() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: tableName}
}

func newRuleset(conn *nftConn) *ruleset { return &ruleset{conn: conn, table: kubeTable()} }

// Sets that are changed on their own, outside a replacement of the table.
// Concatenated types are padded to four bytes each. A set that rules put elements into has a size: here one
// element, and room for those that have expired, or were deleted in the same transaction, and are still to be collected.
func aliveSet(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: setAlive, KeyType: nftables.TypeInetProto, HasTimeout: true, Dynamic: true, Size: 64}
}

// caughtSet has room for the element that has expired and is still to be collected, besides the one.
func caughtSet(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: setCaught, KeyType: nftables.TypeInetProto, HasTimeout: true, Dynamic: true, Size: 2}
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

// bypassSet is the negative cache of an address family. It has room for elements that
// have expired and that the kernel has not collected yet.
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

// aliveElement is the element that the agent renews: the protocol number of TCP, so that
// one lookup by a packet's protocol tests that it is TCP and that the agent is alive.
func aliveElement(ttl time.Duration) []nftables.SetElement {
	return []nftables.SetElement{{Key: []byte{unix.IPPROTO_TCP}, Timeout: ttl}}
}

func (r *ruleset) set(s *nftables.Set, elems []nftables.SetElement) *nftables.Set {
	r.nextID++
	s.ID = r.nextID
	r.put(s, elems)
	return s
}

// keep adds a set, and leaves what is in it if it is there already.
func (r *ruleset) keep(s *nftables.Set) *nftables.Set {
	r.nextID++
	s.ID = r.nextID
	if err := r.conn.AddSet(s, nil); err != nil && r.err == nil {
		r.err = fmt.Errorf("encode set %s: %w", s.Name, err)
	}
	return s
}

// put adds a set that has its number.
func (r *ruleset) put(s *nftables.Set, elems []nftables.SetElement) {
	err := r.conn.AddSet(s, nil)
	if r.inPlace {
		r.conn.FlushSet(s)
	}
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

// rule collects a rule. Rules come last in the transaction, after all chains and sets.
// Their number does not depend on the policy: what grows with it is in sets.
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

// beginTable begins a table: in place, with the chains and sets that are there, or as a new one.
func (r *ruleset) beginTable(inPlace bool) {
	if r.inPlace = inPlace; !inPlace {
		r.dropTable()
	}
	r.conn.AddTable(r.table)
	if inPlace {
		r.conn.FlushTable(r.table) // the rules only
	}
}

// content is what a table depends on besides its configuration.
type content struct {
	bypass map[netip.AddrPort]time.Duration
	caught time.Duration // how long the element in "caught" still lasts; 0: there is none
	found  map[sysctl]uint32
	// looseOff says that the kernel does not track TCP connections from their middle.
	looseOff bool
	// silent says that chains doors and answer drop connections, because the kernel cannot
	// refuse them.
	silent bool
	// noRoutes says that the kernel cannot look up whether an address is one of the namespace's own.
	noRoutes bool
	// inPlace keeps the chains and sets that are there, and changes what is in them.
	inPlace bool
}

// build puts the whole table for cfg into the transaction.
func (r *ruleset) build(cfg RedirectConfig, c content) {
	r.beginTable(c.inPlace)
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
		s.to[i] = r.destinations(destinationSet(r.table, is4), "Outbound", cfg.Outbound, is4)
		s.skip[i] = r.set(bypassSet(r.table, is4), bypassElements(c.bypass, is4))
		if cfg.WhenCaught == CaughtDrop {
			must := destinationSet(r.table, is4)
			must.Name = [...]string{setMust4, setMust6}[i]
			s.must[i] = r.destinations(must, "Required", cfg.Required, is4)
		}
	}
	if !cfg.InboundAll {
		s.ports = r.set(portSet(r.table, setPorts, cfg.Inbound))
	}
	if len(cfg.InboundExcept) > 0 {
		for i, is4 := range bothFamilies {
			s.except[i] = r.set(exceptSet(r.table, cfg.InboundExcept, is4))
		}
		s.always = r.set(portSet(r.table, setAlways, cfg.InboundAlways))
	}
	if cfg.Hold != nil {
		r.hold(cfg, &s, c.silent)
	} else {
		r.outbound(cfg, &s, c.silent)
	}
	r.inbound(cfg, &s, c.noRoutes)
	r.doors(cfg, c.silent)
	r.caught(&s)
	r.renew(cfg, &s)
	if cfg.Untracked {
		r.untracked(&s, c.looseOff)
	}
}

// sets are those that the rules look into.
type sets struct {
	alive, marks, caught *nftables.Set
	to, skip, must       [2]*nftables.Set // IPv4, IPv6
	ports                *nftables.Set    // nil: all
	except               [2]*nftables.Set // clients whose SYNs are not diverted; nil: none
	always               *nftables.Set    // ports to which their SYNs are diverted all the same
}

var bothFamilies = [...]bool{true, false} // is it IPv4?

// notOurs is "meta mark != @marks": the packet is not of one of the agent's sockets.
func (s *sets) notOurs() []expr.Any {
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: regA}}, lookup(regA, s.marks, true)...)
}

// outbound matches new packets of applications to other machines.
func (s *sets) outbound(cfg RedirectConfig) [][]expr.Any {
	match := [][]expr.Any{tcpIn(s.alive), s.notOurs(), metaNot(expr.MetaKeyOIFNAME, ifname("lo"))}
	if cfg.WhenCaught == CaughtDirect {
		match = append(match, tcpNotIn(s.caught))
	}
	return match
}

// selected matches destinations that are selected and not in the negative cache.
func (s *sets) selected(i int, is4 bool) []expr.Any {
	return slices.Concat(loadDestination(is4), lookup(reg32Base, s.skip[i], true), lookup(reg32Base, s.to[i], false))
}

func outboundChain() nftables.Chain {
	return nftables.Chain{
		Name: chainOutbound, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityNATDest,
	}
}

// outbound diverts the application's connections to selected destinations to the agent's
// listener. Only a SYN is diverted: connection tracking may see a connection that exists for the first time,
// because the table is new, and another packet of it would meet a listener that resets it. A family without a listener is
// refused, or with silent dropped, and so is a SYN to a required destination that is not tracked, and so not diverted.
func (r *ruleset) outbound(cfg RedirectConfig, s *sets, silent bool) {
	to := r.chain(nftables.Chain{Name: chainOutboundTo})
	out := r.chain(outboundChain())
	r.rule(out, append(s.outbound(cfg), synOnly(), goTo(to))...)
	r.whenCaught(to, cfg, s)
	var refuse expr.Any = &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}
	if silent {
		refuse = &expr.Verdict{Kind: expr.VerdictDrop}
	}
	for i, is4 := range bothFamilies {
		if !is4 && cfg.IPv4Only {
			r.rule(to, s.selected(i, is4), []expr.Any{&expr.Counter{}, refuse})
			continue
		}
		r.rule(to, s.selected(i, is4), []expr.Any{
			&expr.Counter{},
			&expr.Immediate{Register: regA, Data: be16(cfg.OutboundPort)},
			&expr.Redir{RegisterProtoMin: regA},
		})
	}
	must := required(cfg, s)
	if must == [2]*nftables.Set{} {
		return
	}
	answer := r.chain(answerChain())
	for i, is4 := range bothFamilies {
		match := append(s.outbound(cfg), synOnly(), notTracked(), s.selected(i, is4), lookup(reg32Base, must[i], false))
		r.rule(answer, append(match, []expr.Any{&expr.Counter{}, refuse})...)
	}
}

// whenCaught drops SYNs to required destinations while another program redirects connections,
// with CaughtDrop.
func (r *ruleset) whenCaught(to *nftables.Chain, cfg RedirectConfig, s *sets) {
	if cfg.WhenCaught != CaughtDrop {
		return
	}
	for i, is4 := range bothFamilies { // tcpIn loads a register of the destination's
		r.rule(to, tcpIn(s.caught), s.selected(i, is4), lookup(reg32Base, s.must[i], false), counted(expr.VerdictDrop))
	}
	r.rule(to, tcpIn(s.caught), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}})
}

// inbound hands SYNs with the option to the agent's transparent listener, if they end here: the
// kernel drops what has a socket and is to be forwarded, and a program that listens on the wildcard
// address is a socket for each address. Where noRoutes says that the kernel cannot tell, it is taken
// for granted. Excepted are SYNs to the listener's own port: a program of the pod may listen on the same port of another
// address. So a connection to that port was never diverted. A client at a link-local IPv6
// address goes to the application, to which the agent could not connect under that
// address, see DialFrom.
func (r *ruleset) inbound(cfg RedirectConfig, s *sets, noRoutes bool) {
	to := r.chain(nftables.Chain{Name: chainInboundTo})
	in := r.chain(nftables.Chain{
		Name: chainInbound, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})
	match := [][]expr.Any{
		tcpIn(s.alive), tcpNotIn(s.caught), s.notOurs(), metaNot(expr.MetaKeyIIFNAME, ifname("lo")), synOnly(), smcOption(), hasSocket(),
	}
	if !noRoutes {
		match = append(match, toOwn())
	}
	match = append(match, loadPort(regA), []expr.Any{&expr.Cmp{Op: expr.CmpOpNeq, Register: regA, Data: be16(cfg.InboundPort)}})
	if s.ports != nil {
		match = append(match, lookup(regA, s.ports, false))
	}
	r.rule(in, append(match, goTo(to))...)
	r.rule(to, fromLinkLocal(), counted(expr.VerdictReturn))
	for i, is4 := range bothFamilies {
		if !is4 && cfg.IPv4Only {
			continue
		}
		if s.except[i] != nil {
			r.rule(to, loadSource(is4), lookup(reg32Base, s.except[i], false), loadPort(regA), lookup(regA, s.always, true), counted(expr.VerdictReturn))
		}
		r.rule(to, family(is4), tproxy(is4, cfg.InboundPort))
	}
}

// doors refuses connections to the agent's listeners that were not diverted, as a port
// does on which nobody listens. They are told apart by their destination: that of a
// diverted outbound connection was changed, and that of a diverted inbound connection is
// not the listener's address. With silent, their SYNs are dropped instead, and the
// program that connects waits.
func (r *ruleset) doors(cfg RedirectConfig, silent bool) {
	var refuse expr.Any = &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}
	if silent {
		refuse = &expr.Verdict{Kind: expr.VerdictDrop}
	}
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
					&expr.Counter{}, refuse,
				})
		}
	}
}

// caught notices another program's redirector before a redirected connection can come
// back to the agent. It looks for a connection of the agent whose destination was changed,
// and for a connection to the agent's listener that was redirected. From then on nothing
// is diverted for caughtTTL. The SYN of the second kind is dropped; when it is repeated, it
// goes where it would go without us.
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

// untracked excludes packets from connection tracking that can never be diverted: all that
// are not TCP, and with tcp also those of TCP connections that no set selects. For these
// it is enough to exclude the SYN: the packets after it belong to no tracked connection,
// and do not start one, see looseTracking.
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

// destinations adds a set of destinations of one family; field names the rules.
func (r *ruleset) destinations(s *nftables.Set, field string, rules []OutboundRule, is4 bool) *nftables.Set {
	blocks := compile(rules, is4)
	if len(blocks) > maxOutboundElements && r.err == nil {
		r.err = &ConfigError{
			Field:  field,
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
	s.Interval = true
	return r.set(s, elems)
}

// portSet is the interval set of ranges. A range is two elements: its first port, and an
// end mark at the port behind its last one, which a range up to 65535 does not have.
func portSet(t *nftables.Table, name string, ranges []PortRange) (*nftables.Set, []nftables.SetElement) {
	var elems []nftables.SetElement
	for _, p := range mergePorts(ranges) {
		elems = append(elems, nftables.SetElement{Key: be16(p.First)})
		if p.Last < 1<<16-1 {
			elems = append(elems, nftables.SetElement{Key: be16(p.Last + 1), IntervalEnd: true})
		}
	}
	return &nftables.Set{Table: t, Name: name, KeyType: nftables.TypeInetService, Interval: true}, elems
}

// exceptSet is the set of the addresses that are of one family.
func exceptSet(t *nftables.Table, addrs []netip.Addr, is4 bool) (*nftables.Set, []nftables.SetElement) {
	s := &nftables.Set{Table: t, Name: setExcept6, KeyType: nftables.TypeIP6Addr}
	if is4 {
		s.Name, s.KeyType = setExcept4, nftables.TypeIPAddr
	}
	var elems []nftables.SetElement
	for _, a := range addrs {
		if a.Is4() == is4 {
			elems = append(elems, nftables.SetElement{Key: a.AsSlice()})
		}
	}
	return s, elems
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

// The following functions return pieces of rules, which their comments have in nft's syntax.

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

// destinationChanged is "ct status dnat". The rule does not match a packet that is not
// tracked.
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

// loadSource is "ip saddr", or ip6, into reg32Base.
func loadSource(is4 bool) []expr.Any {
	offset, size := uint32(8), uint32(16)
	if is4 {
		offset, size = 12, 4
	}
	return append(family(is4), &expr.Payload{DestRegister: reg32Base, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size})
}

func lookup(reg uint32, s *nftables.Set, invert bool) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: reg, SetName: s.Name, SetID: s.ID, Invert: invert}}
}

func goTo(c *nftables.Chain) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: c.Name}}
}

// synOnly is "tcp flags & (syn|ack) == syn".
func synOnly() []expr.Any {
	return tcpFlags(tcpSYN)
}

// Flags of a TCP header.
const (
	tcpSYN = 0x02
	tcpACK = 0x10
)

// tcpFlags is "tcp flags & (syn|ack) == flags".
func tcpFlags(flags byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: regA, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 1, Mask: []byte{tcpSYN | tcpACK}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{flags}},
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

// hasSocket matches if there is a socket for the packet: a rule that loads a property of
// the socket does not match if there is none. A SYN to a port on which nobody listens must
// be refused by the kernel, and not accepted by the agent.
func hasSocket() []expr.Any {
	return []expr.Any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: regA}}
}

// toOwn is "fib daddr type local".
func toOwn() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: regA, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: nativeU32(unix.RTN_LOCAL)},
	}
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

// noTable makes ErrNoTable of the kernel's error for a missing table.
func noTable(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return errors.Join(ErrNoTable, err)
	}
	return err
}
