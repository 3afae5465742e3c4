// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"fmt"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// terms are what a group's two sides have agreed on: in CLC, in CONFIRM LINK, or by what
// each of them is.
type terms struct {
	role     Role
	version  uint8 // of the protocol
	release  uint8
	allowRFC bool
	offered  uint8 // links that CLC settled, or ours
	userID   uint32
	dialect  llc.Dialect
	maxLinks uint8
	maxConns int

	bigEndian bool // the peer's host is: it reads numbers in host order, of version 2, so
}

func (t *terms) isV2() bool { return t.version == llc.Version2 }

// hasLimits reports whether CLC negotiated the limits of the group.
func (t *terms) hasLimits() bool { return t.isV2() && t.release >= release1 }

// header begins a message of our own; an answer keeps the header of what it
// answers.
func (t *terms) header(response bool) llc.Header {
	return llc.Header{Version: t.version, Response: response, BigEndian: t.bigEndian}
}

// linkUserID is the link's number for displays, another one for each link (RFC 7609
// A.3.1): the group's, with the link's place in the highest byte.
func (t *terms) linkUserID(l *link) uint32 { return t.userID&(1<<24-1) | uint32(l.index)<<24 }

// fits reports whether a group of version 2 can use a message. It takes those of
// version 1 as well, as Linux does, but not those that offer a link without its
// RTokens.
func (t *terms) fits(m llc.Message) bool {
	switch m := m.(type) {
	case llc.AddLink:
		return !t.isV2() || m.Version == llc.Version2 || m.Reject
	case llc.AddLinkContinuation:
		return !t.isV2()
	}
	return true
}

// A peer of version 2 has little room for messages of more than 44 bytes: Linux one
// place for all links of a group, in which the next one overwrites the last. So
// one of ours is under way at a time. The server's are requests, which wait for
// each other; the client's one is the answer to ADD LINK, so it asks and answers
// for anything else in 44 bytes.

// maxDelete is how many RMBs one DELETE RKEY of ours may be about.
func (t *terms) maxDelete() int {
	switch {
	case !t.isV2():
		return llc.MaxDeleteRKeys
	case t.role == Client:
		return llc.ShortDeleteRKeysV2
	}
	return llc.MaxDeleteRKeysV2
}

// deleteRKeys is DELETE RKEY for the given RMBs.
func (t *terms) deleteRKeys(k *keyTable, via *link, ids []RMBID) llc.Message {
	var keys []rdma.RKey
	for _, id := range ids {
		keys = append(keys, k.rmb(id).token(via).RKey)
	}
	if t.isV2() {
		return llc.DeleteRKeyV2{Header: t.header(false), RKeys: keys}
	}
	m := llc.DeleteRKey{Header: t.header(false), Count: uint8(len(keys))}
	copy(m.RKeys[:], keys)
	return m
}

// offersSecond reports whether the first contact includes the offer of a second
// link. Linux waits for it even if it can have none, unless CLC has said so.
func (t *terms) offersSecond() bool {
	if t.hasLimits() {
		return t.offered > 1
	}
	return t.maxLinks > 1 || t.dialect == llc.DialectLinux
}

// eyeCatcherFlags are the flags of CONFIRM LINK once the dialect is settled.
func (t *terms) eyeCatcherFlags() llc.ConfirmLinkFlags {
	if t.dialect == llc.DialectLinux {
		return noEyeCatcher
	}
	return 0
}

// settleDialect takes the peer's flags; false when it wants what we do not
// allow, or one of the two directions only.
func (t *terms) settleDialect(flags llc.ConfirmLinkFlags) bool {
	if flags.Has(noEyeCatcher) {
		t.dialect = llc.DialectLinux
		return true
	}
	if !t.allowRFC || t.isV2() || flags&noEyeCatcher != 0 {
		return false
	}
	t.dialect = llc.DialectRFC
	return true
}

// settleLimits takes the peer's largest numbers of links and connections: the
// smaller ones hold for the life of the group. A client may leave the links to
// the server (§2.2.2).
func (t *terms) settleLimits(m llc.ConfirmLink) error {
	if m.MaxLinks == 0 && t.role == Client {
		return fmt.Errorf("%w: CONFIRM LINK allows no links", ErrProtocol)
	}
	if m.MaxLinks != 0 {
		t.maxLinks = min(t.maxLinks, m.MaxLinks)
	}
	if t.hasLimits() && m.MaxConns != 0 {
		t.maxConns = min(t.maxConns, int(m.MaxConns))
	}
	return nil
}

func (t *terms) confirmLink(l *link, flags llc.ConfirmLinkFlags, response bool) llc.ConfirmLink {
	m := llc.ConfirmLink{
		Header:   t.header(response),
		Flags:    flags,
		MAC:      l.local.MAC,
		GID:      l.local.GID,
		QPN:      l.local.QPN,
		Link:     l.id,
		UserID:   t.linkUserID(l),
		MaxLinks: t.maxLinks,
	}
	if t.hasLimits() {
		m.MaxConns = uint8(t.maxConns)
	}
	return m
}

// deleteAll is our DELETE LINK for all links.
func (t *terms) deleteAll(why llc.DeleteReason) llc.DeleteLink {
	return llc.DeleteLink{Header: t.header(false), All: true, Orderly: true, Reason: why}
}

// addLink is ADD LINK with our half of a link.
func (t *terms) addLink(l *link) llc.AddLink {
	return llc.AddLink{
		Header: t.header(false), Dialect: t.dialect,
		MAC: l.local.MAC, GID: l.local.GID, QPN: l.local.QPN, MTU: l.local.MTU, PSN: l.local.PSN,
	}
}

// connLimit is how many connections there may be. The server decides whether the
// group is full; some that it has done with may still be ending at a client.
func (t *terms) connLimit() int {
	if t.role == Client {
		return maxSlots
	}
	return t.maxConns
}

// ring is the geometry of an RMBE in the group's dialect (§4.3).
func (t *terms) ring(size uint32) cdc.Ring {
	if t.dialect == llc.DialectRFC {
		return cdc.Ring{Origin: 4, Size: size}
	}
	return cdc.Ring{Size: size}
}
