// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/synqueue"
)

const (
	chainHold   = "hold"
	chainHoldTo = "hold-to"
	chainAnswer = "answer"
)

// Priorities of the base chains. A packet that was queued goes on in the next base chain, not
// behind the rule that queued it, so the chains that look at the mark of a verdict come later.
// Connection tracking (-200) comes before, so that a SYN that passed once is known.
const (
	holdPriority   = -150
	answerPriority = -140
)

// QueueForm is how a rule says that a packet waits in a queue.
type QueueForm int

// Forms.
const (
	QueueNative QueueForm = iota // the expression "queue" of nf_tables
	QueueCompat                  // the target NFQUEUE of xtables, by nft_compat
)

// String names the form.
func (f QueueForm) String() string {
	if f == QueueCompat {
		return "xt NFQUEUE by nft_compat"
	}
	return "nft queue"
}

// HoldMarks are the marks by which the verdict on a held SYN steers it. A mark is on the packet
// only and ends where the packet leaves the namespace.
type HoldMarks struct {
	Divert, Reset, HostUnreachable, NetUnreachable, Prohibited uint32
}

// Of is the mark of a decision. ok is false if the decision needs none.
func (m HoldMarks) Of(d synqueue.Decision) (mark uint32, ok bool) {
	switch d {
	case synqueue.Divert:
		return m.Divert, true
	case synqueue.Reset:
		return m.Reset, true
	case synqueue.HostUnreachable:
		return m.HostUnreachable, true
	case synqueue.NetUnreachable:
		return m.NetUnreachable, true
	case synqueue.Prohibited:
		return m.Prohibited, true
	default:
		return 0, false
	}
}

func (m HoldMarks) all() []uint32 {
	return []uint32{m.Divert, m.Reset, m.HostUnreachable, m.NetUnreachable, m.Prohibited}
}

// HoldConfig says how SYNs to selected destinations are held.
type HoldConfig struct {
	Queue uint16    // who binds the queue does so before the rules are installed
	Form  QueueForm // as ProbeQueue says
	Marks HoldMarks
}

// validate checks c beside the marks of the agent's sockets.
func (c *HoldConfig) validate(sockets ...uint32) error {
	seen := map[uint32]bool{0: true}
	for _, m := range sockets {
		seen[m] = true
	}
	for _, m := range c.Marks.all() {
		if seen[m] {
			return &ConfigError{Field: "Hold.Marks", Reason: fmt.Sprintf("%#x is 0 or there twice", m)}
		}
		seen[m] = true
	}
	return nil
}

// hold makes SYNs to selected destinations wait in the queue:
//
//	hold      a new connection's SYN to a selected destination waits in the queue
//	answer    what the verdict refuses is refused
//	outbound  what the verdict diverts goes to the agent's listener
//
// Chain answer drops, too, what a required destination would get without a verdict, and refuses what is not tracked; chain opening
// keeps such a connection from being opened by its peer meanwhile. With silent, a SYN that is to be
// refused is dropped, because the kernel cannot refuse it.
func (r *ruleset) hold(cfg RedirectConfig, s *sets, silent bool) {
	to := r.chain(nftables.Chain{Name: chainHoldTo})
	hold := r.chain(nftables.Chain{
		Name: chainHold, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(holdPriority),
	})
	r.rule(hold, append(s.outbound(cfg), synOnly(), notConfirmed(), goTo(to))...)
	r.whenCaught(to, cfg, s)
	answer := r.chain(answerChain())
	r.opening(to, answer, cfg, s, silent)
	for i, is4 := range bothFamilies {
		r.rule(to, s.selected(i, is4), queueTo(cfg.Hold.Form, cfg.Hold.Queue))
	}
	r.answers(answer, cfg.Hold.Marks, silent)
	r.unjudged(answer, cfg, s)

	out := r.chain(outboundChain())
	r.rule(out, markIs(cfg.Hold.Marks.Divert), tcpHeader(), []expr.Any{
		&expr.Counter{}, &expr.Immediate{Register: regA, Data: be16(cfg.OutboundPort)}, &expr.Redir{RegisterProtoMin: regA},
	})
}

func answerChain() nftables.Chain {
	return nftables.Chain{
		Name: chainAnswer, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityRef(answerPriority),
	}
}

// answers refuse a SYN as its destination did. The ICMP errors have codes that nf_tables knows
// for both families:
//
//	             IPv4                    IPv6                  connect()
//	host         host unreachable        address unreachable   EHOSTUNREACH
//	net          network unreachable     no route              ENETUNREACH
//	prohibited   prohibited by filter    prohibited            EHOSTUNREACH, EACCES
//
// The reset has the mark of the SYN (see fwmarkReflect4), and passes here, too.
func (r *ruleset) answers(answer *nftables.Chain, m HoldMarks, silent bool) {
	const noRoute, hostUnreachable, prohibited = 0, 2, 3 // NFT_REJECT_ICMPX_*
	for _, c := range []struct {
		mark   uint32
		refuse expr.Any
	}{
		{m.Reset, &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		{m.HostUnreachable, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: hostUnreachable}},
		{m.NetUnreachable, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: noRoute}},
		{m.Prohibited, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: prohibited}},
	} {
		if silent {
			c.refuse = &expr.Verdict{Kind: expr.VerdictDrop}
		}
		r.rule(answer, markIs(c.mark), tcpHeader(), synOnly(), []expr.Any{&expr.Counter{}, c.refuse})
	}
}

// unjudged drops SYNs to required destinations that the queue let go without a verdict: it was full,
// or nobody reads it. TCP repeats them. Once the agent is taken for dead, they pass.
func (r *ruleset) unjudged(answer *nftables.Chain, cfg RedirectConfig, s *sets) {
	must := required(cfg, s)
	for i, is4 := range bothFamilies {
		if must[i] == nil {
			continue
		}
		match := append(s.outbound(cfg), metaNot(expr.MetaKeyMARK, nativeU32(cfg.Hold.Marks.Divert)), synOnly(), notConfirmed(),
			s.selected(i, is4), lookup(reg32Base, must[i], false), counted(expr.VerdictDrop))
		r.rule(answer, match...)
	}
}

func markIs(mark uint32) []expr.Any { return metaIs(expr.MetaKeyMARK, nativeU32(mark)) }

// notConfirmed is "ct status ! confirmed": connection tracking has not seen a packet of this
// connection leave. A SYN that passed, or was diverted, and is repeated is not held again. It does not match a packet that is
// not tracked, see notTracked.
func notConfirmed() []expr.Any {
	const confirmed = 1 << 3 // IPS_CONFIRMED
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: regA},
		&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 4, Mask: nativeU32(confirmed), Xor: nativeU32(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: regA, Data: nativeU32(0)},
	}
}

// notTracked is "ct state invalid,untracked": connection tracking has nothing about this packet, and so neither the rules match that
// ask for something nor does a chain of type nat see it. A rule of another program may want that (notrack).
func notTracked() []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: regA},
		&expr.Bitwise{SourceRegister: regA, DestRegister: regA, Len: 4, Mask: nativeU32(expr.CtStateBitINVALID | expr.CtStateBitUNTRACKED), Xor: nativeU32(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: regA, Data: nativeU32(0)},
	}
}

// queueTo is "counter queue flags bypass to number", or the same by xtables.
func queueTo(form QueueForm, number uint16) []expr.Any {
	if form == QueueNative {
		return []expr.Any{&expr.Counter{}, &expr.Queue{Num: number, Total: 1, Flag: expr.QueueFlagBypass}}
	}
	// The third revision: number, count, flags, 16 bits each, padded to 8 bytes.
	const revision, bypass = 3, 1
	var info xt.Unknown
	for _, v := range []uint16{number, 1, bypass, 0} {
		info = binary.NativeEndian.AppendUint16(info, v)
	}
	return []expr.Any{&expr.Counter{}, &expr.Target{Name: "NFQUEUE", Rev: revision, Info: &info}}
}

// ProbeQueue tells how rules of this kernel hold packets, and whether it has queues at
// all. The error is a *FeatureError.
func ProbeQueue() (QueueForm, error) {
	ns, err := ScratchNetNS()
	if err != nil {
		return 0, feature("netfilter queues", "use a kernel with CONFIG_NET_NS", err)
	}
	q, err := OpenQueue(ns, QueueConfig{})
	if err == nil {
		err = q.Close()
	}
	if err := errors.Join(err, ns.Close()); err != nil {
		return 0, feature("netfilter queues", "load the module nfnetlink_queue (CONFIG_NETFILTER_NETLINK_QUEUE)", err)
	}
	var failed error
	for _, form := range []QueueForm{QueueNative, QueueCompat} {
		err := probeQueueForm(form)
		if err == nil {
			return form, nil
		}
		failed = errors.Join(failed, fmt.Errorf("%v: %w", form, err))
	}
	return 0, feature("nftables: queue",
		"load the module nft_queue (CONFIG_NFT_QUEUE), or nft_compat and xt_NFQUEUE (CONFIG_NFT_COMPAT, CONFIG_NETFILTER_XT_TARGET_NFQUEUE)", failed)
}

func probeQueueForm(form QueueForm) error {
	return probeTable(func(r *ruleset) {
		c := r.chain(nftables.Chain{
			Name: "probe", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityMangle,
		})
		r.rule(c, tcpHeader(), queueTo(form, 0))
	})
}
