// SPDX-License-Identifier: Apache-2.0

package cdc

// ending is how far a connection is closed: what the application wants, which of the flags
// D (done), C (closed) and A (abort) each side has sent, and the state that follows from
// these. Its transitions are the arrows of [State].
type ending struct {
	state                          State
	wantDone, wantClose, wantAbort bool
	failed                         bool  // ended without the peer: nothing may be sent
	sentFlags                      Flags // D, C, A that we have sent
	peerFlags                      Flags // D, C, A that the peer has sent
}

// peerIsDone reports whether the peer writes no more.
func (e *ending) peerIsDone() bool { return e.peerFlags.SendingDone() || e.peerFlags.Closed() }

// peerReleased reports whether the peer has said its last word.
func (e *ending) peerReleased() bool { return e.peerFlags.Closed() || e.peerFlags.Abort() }

// wasAborted reports whether the connection was reset by either side.
func (e *ending) wasAborted() bool { return e.sentFlags.Abort() || e.peerFlags.Abort() || e.wantAbort }

// hasSentClose reports whether we have said our last word.
func (e *ending) hasSentClose() bool { return e.sentFlags.Closed() || e.sentFlags.Abort() }

// isClosedByAny reports whether either side has sent C: no data moves any more.
func (e *ending) isClosedByAny() bool { return e.sentFlags.Closed() || e.peerFlags.Closed() }

// mayWrite reports whether data may still go to the peer.
func (e *ending) mayWrite() bool { return !e.wantAbort && !e.isClosedByAny() }

// wantsEnd reports whether the application writes no more.
func (e *ending) wantsEnd() bool { return e.wantDone || e.wantClose }

// abort resets the connection; the peer is told by A.
func (e *ending) abort() Events {
	switch e.state {
	case Closed, PeerAbortWait, ProcessAbort:
		return 0
	case Active, PeerCloseWait1, PeerCloseWait2, AppCloseWait1, AppCloseWait2, AppFinCloseWait, PeerFinCloseWait:
	}
	e.wantAbort = true
	e.state = PeerAbortWait
	return Aborted
}

// fail ends the connection without the peer.
func (e *ending) fail() Events {
	e.failed = true
	if e.state == Closed {
		return 0
	}
	e.state = Closed
	e.wantAbort = true
	return Aborted | Ended
}

// closeDue returns the closing flag that may go out once all data is delivered
// (§4.8.1, 3A); 0: none.
func (e *ending) closeDue() Flags {
	if e.wantAbort {
		return 0
	}
	var f Flags
	if e.wantClose && !e.sentFlags.Closed() {
		return f.WithClosed()
	}
	if e.wantDone && !e.sentFlags.SendingDone() && !e.sentFlags.Closed() {
		return f.WithSendingDone()
	}
	return 0
}

// abortDue reports whether A is to go out.
func (e *ending) abortDue() bool {
	return e.wantAbort && !e.sentFlags.Abort() && !e.sentFlags.Closed()
}

// sentAbort is the transition after our A went out (4.8.2). That is the end if the peer has
// said its last word, which is its A, or its C, after which the peer does not answer our A.
func (e *ending) sentAbort() Events {
	e.sentFlags = e.sentFlags.WithAbort()
	if e.state == ProcessAbort || e.peerReleased() {
		e.state = Closed
		return Ended
	}
	return 0
}

// sent is the transition after the flag that closeDue gave went out.
func (e *ending) sent(closing Flags) {
	switch {
	case closing.Closed():
		e.sentFlags = e.sentFlags.WithClosed()
		e.sentClosed()
	case closing.SendingDone():
		e.sentFlags = e.sentFlags.WithSendingDone()
		e.sentDone()
	}
}

// sentDone is the transition after our D went out (4.8.1, 3A and 4B).
func (e *ending) sentDone() {
	switch e.state {
	case Active:
		e.state = PeerCloseWait1
	case AppCloseWait1:
		e.state = AppCloseWait2
	case Closed, PeerCloseWait1, PeerCloseWait2, AppCloseWait2, AppFinCloseWait, PeerFinCloseWait, PeerAbortWait, ProcessAbort:
	}
}

// sentClosed is the transition after our C went out (4.8.1, 3A, 3D and 4C).
func (e *ending) sentClosed() {
	switch e.state {
	case Active:
		e.state = PeerCloseWait1
	case AppCloseWait1, AppCloseWait2:
		if e.peerFlags.Closed() {
			e.state = Closed
		} else {
			e.state = PeerFinCloseWait
		}
	case AppFinCloseWait:
		e.state = Closed
	case Closed, PeerCloseWait1, PeerCloseWait2, PeerFinCloseWait, PeerAbortWait, ProcessAbort:
	}
}

// handleDone takes the peer's D.
func (e *ending) handleDone() Events {
	if e.peerFlags.SendingDone() {
		return 0
	}
	e.peerFlags = e.peerFlags.WithSendingDone()
	e.peerDone()
	return PeerDone
}

// handleClosed takes the peer's first C.
func (e *ending) handleClosed() Events {
	e.peerFlags = e.peerFlags.WithClosed()
	e.peerClosed()
	return PeerDone
}

// peerDone is the transition when the peer's D arrived (4.8.1, 3B and 4A).
func (e *ending) peerDone() {
	switch e.state {
	case Active:
		e.state = AppCloseWait1
	case PeerCloseWait1:
		e.state = PeerCloseWait2
	case Closed, PeerCloseWait2, AppCloseWait1, AppCloseWait2, AppFinCloseWait, PeerFinCloseWait, PeerAbortWait, ProcessAbort:
	}
}

// peerClosed is the transition when the peer's C arrived (4.8.1, 3C, 3D, 4A
// and 4D).
func (e *ending) peerClosed() {
	switch e.state {
	case Active:
		e.state = AppCloseWait1
	case PeerCloseWait1, PeerCloseWait2:
		if e.sentFlags.Closed() {
			e.state = Closed
		} else {
			e.state = AppFinCloseWait
		}
	case PeerFinCloseWait:
		e.state = Closed
	case PeerAbortWait:
		if e.hasSentClose() { // else our A must still go out
			e.state = Closed
		}
	case Closed, AppCloseWait1, AppCloseWait2, AppFinCloseWait, ProcessAbort:
	}
}

// handleAbort answers the peer's reset (§4.8.2, 2A and 2B).
func (e *ending) handleAbort() Events {
	e.peerFlags = e.peerFlags.WithAbort()
	if e.hasSentClose() { // the peer has our last word already
		e.state = Closed
		return Aborted | Ended
	}
	e.wantAbort = true
	e.state = ProcessAbort
	return Aborted
}

// handleLate takes the flags of a message for a connection that is Closed: given up without
// the peer, of whom it counts that it writes no more.
func (e *ending) handleLate(f Flags) { e.peerFlags |= f & (flagClosed | flagAbort) }
