// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const (
	setOpening4  = "opening4"
	setOpening6  = "opening6"
	setVerdicts  = "verdicts"
	chainOpening = "opening"
)

// openingSet is of connections that programs of the pod are opening to where SMC-R is required: the peer's
// address . its port . the pod's port.
func openingSet(t *nftables.Table, is4 bool) *nftables.Set {
	s := destinationSet(t, is4)
	s.Name, s.HasTimeout, s.Dynamic, s.Size = setOpening6, true, true, maxOpening
	addr := nftables.TypeIP6Addr
	if is4 {
		s.Name, addr = setOpening4, nftables.TypeIPAddr
	}
	s.KeyType = nftables.MustConcatSetType(addr, nftables.TypeInetService, nftables.TypeInetService)
	return s
}

// opening sees to it that what must be on SMC-R is not opened by the peer instead (RFC 9293 §3.5,
// simultaneous open), while the pod's own SYN waits for its verdict, or for TCP to repeat it:
//
//	hold-to   a SYN to where SMC-R is required is noted before it is queued
//	answer    what the verdict diverts or refuses is noted for a moment only, until the program knows;
//	          a SYN that crosses one of the peer's is refused, and so are one that is not tracked, which nothing
//	          would hold or divert, and a SYN-ACK to where a SYN is noted
//	opening   a SYN from there to the port that opens is refused; with silent it is dropped
//
// The last two are for a peer's SYN that comes when the kernel has the program's socket ready, but has not sent its
// SYN yet: to connection tracking that one belongs to the peer's connection, and is not held. Then the program
// may be told of a reset (ECONNRESET), and not that it is refused. A program that
// listens is no concern of this, as it does not open.
func (r *ruleset) opening(to, answer *nftables.Chain, cfg RedirectConfig, s *sets, silent bool) {
	var marks []nftables.SetElement
	for _, m := range cfg.Hold.Marks.all() {
		marks = append(marks, nftables.SetElement{Key: nativeU32(m)})
	}
	verdicts := r.set(&nftables.Set{Table: r.table, Name: setVerdicts, KeyType: nftables.TypeMark}, marks)
	in := r.chain(nftables.Chain{
		Name: chainOpening, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
	})
	var refuse expr.Any = &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}
	if silent {
		refuse = &expr.Verdict{Kind: expr.VerdictDrop}
	}
	must := required(cfg, s)
	for i, is4 := range bothFamilies {
		set := r.keep(openingSet(r.table, is4))
		if must[i] != nil {
			r.rule(to, s.selected(i, is4), lookup(reg32Base, must[i], false), loadOwnPort(is4), note(set, openingTTL))
		}
		r.rule(answer, []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: regA}}, lookup(regA, verdicts, false),
			tcpHeader(), synOnly(), loadDestination(is4), loadOwnPort(is4), lookup(reg32Base, set, false), note(set, openedTTL))
		for _, is := range [][]expr.Any{replies(), notTracked()} {
			if must[i] == nil {
				continue
			}
			strays := slices.Concat(slices.Concat(s.outbound(cfg)...), synOnly(), is, s.selected(i, is4), lookup(reg32Base, must[i], false))
			r.rule(answer, strays, loadOwnPort(is4), note(set, openedTTL))
			r.rule(answer, strays, []expr.Any{&expr.Counter{}, refuse})
		}
		r.rule(answer, tcpIn(s.alive), tcpHeader(), tcpFlags(tcpSYN|tcpACK), loadDestination(is4), loadOwnPort(is4), lookup(reg32Base, set, false), []expr.Any{&expr.Counter{}, refuse})
		r.rule(in, tcpIn(s.alive), tcpHeader(), synOnly(), loadPeer(is4), lookup(reg32Base, set, false), []expr.Any{&expr.Counter{}, refuse})
	}
}

// required are the sets of the destinations that must be on SMC-R; nil where there are none.
func required(cfg RedirectConfig, s *sets) [2]*nftables.Set {
	if cfg.WhenCaught == CaughtDivert {
		return s.to // all that is selected is required
	}
	return s.must
}

// note is "update @s { … timeout }". The key is in reg32Base. A full set takes nothing more, and the rule ends.
func note(s *nftables.Set, ttl time.Duration) []expr.Any {
	return []expr.Any{&expr.Dynset{SrcRegKey: reg32Base, SetName: s.Name, SetID: s.ID, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: ttl}}
}

// replies is "ct direction reply": the other end's packet was the first.
func replies() []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: regA},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: []byte{1}}, // IP_CT_DIR_REPLY
	}
}

// loadOwnPort is "tcp sport" behind what loadDestination loads.
func loadOwnPort(is4 bool) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: reg32Base + addrSize(is4)/4 + 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2}}
}

// loadPeer is "ip saddr . tcp sport . tcp dport", or ip6, into reg32Base: what loadDestination and loadOwnPort
// load of a packet in the other direction.
func loadPeer(is4 bool) []expr.Any {
	port := reg32Base + addrSize(is4)/4
	return append(loadSource(is4),
		&expr.Payload{DestRegister: port, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2},
		&expr.Payload{DestRegister: port + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
}

// addrSize is that of an address in bytes.
func addrSize(is4 bool) uint32 {
	if is4 {
		return 4
	}
	return 16
}
