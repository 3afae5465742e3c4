// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// OptionFilterConfig says which connections of a pod may be on SMC-R when the pod's own
// kernel offers it: those that keep the SMC-R option on their SYN.
type OptionFilterConfig struct {
	// Peers are the other sides, with the ports of the service, whichever side that is on.
	Peers []OutboundRule
	// Never are addresses with which no connection keeps the option, whatever Peers says.
	Never []netip.Addr
}

// Validate says what cannot be used.
func (c *OptionFilterConfig) Validate() error {
	if len(c.Never) > maxFilterNever {
		return &ConfigError{Field: "Never", Reason: fmt.Sprintf("has %d addresses, at most %d are allowed", len(c.Never), maxFilterNever)}
	}
	for i, a := range c.Never {
		if !a.IsValid() || a.Is4In6() {
			return &ConfigError{Field: fmt.Sprintf("Never[%d]", i), Reason: fmt.Sprintf("%v is no address of one family", a)}
		}
	}
	return validOutbound("Peers", c.Peers)
}

// Allows tells whether a SYN between this side and peer keeps the option, where port is that of the
// service: what the table of [FilterOption] does.
func (c *OptionFilterConfig) Allows(peer netip.Addr, port uint16) bool {
	peer = peer.Unmap().WithZone("")
	if !peer.IsValid() || slices.Contains(c.Never, peer) || peer.Is6() && peer.IsLinkLocalUnicast() {
		return false
	}
	selected := false
	for _, r := range c.Peers {
		hit := len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(p PortRange) bool { return p.First <= port && port <= p.Last })
		switch {
		case !hit || !r.Prefix.Masked().Contains(peer):
		case r.Exclude:
			return false
		default:
			selected = true
		}
	}
	return selected
}

// Names that an administrator sees in "nft list ruleset".
const (
	optionTableName = "kube-smcr-option"

	setPeers4 = "peers4"
	setPeers6 = "peers6"
	setNever4 = "never4"
	setNever6 = "never6"

	chainSent     = "sent"
	chainReceived = "received"
	chainAnswered = "answered"
	chainErase    = "erase"
)

// optionTable is the table of a place. Those of cgroups are in one namespace, so each has its cgroup's ID.
func optionTable(g *Cgroup) *nftables.Table {
	name := optionTableName
	if g != nil {
		name = optionTableOf(g.id)
	}
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: name}
}

func optionTableOf(cgroup uint64) string { return fmt.Sprintf("%s-%d", optionTableName, cgroup) }

// FilterOption takes the SMC-R option from the handshakes of a place that cfg does not select, in both
// directions: these connections are TCP, as if the other side had no SMC-R. The first call makes
// the table inet kube-smcr-option, of a cgroup inet kube-smcr-option-ID, and later ones replace what is in it, as a whole. In
// place, since a base chain that is taken away takes with it what other programs hold in queues. It filters until
// [SweepOptionFilter], also without an agent. Connections that exist are not touched.
func FilterOption(at Place, cfg OptionFilterConfig) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("filter the SMC-R option of %s: %w", at, err)
	}
	put := func(inPlace bool) error {
		return commitOption(at, func(rs *ruleset) {
			rs.beginTable(inPlace)
			rs.addOptionFilter(cfg, at.Cgroup)
		})
	}
	err := put(true)
	if err != nil { // the table of another version may have other chains
		err = put(false)
	}
	if err != nil {
		if perr := probeOptionFilter(at.Cgroup); perr != nil {
			err = errors.Join(perr, err)
		}
		return fmt.Errorf("filter the SMC-R option of %s: %w", at, err)
	}
	return nil
}

// SweepOptionFilter removes the table of FilterOption. It is no error if there is none.
func SweepOptionFilter(at Place) error {
	if err := commitOption(at, (*ruleset).dropTable); err != nil {
		return fmt.Errorf("remove the filter of the SMC-R option of %s: %w", at, err)
	}
	return nil
}

// OptionFilters are the cgroups of which FilterOption made tables in a namespace, by their IDs, also of those that are gone.
func OptionFilters(ns *NetNS) (cgroups []uint64, err error) {
	tables, err := inetTables(ns)
	if err != nil {
		return nil, fmt.Errorf("list filters of the SMC-R option of %s: %w", ns, err)
	}
	for _, t := range tables {
		id, found := strings.CutPrefix(t.Name, optionTableName+"-")
		if n, err := strconv.ParseUint(id, 10, 64); found && err == nil && t.Name == optionTableOf(n) {
			cgroups = append(cgroups, n)
		}
	}
	return cgroups, nil
}

// OptionFiltered tells whether a place has the table of FilterOption.
func OptionFiltered(at Place) (bool, error) {
	tables, err := inetTables(at.NetNS)
	if err != nil {
		return false, fmt.Errorf("look for the filter of the SMC-R option of %s: %w", at, err)
	}
	name := optionTable(at.Cgroup).Name
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == name }), nil
}

// inetTables lists the tables of both families of a namespace.
func inetTables(ns *NetNS) ([]*nftables.Table, error) {
	conn, err := openNFT(ns)
	if err != nil {
		return nil, err
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	return tables, errors.Join(err, conn.CloseLasting())
}

// SweepOptionFilters removes the tables of some cgroups from a namespace, which may be gone. It is no error if there are none.
func SweepOptionFilters(ns *NetNS, cgroups ...uint64) error {
	conn, err := openNFT(ns)
	if err != nil {
		return fmt.Errorf("remove filters of the SMC-R option: %w", err)
	}
	for _, id := range cgroups {
		(&ruleset{conn: conn, table: &nftables.Table{Family: nftables.TableFamilyINet, Name: optionTableOf(id)}}).dropTable()
	}
	if err := errors.Join(conn.Flush(), conn.CloseLasting()); err != nil {
		return fmt.Errorf("remove filters of the SMC-R option from %s: %w", ns, err)
	}
	return nil
}

// commitOption sends the transaction that f makes of the table of a place. Of which cgroup a rule is the kernel counts from the root
// of the cgroup namespace of whoever sends it.
func commitOption(at Place, f func(*ruleset)) error {
	send := func() error {
		conn, err := openNFT(at.NetNS)
		if err != nil {
			return err
		}
		rs := &ruleset{conn: conn, table: optionTable(at.Cgroup)}
		f(rs)
		return errors.Join(rs.commit(), conn.CloseLasting())
	}
	if at.Cgroup == nil {
		return send()
	}
	return inNodesCgroups(send)
}

// ProbeOptionFilter tells whether nf_tables has what FilterOption needs.
func ProbeOptionFilter() error { return probeOptionFilter(nil) }

// probeOptionFilter is ProbeOptionFilter for the place of a cgroup, too.
func probeOptionFilter(g *Cgroup) error {
	err := probeTable(func(r *ruleset) {
		all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		r.addOptionFilter(OptionFilterConfig{Peers: []OutboundRule{{Prefix: all}}}, g)
	})
	if g != nil {
		return feature("nftables: filter of the SMC-R option of a cgroup", "use Linux 5.13 or later with the modules nft_exthdr and nft_socket (CONFIG_NFT_SOCKET)", err)
	}
	return feature("nftables: filter of the SMC-R option", "use Linux 5.6 or later with the module nft_exthdr (CONFIG_NFT_EXTHDR)", err)
}

// addOptionFilter puts the content of the table into the transaction: of each direction chains
// which look for the other side of a handshake among the peers, and one that erases the option.
//
//	sent:      tcp syn, with the option:     ip daddr @never4 goto erase; ip daddr . tcp dport @peers4 return; goto erase
//	received:  tcp syn, with the option:     ip saddr @never4 goto erase; ip saddr . tcp dport @peers4 return; goto erase
//	           tcp syn-ack, with the option: ip saddr @never4 goto erase; ip saddr . tcp sport @peers4 return; goto erase
//
// A server may answer with the option though it came to nobody: what this side asked for, and what was erased
// on the way, Linux does not know any more. Of a cgroup these are packets to which "socket cgroupv2" applies. They are received
// when it is known which socket they are for, behind NAT, which gives an answer through a Service the Service's address again.
//
// What comes in fragments is put together later. A first fragment without the whole TCP header has no option yet for nftables, and
// those behind have none at all: so TCP fragments that begin within a header are dropped, which no stack makes (RFC 3128).
func (r *ruleset) addOptionFilter(cfg OptionFilterConfig, g *Cgroup) {
	var peers, never [2]*nftables.Set
	for i, is4 := range bothFamilies {
		p := destinationSet(r.table, is4)
		p.Name = [...]string{setPeers4, setPeers6}[i]
		peers[i] = r.destinations(p, "Peers", cfg.Peers, is4)
		n, elems := exceptSet(r.table, cfg.Never, is4)
		n.Name = [...]string{setNever4, setNever6}[i]
		never[i] = r.set(n, elems)
	}
	erase := r.chain(nftables.Chain{Name: chainErase})
	r.eraseOption(erase)
	base := func(name string, hook *nftables.ChainHook, priority *nftables.ChainPriority) *nftables.Chain {
		return r.chain(nftables.Chain{Name: name, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: priority})
	}
	sent := base(chainSent, nftables.ChainHookOutput, nftables.ChainPriorityMangle)
	received := base(chainReceived, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle)
	for _, is4 := range bothFamilies {
		r.rule(received, family(is4), tcpHeader(), withinHeader(is4), []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}})
	}
	if g != nil {
		received = base(chainReceived+"-input", nftables.ChainHookInput, nftables.ChainPriorityRef(*nftables.ChainPriorityNATSource+1))
	}
	for _, d := range []struct {
		from  *nftables.Chain
		flags byte
		name  string
		load  func(is4 bool) []expr.Any
	}{
		{sent, tcpSYN, chainSent + "-option", loadDestination},
		{received, tcpSYN, chainReceived + "-option", loadClient},
		{received, tcpSYN | tcpACK, chainAnswered + "-option", loadServer},
	} {
		to := r.chain(nftables.Chain{Name: d.name})
		r.rule(d.from, tcpHeader(), tcpFlags(d.flags), anyOption(), socketOf(g), goTo(to))
		for i, is4 := range bothFamilies {
			r.rule(to, d.load(is4), lookup(reg32Base, never[i], false), goTo(erase))
			r.rule(to, d.load(is4), lookup(reg32Base, peers[i], false), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}})
		}
		r.rule(to, goTo(erase))
	}
}

// socketOf is "socket cgroupv2 level N PATH", or nothing for no cgroup.
func socketOf(g *Cgroup) []expr.Any {
	if g == nil {
		return nil
	}
	return []expr.Any{
		&expr.Socket{Key: expr.SocketKeyCgroupv2, Level: g.level(), Register: regA},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: binary.NativeEndian.AppendUint64(nil, g.id)},
	}
}

// loadClient is "ip saddr . tcp dport", or ip6, into reg32Base: who connects, and where to.
func loadClient(is4 bool) []expr.Any {
	words := uint32(4)
	if is4 {
		words = 1
	}
	return append(loadSource(is4), loadPort(reg32Base+words)...)
}

// loadServer is "ip saddr . tcp sport", or ip6, into reg32Base: who answers, and from where.
func loadServer(is4 bool) []expr.Any {
	words := uint32(4)
	if is4 {
		words = 1
	}
	return append(loadSource(is4), &expr.Payload{DestRegister: reg32Base + words, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2})
}

// withinHeader is "ip frag-off & 0x1fff 1-7", or of "exthdr frag frag-off": a fragment that begins behind the first 8 bytes and
// before the longest TCP header ends.
func withinHeader(is4 bool) []expr.Any {
	if is4 { // in units of 8 bytes, behind flags
		return []expr.Any{
			&expr.Payload{DestRegister: regA, Base: expr.PayloadBaseNetworkHeader, Offset: 6, Len: 2},
			&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 2, Mask: be16(0x1fff), Xor: be16(0)},
			&expr.Range{Op: expr.CmpOpEq, Register: regA, FromData: be16(1), ToData: be16(7)},
		}
	}
	return []expr.Any{ // before flags, so in bytes
		&expr.Exthdr{DestRegister: regA, Op: expr.ExthdrOpIpv6, Type: unix.IPPROTO_FRAGMENT, Offset: 2, Len: 2},
		&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 2, Mask: be16(0xfff8), Xor: be16(0)},
		&expr.Range{Op: expr.CmpOpEq, Register: regA, FromData: be16(8), ToData: be16(56)},
	}
}

// anyOption is "tcp option 254 exists": some option of the kind, which need not be that of SMC-R, nor the only one.
func anyOption() []expr.Any {
	return []expr.Any{
		&expr.Exthdr{DestRegister: regA, Op: expr.ExthdrOpTcpopt, Type: smcOptionKind, Len: 1, Flags: unix.NFT_EXTHDR_F_PRESENT},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{1}},
	}
}

// Where the identifier of an option may be in a TCP header: behind kind and length of an option that begins
// behind the fixed part or later.
const (
	firstOptionID = 20 + 2
	lastOptionID  = 60 - 4
)

// eraseOption is, for each place where it may be, "@th,OFFSET,32 0xe2d4c3d9 counter @th,EVEN,16 set 0": the identifier of
// RFC 7609 appendix A.1 becomes one of nobody's, and whoever reads the option passes over it. TCP looks at all options, and
// "tcp option 254" of nftables at the first one of the kind only, behind which a peer could hide another one.
func (r *ruleset) eraseOption(erase *nftables.Chain) {
	for at := uint32(firstOptionID); at <= lastOptionID; at++ {
		words := (at + 4 + 3) / 4 // of the header, if the identifier is in it and not behind
		r.rule(erase, []expr.Any{
			&expr.Payload{DestRegister: regA, Base: expr.PayloadBaseTransportHeader, Offset: at, Len: 4},
			&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: binary.BigEndian.AppendUint32(nil, smcOptionID)},
			&expr.Payload{DestRegister: regA, Base: expr.PayloadBaseTransportHeader, Offset: 12, Len: 1},
			&expr.Cmp{Op: expr.CmpOpGte, Register: regA, Data: []byte{byte(words) << 4}},
			&expr.Counter{},
			&expr.Immediate{Register: regA, Data: make([]byte, 2)},
			&expr.Payload{ // of the identifier as much as the checksum counts together
				OperationType: expr.PayloadWrite, SourceRegister: regA, Base: expr.PayloadBaseTransportHeader, Offset: at + at%2, Len: 2,
				CsumType: expr.CsumTypeInet, CsumOffset: 16,
			},
		})
	}
}
