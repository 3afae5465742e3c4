// SPDX-License-Identifier: Apache-2.0

package llc

import (
	"encoding/binary"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// grow appends a message of n zero bytes with its header to b. It returns the
// longer slice and the part of it that is the message.
func (h Header) grow(b []byte, t Type, n int, flags byte) (all, m []byte) {
	invariant.Must(h.Version <= Version2, "llc: message of an unknown version")
	at := len(b)
	for range n / Size {
		b = append(b, zeros[:]...)
	}
	b = append(b, zeros[:n%Size]...)
	m = b[at:]
	m[0], m[1], m[3] = byte(t), Size, flags
	if h.Version == Version2 {
		m[0] |= versionBits
		h.putUint16(m[1:], n)
	}
	if h.Response {
		m[3] |= flagResponse
	}
	return b, m
}

var zeros [Size]byte

// putUint16 writes a field of version 2 that is in host order.
func (h Header) putUint16(b []byte, v int) {
	if h.BigEndian {
		binary.BigEndian.PutUint16(b, uint16(v))
	} else {
		binary.LittleEndian.PutUint16(b, uint16(v))
	}
}

// Append appends the message to b.
func (m ConfirmLink) Append(b []byte) []byte {
	b, p := m.grow(b, TypeConfirmLink, Size, byte(m.Flags)&^flagResponse)
	copy(p[4:], m.MAC[:])
	copy(p[10:], m.GID[:])
	putUint24(p[26:], uint32(m.QPN))
	p[29] = byte(m.Link)
	binary.BigEndian.PutUint32(p[30:], m.UserID)
	p[34] = m.MaxLinks
	p[35] = m.MaxConns
	return b
}

// Append appends the message to b.
func (m AddLink) Append(b []byte) []byte {
	invariant.Must(m.MTU <= 0x0f, "llc: MTU of more than four bits in ADD LINK")
	invariant.Must(m.Reason <= 0x0f, "llc: reason of more than four bits in ADD LINK")
	n := Size
	if m.hasExt() {
		invariant.Must(len(m.Ext.Pairs) <= MaxPairsV2, "llc: too many RToken pairs in ADD LINK")
		n = addLinkPairsOffset + pairSize*len(m.Ext.Pairs)
	}
	b, p := m.grow(b, TypeAddLink, n, flag(m.Reject, addLinkReject))
	copy(p[4:], m.MAC[:])
	gid := p[12:]
	if m.Version != Version2 {
		p[2] = byte(m.Reason)
		if m.Dialect == DialectRFC {
			gid = p[10:]
		}
	}
	copy(gid, m.GID[:])
	putUint24(gid[16:], uint32(m.QPN))
	gid[19] = byte(m.Link)
	gid[20] = byte(m.MTU)
	putUint24(gid[21:], uint32(m.PSN))
	if m.hasExt() {
		p[44] = flag(m.Ext.Direct, extDirect)
		copy(p[46:], m.Ext.TargetGID[:])
		m.putUint16(p[70:], len(m.Ext.Pairs))
		for i, pair := range m.Ext.Pairs {
			pair.put(p[addLinkPairsOffset+pairSize*i:])
		}
	}
	return b
}

// Append appends the message to b.
func (m AddLinkContinuation) Append(b []byte) []byte {
	b, p := m.grow(b, TypeAddLinkContinuation, Size, 0)
	p[4], p[5] = byte(m.Link), m.Remaining
	for i, pair := range m.Pairs {
		pair.put(p[8+pairSize*i:])
	}
	return b
}

// Append appends the message to b.
func (m DeleteLink) Append(b []byte) []byte {
	b, p := m.grow(b, TypeDeleteLink, Size, flag(m.All, deleteLinkAll)|flag(m.Orderly, deleteLinkOrderly))
	p[4] = byte(m.Link)
	binary.BigEndian.PutUint32(p[5:], uint32(m.Reason))
	return b
}

// Append appends the message to b.
func (m ConfirmRKey) Append(b []byte) []byte {
	invariant.Must(m.Others <= MaxOtherLinks, "llc: too many links in CONFIRM RKEY")
	b, p := m.grow(b, TypeConfirmRKey, Size, flag(m.Negative, rkeyNegative)|flag(m.Retry, rkeyRetry))
	p[4] = m.Others
	m.This.put(p[5:])
	for i, t := range m.Other {
		t.put(p[4+linkRTokenSize*(1+i):])
	}
	return b
}

// Append appends the message to b.
func (m ConfirmRKeyContinuation) Append(b []byte) []byte {
	invariant.Must(m.Remaining <= MaxOtherLinks, "llc: too many links in CONFIRM RKEY CONTINUATION")
	b, p := m.grow(b, TypeConfirmRKeyContinuation, Size, flag(m.Negative, rkeyNegative))
	p[4] = m.Remaining
	for i, t := range m.Other {
		t.put(p[5+linkRTokenSize*i:])
	}
	return b
}

// Append appends the message to b.
func (m DeleteRKey) Append(b []byte) []byte {
	invariant.Must(m.Version != Version2, "llc: DELETE RKEY of version 1 in version 2")
	invariant.Must(m.Count <= MaxDeleteRKeys, "llc: too many keys in DELETE RKEY")
	b, p := m.grow(b, TypeDeleteRKey, Size, flag(m.Negative, rkeyNegative))
	p[4], p[5] = m.Count, m.ErrorMask
	for i, k := range m.RKeys {
		binary.BigEndian.PutUint32(p[rkeysOffset+4*i:], uint32(k))
	}
	return b
}

// Append appends the message to b. Its version is 2 whatever m.Version says.
func (m DeleteRKeyV2) Append(b []byte) []byte {
	invariant.Must(len(m.RKeys) <= MaxDeleteRKeysV2, "llc: too many keys in DELETE RKEY")
	invariant.Must(m.Response || int(m.Invalid) <= len(m.RKeys), "llc: more invalid keys than keys in DELETE RKEY")
	invariant.Must(m.Omitted == 0 || m.Response && len(m.RKeys) == ShortDeleteRKeysV2 && len(m.RKeys)+int(m.Omitted) <= MaxDeleteRKeysV2,
		"llc: keys left out of DELETE RKEY without need")
	m.Version = Version2
	b, p := m.grow(b, TypeDeleteRKey, max(Size, rkeysOffset+4*len(m.RKeys)), flag(m.Negative, rkeyNegative))
	p[4], p[5] = byte(len(m.RKeys)+int(m.Omitted)), m.Invalid
	for i, k := range m.RKeys {
		binary.BigEndian.PutUint32(p[rkeysOffset+4*i:], uint32(k))
	}
	return b
}

// Append appends the message to b.
func (m TestLink) Append(b []byte) []byte {
	b, p := m.grow(b, TypeTestLink, Size, 0)
	copy(p[4:], m.UserData[:])
	return b
}

// Append appends the message to b. Its version is 2 whatever m.Version says.
func (m RequestAddLink) Append(b []byte) []byte {
	invariant.Must(len(m.GIDs) <= MaxRequestGIDs, "llc: too many GIDs in REQUEST ADD LINK")
	m.Version = Version2
	b, p := m.grow(b, TypeRequestAddLink, max(Size, gidsOffset+gidSize*len(m.GIDs)), 0)
	p[24] = byte(len(m.GIDs))
	for i, g := range m.GIDs {
		copy(p[gidsOffset+gidSize*i:], g[:])
	}
	return b
}

func (t RToken) put(b []byte) {
	binary.BigEndian.PutUint32(b, uint32(t.RKey))
	binary.BigEndian.PutUint64(b[4:], t.VAddr)
}

func (t LinkRToken) put(b []byte) {
	b[0] = byte(t.Link)
	t.RToken.put(b[1:])
}

func (p RTokenPair) put(b []byte) {
	binary.BigEndian.PutUint32(b, uint32(p.Reference))
	p.New.put(b[4:])
}

func putUint24(b []byte, v uint32) {
	invariant.Must(v < 1<<24, "llc: number of more than 24 bits")
	b[0], b[1], b[2] = byte(v>>16), byte(v>>8), byte(v)
}

func flag(set bool, bit byte) byte {
	if set {
		return bit
	}
	return 0
}
