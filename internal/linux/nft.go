// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
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

	chainOutbound   = "outbound"
	chainOutboundTo = "outbound-to"
	chainInbound    = "inbound"
	chainInboundTo  = "inbound-to"
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

func bypassSet(t *nftables.Table, is4 bool) *nftables.Set {
	s := destinationSet(t, is4)
	s.Name, s.HasTimeout, s.Size = setBypass6, true, maxBypass
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

// rule collects a rule; rules come last, when their chains and sets are there.
// Whatever grows with the policy is in sets.
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

// build puts the whole table for cfg into the transaction.
func (r *ruleset) build(cfg RedirectConfig, bypass map[netip.AddrPort]time.Duration) {
	r.dropTable()
	r.conn.AddTable(r.table)

	alive := r.set(aliveSet(r.table), aliveElement(cfg.ttl()))
	var to, skip [2]*nftables.Set // IPv4, IPv6
	for i, is4 := range []bool{true, false} {
		to[i], skip[i] = r.destinations(cfg, is4), r.set(bypassSet(r.table, is4), bypassElements(bypass, is4))
	}
	var ports *nftables.Set
	if !cfg.InboundAll {
		ports = r.set(portSet(r.table, cfg.Inbound))
	}

	outTo := r.chain(nftables.Chain{Name: chainOutboundTo})
	out := r.chain(nftables.Chain{
		Name: chainOutbound, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityNATDest,
	})
	inTo := r.chain(nftables.Chain{Name: chainInboundTo})
	in := r.chain(nftables.Chain{
		Name: chainInbound, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})

	notLoopback := func(key expr.MetaKey) []expr.Any { return metaNot(key, ifname("lo")) }
	ours := append(metaNot(expr.MetaKeyMARK, nativeU32(cfg.Mark)), metaNot(expr.MetaKeyMARK, nativeU32(cfg.AppMark))...)
	if cfg.PlainMark != 0 {
		ours = append(ours, metaNot(expr.MetaKeyMARK, nativeU32(cfg.PlainMark))...)
	}

	r.rule(out, tcpIn(alive), ours, notLoopback(expr.MetaKeyOIFNAME), goTo(outTo))
	for i, is4 := range []bool{true, false} {
		r.rule(outTo, loadDestination(is4), lookup(reg32Base, skip[i], true), lookup(reg32Base, to[i], false),
			[]expr.Any{
				&expr.Counter{},
				&expr.Immediate{Register: regA, Data: be16(cfg.OutboundPort)},
				&expr.Redir{RegisterProtoMin: regA},
			})
	}

	match := [][]expr.Any{tcpIn(alive), ours, notLoopback(expr.MetaKeyIIFNAME), synOnly(), smcOption(), hasSocket()}
	if ports != nil {
		match = append(match, loadPort(regA), lookup(regA, ports, false))
	}
	r.rule(in, append(match, goTo(inTo))...)
	for _, is4 := range []bool{true, false} {
		r.rule(inTo, family(is4), tproxy(is4, cfg.InboundPort))
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

// metaNot is "meta key != value".
func metaNot(key expr.MetaKey, value []byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: regA},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: regA, Data: value},
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
	loopback := netip.IPv6Loopback()
	if is4 {
		loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return []expr.Any{
		&expr.Counter{},
		&expr.Immediate{Register: regA, Data: loopback.AsSlice()},
		&expr.Immediate{Register: regB, Data: be16(port)},
		&expr.TProxy{Family: nfproto(is4), TableFamily: unix.NFPROTO_INET, RegAddr: regA, RegPort: regB},
	}
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
		conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(growBuffers, silenceEchoes))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open nftables in %s: %w", ns, err)
	}
	return conn, nil
}

func growBuffers(c *netlink.Conn) error {
	return errors.Join(c.SetReadBuffer(netlinkBufferBytes), c.SetWriteBuffer(netlinkBufferBytes))
}

// silenceEchoes keeps the kernel's echoes of rules from the socket. The library
// asks for them and expects at most one datagram of echoes per transaction; of
// more than some ten rules there are several.
func silenceEchoes(c *netlink.Conn) error {
	const newRule = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWRULE
	prog := []unix.SockFilter{
		// The type of the message, which is in the machine's order, is loaded in
		// network order.
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 4},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(binary.BigEndian.Uint16(binaryutil.NativeEndian.PutUint16(newRule))), Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: math.MaxUint32},
	}
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := rc.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]})
	})
	return errors.Join(cerr, err)
}

// noTable turns the kernel's answer for a missing table into ErrNoTable.
func noTable(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return errors.Join(ErrNoTable, err)
	}
	return err
}
