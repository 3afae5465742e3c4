// SPDX-License-Identifier: Apache-2.0

package linkgroup

import (
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
)

// side is what server and client do differently in the exchanges about links. It is one
// choice, made at first contact: that is why it has so many methods. What a side needs
// of the group comes as an argument.
type side interface {
	setupSide
	addSide
	deleteSide
	keySide
}

// setupSide is a side's part of the first contact: see setupStep.
type setupSide interface {
	// connected: the queue pair of the first link knows the peer's.
	connected(g *Group, now time.Time, l *link)
	handleConfirmLink(g *Group, now time.Time, l *link, m llc.ConfirmLink) error
	// firstNumber is the number that this side gives the first link; 0: the peer gives it.
	firstNumber(g *Group) llc.LinkID
	// dataInSetup deals with data that arrives while the second link is being set
	// up; false: they may not.
	dataInSetup(g *Group, now time.Time) bool
}

// addSide is a side's part of adding a link: see addStep.
type addSide interface {
	handleAddLink(g *Group, now time.Time, from *link, m llc.AddLink) error
	handleContinuation(g *Group, now time.Time, from *link, m llc.AddLinkContinuation) error
	handleRequestAddLink(g *Group, now time.Time, from *link, m llc.RequestAddLink)
	// addIfUseful puts the exchange in line if this side starts it and the group gains by
	// it; begin starts it over a link when its turn has come.
	addIfUseful(g *Group) bool
	begin(g *Group, now time.Time, via *link, fresh bool)
	// offered: the shell has a queue pair for the exchange; notOffered: it has none.
	offered(g *Group, now time.Time, l *link)
	notOffered(g *Group, now time.Time)
	// wished: the shell has a queue pair for a link of which the peer is still to hear.
	wished(g *Group, now time.Time, l *link)
	// retry tries to get another link once more.
	retry(g *Group)
	// declined ends the exchange when a link is given up that the peer has not been told
	// of; false: the peer waits for nothing.
	declined(g *Group, now time.Time) bool
	// abandoned says that a link is given up of which the peer knows; abandonedEnd follows
	// when the exchange has ended by that.
	abandoned(g *Group, m llc.DeleteLink)
	abandonedEnd(g *Group, now time.Time)
	// groupEnds: the group ends, and the exchange with it.
	groupEnds(g *Group)
	// ended: the exchange is over, and nobody asked for another one meanwhile. added and
	// notAdded: the group goes on with the new link, or without.
	ended(g *Group)
	added(g *Group, now time.Time)
	notAdded(g *Group, now time.Time)
	spareSide
}

// spareSide is the queue pair that a client has ready for the server's answer to its hint.
type spareSide interface {
	// spareIn reports whether the spare queue pair has this place.
	spareIn(p place) bool
	// spareTimeout is how long the spare queue pair is kept; zero: there is none.
	spareTimeout() time.Time
	// dropSpare gives the spare queue pair up; false: there is none.
	dropSpare(g *Group) bool
	// forget forgets what is still to be answered: the group ends.
	forget()
}

// deleteSide is a side's part of the deletion of a link.
type deleteSide interface {
	// deletion is how this side says that a link goes.
	deletion() exchangeKind
	// deleteInOrder takes a link out of service for an operator.
	deleteInOrder(g *Group, now time.Time, l *link, m llc.DeleteLink)
	// drained tells the peer of a link that no connection uses any more; dropped of
	// one that connections did not leave in time.
	drained(g *Group, l *link, m llc.DeleteLink)
	dropped(g *Group, m llc.DeleteLink)
	// sendDelete starts the exchange that is first in line.
	sendDelete(g *Group, now time.Time)
	handleDeleteLink(g *Group, now time.Time, from *link, m llc.DeleteLink)
	// handleDeleteSecond takes the deletion of a second link that has failed here, too.
	handleDeleteSecond(g *Group, now time.Time, from *link, m llc.DeleteLink)
	// addDeleted ends the exchange that adds a link because the peer has given the link up.
	addDeleted(g *Group, now time.Time, from *link, m llc.DeleteLink)
	// deleted finishes the deletion of a link. lost: one is gone by itself.
	deleted(g *Group, id llc.LinkID)
	lost(g *Group, now time.Time)
	// answersOrders reports whether this side says yes or no to what the peer wants of links, or
	// starts itself what the peer has asked for.
	answersOrders() bool
	// endsByAnswer reports whether an answer is the one to our DELETE LINK for all.
	endsByAnswer(m llc.DeleteLink) bool
	// endsWhenDelivered reports whether our DELETE LINK for all ends the group as soon as it is
	// delivered.
	endsWhenDelivered() bool
}

// keySide is a side's part of what is said about connections and their RMBs.
type keySide interface {
	// namesLinks reports whether it is our CLC message that chooses the link of a connection:
	// the Accept does, and the Confirm names the same one.
	namesLinks() bool
	// refusesKeys reports whether the peer is to say later what RKeys a new RMB has.
	refusesKeys(g *Group) bool
}

// server is the side that decides about links.
type server struct {
	asked wish // the client's REQUEST ADD LINK
}

// client is the side that follows, and asks.
type client struct {
	spare      place // what our hint to the server is about
	spareUntil time.Time
}

func newSide(r Role) side {
	if r == Server {
		return &server{}
	}
	return &client{}
}
