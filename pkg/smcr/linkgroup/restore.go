// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/cdc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// SnapshotError says which field of a snapshot cannot be.
type SnapshotError struct {
	Field string // as in Snapshot, with dots: "Links.At[3].State"; "" if several do not fit together
	Err   error
}

func (e *SnapshotError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("link group: snapshot: %v", e.Err)
	}
	return fmt.Sprintf("link group: snapshot: %s: %v", e.Field, e.Err)
}

func (e *SnapshotError) Unwrap() error { return e.Err }

// Restore makes the group of a snapshot, with its connections: see [Group.ConnAt]. Of the
// Config only the timers and Rand count; the rest was settled, and is in the snapshot. A
// snapshot that no group can have given is refused as a whole, with a [*SnapshotError].
func Restore(now time.Time, cfg Config, s Snapshot) (*Group, error) {
	r := restorer{now: now, s: &s}
	r.header()
	if r.err != nil {
		return nil, r.err
	}
	cfg.Role, cfg.Version, cfg.Release, cfg.AllowRFC = s.Terms.Role, s.Terms.Version, s.Terms.Release, s.Terms.AllowRFC
	cfg.MaxLinks, cfg.MaxConns, cfg.UserID = s.Terms.Offered, uint8(s.Terms.MaxConns), s.Terms.UserID
	g := New(cfg)
	r.g = g
	g.dialect, g.maxLinks, g.maxConns, g.bigEndian = s.Terms.Dialect, s.Terms.MaxLinks, s.Terms.MaxConns, s.Terms.BigEndian
	g.state, g.err = s.State, s.Err.restore()
	g.Discarded, g.LLCSent, g.CDCSent = s.Discarded, s.LLCSent, s.CDCSent
	g.idleSince = r.time(s.IdleSince, "IdleSince")
	g.afterLoss = holdBack{lost: s.AfterLoss.Lost, until: r.time(s.AfterLoss.Until, "AfterLoss.Until")}
	for _, part := range []func(){r.links, r.exchanges, r.rmbs, r.peers, r.conns, r.queues, r.requests, r.lastWords} {
		if part(); r.err != nil {
			return nil, r.err
		}
	}
	if err := check(g); err != nil {
		return nil, &SnapshotError{Err: err}
	}
	return g, nil
}

// restorer makes a group of a snapshot, part by part, up to the first error.
type restorer struct {
	now    time.Time
	s      *Snapshot
	g      *Group
	tokens []*rtoken // of the peer, by number; the first one is nil
	err    error
}

// Errors of a SnapshotError.
var (
	errUnknown  = errors.New("unknown")
	errRange    = errors.New("out of range")
	errTooMany  = errors.New("too many")
	errTwice    = errors.New("there twice")
	errNoSuch   = errors.New("names what is not there")
	errMismatch = errors.New("does not fit the rest")
)

// require notes the first field that is not what it must be.
func (r *restorer) require(ok bool, why error, field string, args ...any) bool {
	if !ok && r.err == nil {
		// The clone keeps args on the stack of the many callers that are right.
		r.err = &SnapshotError{Field: fmt.Sprintf(field, slices.Clone(args)...), Err: why}
	}
	return ok && r.err == nil
}

// time is the time that an Instant means here.
func (r *restorer) time(t Instant, field string, args ...any) time.Time {
	if !t.Known {
		return time.Time{}
	}
	r.require(t.In >= -maxSpan && t.In <= maxSpan, errRange, field, args...)
	return r.now.Add(t.In)
}

// place is the place of a link, or none.
func (r *restorer) place(p uint8, field string, args ...any) place {
	if !r.require(p <= MaxLinks, errRange, field, args...) {
		return noPlace
	}
	return place(p)
}

func (r *restorer) endpoint(e Endpoint, field string, args ...any) Endpoint {
	r.require(e.RNIC < MaxRNICs, errRange, field+".RNIC", args...)
	r.require(e.QPN <= rdma.MaxQPN, errRange, field+".QPN", args...)
	r.require(e.MTU == 0 || e.MTU.Valid(), errRange, field+".MTU", args...)
	return e
}

func (r *restorer) header() {
	s, t := r.s, &r.s.Terms
	r.require(s.Version == SnapshotVersion, fmt.Errorf("%w: %d, this is version %d", errUnknown, s.Version, SnapshotVersion), "Version")
	r.require(t.Role <= Server, errUnknown, "Terms.Role")
	r.require(t.Version == llc.Version1 || t.Version == llc.Version2, errUnknown, "Terms.Version")
	r.require(t.Dialect <= llc.DialectLinux && (t.Version == llc.Version1 || t.Dialect == llc.DialectLinux), errUnknown, "Terms.Dialect")
	r.require(t.Offered > 0, errRange, "Terms.Offered")
	r.require(t.MaxLinks > 0 && t.MaxLinks <= MaxLinks, errRange, "Terms.MaxLinks")
	r.require(t.MaxConns > 0 && t.MaxConns <= MaxConns, errRange, "Terms.MaxConns")
	r.require(s.State <= Dead, errUnknown, "State")
	r.require(s.Err.Is < 1<<len(errorNumbers), errUnknown, "Err.Is")
}

// restoredError is an error that came with a snapshot.
type restoredError struct {
	text string
	is   []error
}

func (e *restoredError) Error() string   { return e.text }
func (e *restoredError) Unwrap() []error { return e.is }

func (s ErrorSnapshot) restore() error {
	if s == (ErrorSnapshot{}) {
		return nil
	}
	e := &restoredError{text: s.Text}
	for i, known := range errorNumbers {
		if s.Is>>i&1 != 0 {
			e.is = append(e.is, known)
		}
	}
	if len(e.is) == 1 && e.is[0].Error() == s.Text {
		return e.is[0]
	}
	return e
}

func (r *restorer) links() {
	s, t := &r.s.Links, &r.g.links
	r.require(s.Last < MaxLinks, errRange, "Links.Last")
	t.last, t.births, t.lastID = s.Last, s.Births, s.LastID
	for i := range t.at {
		t.at[i] = r.link(LinkIndex(i), &s.At[i])
		for k := range i {
			r.require(s.At[i].State != uint8(linkActive) || s.At[k].State != uint8(linkActive) || s.At[i].Born != s.At[k].Born,
				errTwice, "Links.At[%d].Born", i)
		}
	}
}

func (r *restorer) link(i LinkIndex, s *LinkSnapshot) link {
	const at = "Links.At[%d]"
	r.require(s.State <= uint8(linkDraining), errUnknown, at+".State", i)
	r.require(s.Born <= r.s.Links.Births, errRange, at+".Born", i)
	r.require(s.Inflight >= 0 && s.Inflight <= SendBudget, errRange, at+".Inflight", i)
	r.require(s.UntilLong >= 0 && s.UntilLong <= s.Inflight, errRange, at+".UntilLong", i)
	r.require(len(s.Queue) <= maxRestoredQueue, errTooMany, at+".Queue", i)
	l := link{
		index: i, id: s.ID, state: linkState(s.State), peerUserID: s.PeerUserID, born: s.Born, inflight: s.Inflight, untilLong: s.UntilLong,
		local: r.endpoint(s.Local, at+".Local", i), peer: r.endpoint(s.Peer, at+".Peer", i),
		drainBy: r.time(s.DrainBy, at+".DrainBy", i), deletion: s.Deletion, sent: s.Sent, recv: s.Recv,
		health: r.health(i, &s.Health),
	}
	for k, b := range s.Queue {
		if r.err != nil {
			return l
		}
		long := r.g.isV2() && len(b) > llc.Size && len(b) <= MaxMessage
		r.require(len(b) == llc.Size || long, errRange, at+".Queue[%d]", i, k)
		var m message
		if long {
			m.long = bytes.Clone(b)
		} else {
			copy(m.short[:], b)
		}
		l.queue = append(l.queue, m)
	}
	return l
}

func (r *restorer) health(i LinkIndex, s *HealthSnapshot) health {
	const at = "Links.At[%d].Health"
	r.require(s.Slowest >= 0 && s.Slowest <= maxSpan/8, errRange, at+".Slowest", i)
	r.require(s.Answer >= 0 && s.Answer <= maxSpan/8, errRange, at+".Answer", i)
	return health{
		waiting: r.time(s.Waiting, at+".Waiting", i),
		pace:    pace{slowest: s.Slowest, done: s.Done, mark: s.Mark, since: r.time(s.Since, at+".Since", i)},
		heard:   r.time(s.Heard, at+".Heard", i), testSent: r.time(s.TestSent, at+".TestSent", i), testData: s.TestData,
		proven: r.time(s.Proven, at+".Proven", i), answer: s.Answer,
	}
}

// exchanges restores what goes on about links.
func (r *restorer) exchanges() {
	s, g := r.s, r.g
	r.require(s.Setup.Step <= uint8(setupDone), errUnknown, "Setup.Step")
	g.setup = setup{step: setupStep(s.Setup.Step), deadline: r.time(s.Setup.Deadline, "Setup.Deadline"), failed: s.Setup.Failed}
	a := &s.Adding
	r.require(a.Step <= uint8(addWaitConfirm), errUnknown, "Adding.Step")
	r.require(a.Link < MaxLinks, errRange, "Adding.Link")
	r.require(len(a.RMBs) <= MaxRMBs, errTooMany, "Adding.RMBs")
	r.require(a.Request.MTU <= 0x0f, errRange, "Adding.Request.MTU")
	r.require(a.Request.Reason <= 0x0f, errRange, "Adding.Request.Reason")
	r.require(a.Request.QPN <= rdma.MaxQPN, errRange, "Adding.Request.QPN")
	r.require(len(a.Request.Ext.Pairs) <= llc.MaxPairsV2, errTooMany, "Adding.Request.Ext.Pairs")
	g.adding = adding{
		step: addStep(a.Step), link: a.Link, via: r.place(a.Via, "Adding.Via"), fresh: a.Fresh, request: a.Request,
		rmbs: slices.Clone(a.RMBs), peerLeft: a.PeerLeft, since: r.time(a.Since, "Adding.Since"),
		deadline: r.time(a.Deadline, "Adding.Deadline"), again: a.Again,
	}
	g.adding.request.Ext.Pairs = slices.Clone(a.Request.Ext.Pairs)
	r.require(a.Step == uint8(addNone) || a.Via != uint8(noPlace), errMismatch, "Adding.Via")
	r.require(s.Growth.Held <= uint8(ourOperator), errUnknown, "Growth.Held")
	r.require(s.Growth.Wait >= 0 && s.Growth.Wait <= AddLinkRetryMax, errRange, "Growth.Wait")
	g.growth = growth{forbids: operator(s.Growth.Held), wait: s.Growth.Wait, at: r.time(s.Growth.At, "Growth.At")}
	g.ending = ending{byPeer: s.Ending.ByPeer, via: r.place(s.Ending.Via, "Ending.Via"), deadline: r.time(s.Ending.Deadline, "Ending.Deadline")}
	switch side := g.side.(type) {
	case *server:
		r.require(s.Side.Spare == 0 && !s.Side.SpareUntil.Known, errMismatch, "Side.Spare")
		side.asked = wish{via: r.place(s.Side.AskedVia, "Side.AskedVia"), gid: s.Side.AskedGID}
	case *client:
		r.require(s.Side.AskedVia == 0 && s.Side.AskedGID.IsZero(), errMismatch, "Side.AskedVia")
		side.spare, side.spareUntil = r.place(s.Side.Spare, "Side.Spare"), r.time(s.Side.SpareUntil, "Side.SpareUntil")
	}
}

func (r *restorer) rmbs() {
	s, k := &r.s.Keys, &r.g.keys
	r.require(len(s.RMBs) <= MaxRMBs, errTooMany, "Keys.RMBs")
	r.require(len(s.Gone) <= 1<<16, errTooMany, "Keys.Gone")
	k.last, k.gone = s.Last, slices.Clone(s.Gone)
	for i := range s.RMBs {
		if r.err != nil {
			return
		}
		v := &s.RMBs[i]
		const at = "Keys.RMBs[%d]"
		r.require(k.rmb(v.ID) == nil, errTwice, at+".ID", i)
		r.require(len(v.Elements) > 0 && len(v.Elements) <= maxRMBEs, errRange, at+".Elements", i)
		r.require(v.State <= uint8(rmbForgotten), errUnknown, at+".State", i)
		b := &rmb{
			id: v.ID, elementSize: v.ElementSize, retired: v.Retired, tokens: v.Tokens, registered: v.Registered, state: rmbState(v.State),
		}
		for n, e := range v.Elements {
			b.elements = append(b.elements, element{held: e.Held, stale: e.Stale, freed: r.time(e.Freed, at+".Elements[%d].Freed", i, n)})
		}
		k.rmbs = append(k.rmbs, b)
	}
}

func (r *restorer) peers() {
	s, k := &r.s.Keys, &r.g.keys
	r.require(len(s.Peers) <= MaxRTokens, errTooMany, "Keys.Peers")
	if !r.require(len(s.Forgotten) <= maxSlots+1, errTooMany, "Keys.Forgotten") {
		return
	}
	r.tokens = []*rtoken{nil}
	for _, list := range [][]PeerRMBSnapshot{s.Peers, s.Forgotten} {
		for _, v := range list {
			r.tokens = append(r.tokens, &rtoken{tokens: v.Tokens, known: v.Known, former: v.Former})
		}
	}
	k.peers = slices.Clone(r.tokens[1 : 1+len(s.Peers)])
	r.g.peerKeys = peerKeys{token: r.peerRMB(r.s.PeerKeys.PeerRMB, "PeerKeys.PeerRMB"), left: r.s.PeerKeys.Left}
	a := &r.s.OurKeys
	if !r.require(len(a.List) <= MaxLinks, errTooMany, "OurKeys.List") || !r.require(a.Told >= 0 && a.Told <= len(a.List), errRange, "OurKeys.Told") {
		return
	}
	r.g.ourKeys = announcement{n: len(a.List), told: a.Told, continued: a.Continued, links: a.Links}
	copy(r.g.ourKeys.list[:], a.List)
}

// peerRMB is the peer's RMB of a number.
func (r *restorer) peerRMB(n int, field string, args ...any) *rtoken {
	if !r.require(n >= 0 && n < len(r.tokens), errNoSuch, field, args...) {
		return nil
	}
	return r.tokens[n]
}

func (r *restorer) conns() {
	s, t := &r.s.Conns, &r.g.conns
	r.require(len(s.List) <= maxSlots, errTooMany, "Conns.List")
	t.retireAt = r.time(s.RetireAt, "Conns.RetireAt")
	for i := range s.List {
		if r.err != nil {
			return
		}
		r.conn(i, &s.List[i])
	}
	if r.err == nil {
		d := derive(r.g)
		d.set(r.g)
	}
}

// conn restores a connection.
func (r *restorer) conn(i int, s *ConnSnapshot) {
	const at = "Conns.List[%d]"
	g, t := r.g, &r.g.conns
	r.require(s.Slot >= len(t.list) && s.Slot < maxSlots, errRange, at+".Slot", i)
	r.require(int(s.Token&0xff) == s.Slot%slotsPerByte+1 && t.byToken(s.Token) == nil, errMismatch, at+".Token", i)
	r.require(s.Link != uint8(noPlace), errRange, at+".Link", i)
	c := &Conn{
		g: g, slot: s.Slot, token: s.Token,
		link: r.place(s.Link, at+".Link", i), target: r.place(s.Target, at+".Target", i), awaits: r.place(s.Awaits, at+".Awaits", i),
		named: r.place(s.Named, at+".Named", i), peerLink: r.place(s.PeerLink, at+".PeerLink", i), cameTo: s.CameTo,
		endpoint: r.endpoint(s.Endpoint, at+".Endpoint", i),
		rmb:      g.keys.rmb(s.RMB), element: s.Element, peerRMB: r.peerRMB(s.PeerRMB, at+".PeerRMB", i),
		offset: s.Offset, peerSize: s.PeerSize, peerTok: s.PeerToken,
		deadline: r.time(s.Deadline, at+".Deadline", i), since: r.time(s.Since, at+".Since", i),
		done: s.Done, zombie: s.Zombie, replaced: s.Replaced,
		writes: s.Writes, messagesSent: s.MessagesSent, messagesRecv: s.MessagesRecv,
	}
	r.require(s.Named != uint8(noPlace), errRange, at+".Named", i)
	r.require(c.rmb != nil, errNoSuch, at+".RMB", i)
	if !r.require(c.rmb != nil && s.Element >= 0 && s.Element < len(c.rmb.elements), errNoSuch, at+".Element", i) {
		return
	}
	e := &c.rmb.elements[s.Element]
	r.require(e.isFree(), errTwice, at+".Element", i)
	r.require(!s.Done || !s.Zombie, errMismatch, at+".Zombie", i)
	r.connData(i, s, c)
	if r.err != nil {
		return
	}
	e.becomeUsed()
	t.list = append(t.list, make([]*Conn, s.Slot-len(t.list)+1)...)
	t.list[s.Slot] = c
}

// connData restores the streams of a connection, and compares them with what the group
// knows of its two RMBEs.
func (r *restorer) connData(i int, s *ConnSnapshot, c *Conn) {
	const at = "Conns.List[%d]"
	known := s.PeerSize != 0
	r.require(known == (s.PeerRMB != 0), errMismatch, at+".PeerRMB", i)
	r.require(known == (s.PeerToken != 0), errMismatch, at+".PeerToken", i)
	r.require(!known && s.Offset == 0 || known && s.Offset%uint64(s.PeerSize) == 0 && s.Offset/uint64(s.PeerSize) < maxRMBEs, errRange, at+".Offset", i)
	r.require(s.Data.Local.Size == c.rmb.elementSize, errMismatch, at+".Data.Local.Size", i)
	r.require(s.Data.Peer.Size == s.PeerSize, errMismatch, at+".Data.Peer.Size", i)
	r.require(s.Data.Token == s.PeerToken, errMismatch, at+".Data.Token", i)
	if r.err != nil {
		return
	}
	var err error
	if c.data, err = cdc.Restore(s.Data); err != nil {
		var bad *cdc.SnapshotError
		field := fmt.Sprintf(at+".Data", i)
		if errors.As(err, &bad) {
			field += "." + bad.Field
		}
		r.err = &SnapshotError{Field: field, Err: err}
	}
}

// queues restores the lines in which connections wait.
func (r *restorer) queues() {
	g := r.g
	for i := range g.links.at {
		for k, slot := range r.s.Links.At[i].Ready {
			c := g.ConnAt(slot)
			if !r.require(c != nil, errNoSuch, "Links.At[%d].Ready[%d]", i, k) || !r.require(!c.queued, errTwice, "Links.At[%d].Ready[%d]", i, k) {
				return
			}
			g.links.at[i].ready.push(c)
		}
	}
	for k, slot := range r.s.Conns.Closing {
		c := g.ConnAt(slot)
		if !r.require(c != nil && !c.deadline.IsZero(), errNoSuch, "Conns.Closing[%d]", k) ||
			!r.require(c.clockPrev == nil && g.conns.closing.head != c, errTwice, "Conns.Closing[%d]", k) {
			return
		}
		g.conns.closing.push(c)
	}
	for i := range r.s.Conns.List {
		s := &r.s.Conns.List[i]
		c := g.ConnAt(s.Slot)
		waits := c.clockPrev != nil || g.conns.closing.head == c
		r.require(waits == !c.deadline.IsZero(), errMismatch, "Conns.List[%d].Deadline", i)
	}
}

func (r *restorer) requests() {
	s, g := &r.s.Requests, r.g
	r.require(len(s.Line) <= maxExchanges, errTooMany, "Requests.Line")
	r.require(!s.Sent || len(s.Line) > 0 && s.Via != uint8(noPlace), errMismatch, "Requests.Sent")
	g.requests = requests{
		sent: s.Sent, via: r.place(s.Via, "Requests.Via"), began: r.time(s.Began, "Requests.Began"),
		expiry: r.time(s.Expiry, "Requests.Expiry"), resend: r.time(s.Resend, "Requests.Resend"),
	}
	for i, f := range s.Line {
		if r.err != nil {
			return
		}
		const at = "Requests.Line[%d]"
		kind := exchangeKind(f.Kind)
		r.require(kind <= exchangeDeleteAll, errUnknown, at+".Kind", i)
		ofServer, ofClient := kind == exchangeAddLink || kind == exchangeDeleteLink, kind == exchangeAskDelete
		r.require(!ofServer || g.role == Server, errMismatch, at+".Kind", i)
		r.require(!ofClient || g.role == Client, errMismatch, at+".Kind", i)
		r.require(f.Tries >= 0 && f.Tries <= maxRKeyRetries, errRange, at+".Tries", i)
		switch kind {
		case exchangeConfirmRKey:
			r.require(len(f.RMBs) == 1, errMismatch, at+".RMBs", i)
		case exchangeDeleteRKey:
			r.require(len(f.RMBs) > 0 && len(f.RMBs) <= llc.MaxDeleteRKeysV2, errMismatch, at+".RMBs", i)
		case exchangeAddLink, exchangeDeleteLink, exchangeAskDelete, exchangeDeleteAll:
			r.require(len(f.RMBs) == 0, errMismatch, at+".RMBs", i)
		}
		for _, id := range f.RMBs {
			r.require(g.keys.rmb(id) != nil, errNoSuch, at+".RMBs", i)
		}
		g.requests.line = append(g.requests.line, exchange{
			kind: kind, rmbs: slices.Clone(f.RMBs), tries: f.Tries, notBefore: r.time(f.HoldUntil, at+".HoldUntil", i),
			deletion: f.Deletion, fresh: f.Fresh,
		})
	}
}

func (r *restorer) lastWords() {
	s := &r.s.Last
	for i, n := range s.Inflight {
		r.require(n >= 0 && n <= SendBudget, errRange, "Last.Inflight[%d]", i)
	}
	r.g.last = lastWords{
		known: s.Known, owed: s.Owed, reason: s.Reason, again: r.time(s.Again, "Last.Again"), until: r.time(s.Until, "Last.Until"),
		links: s.Links, inflight: s.Inflight,
	}
}
