// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"errors"
	"fmt"
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
	zombies     int  // elements of these whose connection the peer does not end
	retired     bool // other connections get its elements last, because of the zombies
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

func (s rmbState) String() string {
	names := [...]string{"new", "confirming", "confirmed", "deleting", "forgotten"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("rmbState(%d)", uint8(s))
}

// rtoken is one of the peer's RMBs.
type rtoken struct {
	tokens [MaxLinks]RToken
	known  uint8 // bit set of the links that tokens has an entry for
	// former are those of the links that had the places before; those that the
	// peer never told are zero.
	former [MaxLinks]RToken
}

// keyTable has our RMBs and what we know of the peer's.
type keyTable struct {
	rmbs  []*rmb
	last  RMBID
	gone  []RMBID // forgotten by the peer, and not yet taken by the shell
	peers []*rtoken
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

// becomeNew: the peer does not know the RMB, or has refused it.
func (r *rmb) becomeNew() { r.state = rmbNew }

// becomeConfirming: the peer is to be told of it.
func (r *rmb) becomeConfirming() { r.state = rmbConfirming }

// becomeConfirmed: the peer may write it.
func (r *rmb) becomeConfirmed() { r.state = rmbConfirmed }

// becomeDeleting: the peer is to forget it.
func (r *rmb) becomeDeleting() { r.state = rmbDeleting }

// becomeForgotten: the peer does not write there any more, and nothing need be held back.
func (r *rmb) becomeForgotten() {
	r.state = rmbForgotten
	r.freeHeld()
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
	return g.keys.add(elementSize, elements, tokens)
}

// SetRMBToken gives the token of an RMB on an RNIC that it was registered with
// later. All RMBs must be registered with the RNIC of a link that is offered.
func (g *Group) SetRMBToken(id RMBID, rnic uint8, t RToken) {
	if r := g.keys.rmb(id); r != nil {
		r.tokens[rnic] = t
		r.registered |= 1 << rnic
	}
}

// TakeGoneRMBs returns the RMBs that the peer was told to forget since the
// last call; their memory may be deregistered.
func (g *Group) TakeGoneRMBs() []RMBID { return g.keys.takeGone() }

// add adds a registered region of elements×elementSize bytes, with its
// token on each RNIC, by number.
func (k *keyTable) add(elementSize uint32, elements int, tokens []RToken) (RMBID, error) {
	invariant.Must(elements > 0 && elements <= maxRMBEs, "RMB with an impossible number of elements")
	if len(k.rmbs) >= MaxRMBs {
		return 0, ErrFull
	}
	// A group that gives its memory back whenever it is idle comes round in days.
	k.last++
	for k.last == 0 || k.rmb(k.last) != nil {
		k.last++
	}
	r := &rmb{id: k.last, elementSize: elementSize, elements: make([]element, elements)}
	for i, t := range tokens {
		r.tokens[i] = t
		r.registered |= 1 << i
	}
	k.rmbs = append(k.rmbs, r)
	return r.id, nil
}

func (k *keyTable) rmb(id RMBID) *rmb {
	for _, r := range k.rmbs {
		if r.id == id {
			return r
		}
	}
	return nil
}

// take finds a free element of the given size, in a confirmed RMB if
// there is one, and of these in one that is not retired.
func (k *keyTable) take(size uint32) (*rmb, int, error) {
	for _, which := range [...]struct{ confirmed, retired bool }{{true, false}, {true, true}, {false, false}, {false, true}} {
		for _, r := range k.rmbs {
			if r.elementSize != size || (r.state == rmbConfirmed) != which.confirmed || r.retired != which.retired {
				continue
			}
			if i, ok := r.take(); ok {
				return r, i, nil
			}
		}
	}
	return nil, 0, ErrNeedRMB
}

// takeGone empties the list of RMBs that are gone.
func (k *keyTable) takeGone() []RMBID {
	gone := k.gone
	k.gone = nil
	return gone
}

// announced lists the RMBs that the peer knows or is being told about:
// it needs their RTokens on the new link (§3.5.5.2.3).
func (k *keyTable) announced() []RMBID {
	var ids []RMBID
	for _, r := range k.rmbs {
		if r.state != rmbNew {
			ids = append(ids, r.id)
		}
	}
	return ids
}

// peer finds the peer's RMB by the RKey it has on a link.
func (k *keyTable) peer(link LinkIndex, key rdma.RKey) *rtoken {
	for _, t := range k.peers {
		if t.knows(link) && t.tokens[link].RKey == key {
			return t
		}
	}
	return nil
}

// find finds the peer's RMB by an RToken of whatever link: the one that a
// CLC message named may have been lost meanwhile.
func (k *keyTable) find(v RToken) *rtoken {
	for _, t := range k.peers {
		for i := range LinkIndex(MaxLinks) {
			if t.knows(i) && t.tokens[i] == v {
				return t
			}
		}
	}
	for _, t := range k.peers {
		if v != (RToken{}) && slices.Contains(t.former[:], v) {
			return t
		}
	}
	return nil
}

// learn remembers a peer's RMB; nil when the table is full.
func (k *keyTable) learn(link LinkIndex, v RToken) *rtoken {
	t := k.peer(link, v.RKey)
	if t == nil {
		if len(k.peers) >= MaxRTokens { // make room: those that no link knows any more
			k.peers = slices.DeleteFunc(k.peers, func(t *rtoken) bool { return t.known == 0 })
		}
		if len(k.peers) >= MaxRTokens {
			return nil
		}
		t = &rtoken{}
		k.peers = append(k.peers, t)
	}
	k.set(t, link, v)
	return t
}

// set notes an RToken of a peer's RMB. An RKey means one RMB on each link:
// an older RMB that had it there is gone, although nobody told us.
func (k *keyTable) set(t *rtoken, link LinkIndex, v RToken) {
	for _, o := range k.peers {
		if o != t && o.knows(link) && o.tokens[link].RKey == v.RKey {
			o.known &^= 1 << link
		}
	}
	t.set(link, v)
}

// forget drops one of the peer's RMBs, and returns it; nil: there is none.
func (k *keyTable) forget(link LinkIndex, key rdma.RKey) *rtoken {
	t := k.peer(link, key)
	if t != nil {
		i := slices.Index(k.peers, t)
		k.peers = slices.Delete(k.peers, i, i+1)
	}
	return t
}

// retire keeps what was said of a link whose place another one gets.
func (k *keyTable) retire(l LinkIndex) {
	for _, t := range k.peers {
		t.retire(l)
	}
}

// free counts the elements of a size that a connection can have without
// another RMB, those of RMBs included that the peer is just being told of.
func (k *keyTable) free(size uint32) int {
	n := 0
	for _, r := range k.rmbs {
		if r.elementSize == size && r.isKnown() {
			n += len(r.elements) - r.usedCount
		}
	}
	return n
}

// isSurplus reports whether the peer shall forget an RMB: one that nobody uses when others
// of its size have as many free elements as it has, and two at least (§4.4: with some slack,
// so that RKeys do not come and go with single connections), or one in which
// only connections are left that the peer does not end.
func (k *keyTable) isSurplus(r *rmb) bool {
	switch {
	case r.state != rmbConfirmed || r.usedCount > r.zombies:
		return false
	case r.retired:
		return true
	case r.usedCount > 0:
		return false
	}
	return k.free(r.elementSize)-len(r.elements) >= max(len(r.elements), 2)
}

// unlist forgets an RMB of ours.
func (k *keyTable) unlist(r *rmb) {
	if i := slices.Index(k.rmbs, r); i >= 0 {
		k.rmbs = slices.Delete(k.rmbs, i, i+1)
		k.gone = append(k.gone, r.id)
	}
}

// hasReleasable reports whether any RMB has no use but for connections to come.
func (k *keyTable) hasReleasable() bool { return slices.ContainsFunc(k.rmbs, (*rmb).isReleasable) }
