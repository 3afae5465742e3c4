// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/invariant"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// RMBID names one of our RMBs in its group.
type RMBID uint16

// RToken addresses a registered RMB over one link: its RKey and the virtual
// address of its first byte (RFC 7609 §2.1).
type RToken struct {
	RKey  rdma.RKey
	VAddr uint64
}

// rmb is one of our RMBs: a registered region cut into elements of one size.
type rmb struct {
	id          RMBID
	elementSize uint32
	elements    []element
	usedCount   int  // of elements that no connection can have
	zombies     int  // connections among them that the peer does not end
	retired     bool // because of them
	tokens      [MaxRNICs]RToken
	registered  uint8 // bit set of the RNICs that tokens has an entry for
	state       rmbState
}

type rmbState uint8

const (
	rmbNew        rmbState = iota // the peer does not know it
	rmbConfirming                 // CONFIRM RKEY waits for its turn or answer
	rmbConfirmed
	rmbDeleting  // DELETE RKEY waits for its turn or answer
	rmbForgotten // by the peer; connections that ended are still to be released
)

// rtoken is one of the peer's RMBs.
type rtoken struct {
	tokens [MaxLinks]RToken
	known  uint8 // bit set of the links that tokens has an entry for
	// former are those of the links that had the places before; those that the
	// peer never told are zero.
	former [MaxLinks]RToken
}

func (t *rtoken) knows(l LinkIndex) bool { return t.known&(1<<l) != 0 }

// retire keeps what a link was told in its place, which another link gets.
func (t *rtoken) retire(l LinkIndex) {
	t.former[l] = RToken{}
	if t.knows(l) {
		t.former[l] = t.tokens[l]
	}
	t.known &^= 1 << l
}

func (t *rtoken) set(l LinkIndex, v RToken) {
	t.tokens[l] = v
	t.known |= 1 << l
}

// Errors of RMB handling.
var (
	// ErrNeedRMB: no element of the wanted size is free; AddRMB one.
	ErrNeedRMB = errors.New("link group: no free RMB element of this size")
	// ErrFull: the group carries as many connections or RMBs as it may.
	ErrFull = errors.New("link group: full")
	// ErrUnknownRToken: the peer named an RMB that it never announced.
	ErrUnknownRToken = errors.New("link group: unknown RKey")
)

// token is what the peer needs to write to the RMB over a link.
func (r *rmb) token(l *link) RToken {
	invariant.Must(r.registered&(1<<l.local.RNIC) != 0, "RMB is not registered with the RNIC of a link")
	return r.tokens[l.local.RNIC]
}

// AddRMB adds a registered region of elements×elementSize bytes, with its
// token on each RNIC, by number.
func (g *Group) AddRMB(elementSize uint32, elements int, tokens []RToken) (RMBID, error) {
	invariant.Must(elements > 0 && elements <= maxRMBEs, "RMB with an impossible number of elements")
	if len(g.rmbs) >= MaxRMBs {
		return 0, ErrFull
	}
	g.nextRMB++
	r := &rmb{id: g.nextRMB, elementSize: elementSize, elements: make([]element, elements)}
	for i, t := range tokens {
		r.tokens[i] = t
		r.registered |= 1 << i
	}
	g.rmbs = append(g.rmbs, r)
	return r.id, nil
}

// SetRMBToken gives the token of an RMB on an RNIC that it was registered with
// later. All RMBs must be registered with the RNIC of a link that is offered.
func (g *Group) SetRMBToken(id RMBID, rnic uint8, t RToken) {
	if r := g.rmb(id); r != nil {
		r.tokens[rnic] = t
		r.registered |= 1 << rnic
	}
}

func (g *Group) rmb(id RMBID) *rmb {
	for _, r := range g.rmbs {
		if r.id == id {
			return r
		}
	}
	return nil
}

// takeRMBE finds a free element of the given size, in a confirmed RMB if
// there is one.
func (g *Group) takeRMBE(size uint32) (*rmb, int, error) {
	for _, confirmed := range [...]bool{true, false} {
		for _, r := range g.rmbs {
			if r.elementSize != size || (r.state == rmbConfirmed) != confirmed {
				continue
			}
			if i, ok := r.take(); ok {
				return r, i, nil
			}
		}
	}
	return nil, 0, ErrNeedRMB
}

// TakeGoneRMBs returns the RMBs that the peer was told to forget since the
// last call; their memory may be deregistered.
func (g *Group) TakeGoneRMBs() []RMBID {
	gone := g.rmbsGone
	g.rmbsGone = nil
	return gone
}

// peerToken finds the peer's RMB by the RKey it has on a link.
func (g *Group) peerToken(link LinkIndex, key rdma.RKey) *rtoken {
	for _, t := range g.rtokens {
		if t.knows(link) && t.tokens[link].RKey == key {
			return t
		}
	}
	return nil
}

// findToken finds the peer's RMB by an RToken of whatever link: the one that a
// CLC message named may have been lost meanwhile.
func (g *Group) findToken(v RToken) *rtoken {
	for _, t := range g.rtokens {
		for i := range LinkIndex(MaxLinks) {
			if t.knows(i) && t.tokens[i] == v {
				return t
			}
		}
	}
	for _, t := range g.rtokens {
		if v != (RToken{}) && slices.Contains(t.former[:], v) {
			return t
		}
	}
	return nil
}

// isReachable reports whether we can write to the RMB over any link.
func (g *Group) isReachable(t *rtoken) bool {
	for i := range g.links {
		if l := &g.links[i]; l.isUp() && t.knows(l.index) {
			return true
		}
	}
	return false
}

// learnToken remembers a peer's RMB; nil when the table is full.
func (g *Group) learnToken(link LinkIndex, v RToken) *rtoken {
	t := g.peerToken(link, v.RKey)
	if t == nil {
		if len(g.rtokens) >= MaxRTokens { // make room: those that no link knows any more
			g.rtokens = slices.DeleteFunc(g.rtokens, func(t *rtoken) bool { return t.known == 0 })
		}
		if len(g.rtokens) >= MaxRTokens {
			return nil
		}
		t = &rtoken{}
		g.rtokens = append(g.rtokens, t)
	}
	g.setToken(t, link, v)
	return t
}

// setToken notes an RToken of a peer's RMB. An RKey means one RMB on each link:
// an older RMB that had it there is gone, although nobody told us.
func (g *Group) setToken(t *rtoken, link LinkIndex, v RToken) {
	for _, o := range g.rtokens {
		if o != t && o.knows(link) && o.tokens[link].RKey == v.RKey {
			o.known &^= 1 << link
		}
	}
	t.set(link, v)
}

func (g *Group) forgetToken(link LinkIndex, key rdma.RKey) bool {
	t := g.peerToken(link, key)
	if t == nil {
		return false
	}
	i := slices.Index(g.rtokens, t)
	g.rtokens = slices.Delete(g.rtokens, i, i+1)
	for _, c := range g.conns {
		if c != nil && c.peerRMB == t && !c.done && !c.data.HasSentClose() && !c.data.PeerReleased() {
			// The peer has given up the connection, and what it said of that was
			// lost. Another write would break the link.
			c.raise(c.data.Abort())
			c.enqueue()
		}
	}
	return true
}
