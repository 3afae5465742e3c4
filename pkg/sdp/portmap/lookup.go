// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/smcr-io/kube-smcr/internal/invariant"
)

// State is where a [Lookup] stands.
type State uint8

// States. All but the first are final.
const (
	Waiting     State = iota
	Accepted          // there is an SDP address
	Denied            // the server says that there is none
	NoAnswer          // not one, to all the PMReqs that may be sent
	Unreachable       // the network or the host says that nobody is there to answer
)

func (s State) String() string {
	names := [...]string{"WAITING", "ACCEPTED", "DENIED", "NO ANSWER", "UNREACHABLE"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Verdict is what a client made of a datagram.
type Verdict uint8

// Verdicts. All but the first say why it was discarded.
const (
	Taken      Verdict = iota
	Malformed          // no message
	NotAnswer          // a PMReq or PMAck
	Stranger           // of no transaction of ours (§7.5.1)
	Late               // the transaction has its answer (§7.5.1)
	BadAddress         // an SDP address to which nobody should be sent
	verdicts
)

func (v Verdict) String() string {
	names := [verdicts]string{"taken", "malformed", "not an answer", "stranger", "late", "bad address"}
	if v < verdicts {
		return names[v]
	}
	return fmt.Sprintf("Verdict(%d)", uint8(v))
}

// LookupConfig is a question. The zero values of Tries and Timeout are the defaults.
type LookupConfig struct {
	Service netip.AddrPort // conventional address
	CP      netip.AddrPort // from where the connection will be made
	Handle  uint64         // random, and of no other transaction from CP for as long as packets live
	Tries   int            // PMReqs at most
	Timeout time.Duration  // until the second one; doubled each time
}

// Lookup is one transaction of a client (§7.5.1).
//
//	          PMAccept
//	WAITING -----------> ACCEPTED      a PMAck is to be sent
//	  | | |   PMDeny
//	  | | +------------> DENIED
//	  | |   no answer to the last PMReq
//	  | +--------------> NO ANSWER
//	  |   HandleUnreachable
//	  +----------------> UNREACHABLE
type Lookup struct {
	cfg      LookupConfig
	state    State
	sent     int // PMReqs
	deadline time.Time
	out      Message // to be sent, if any
	has      bool
	answer   Message // the PMAccept
}

// NewLookup begins a transaction.
func NewLookup(now time.Time, c LookupConfig) *Lookup {
	if c.Tries == 0 {
		c.Tries = DefaultTries
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	invariant.Must(c.Tries > 0 && c.Tries <= MaxTries && c.Timeout > 0 && c.Timeout <= MaxTimeout, "portmap: lookup without bounds")
	l := &Lookup{cfg: c}
	l.request(now)
	return l
}

// request sends a PMReq, the same each time (§7.5.1).
func (l *Lookup) request(now time.Time) {
	l.put(Message{Type: Request, Handle: l.cfg.Handle, CP: l.cfg.CP, AP: l.cfg.Service})
	l.deadline = now.Add(l.cfg.Timeout << l.sent)
	l.sent++
}

func (l *Lookup) put(m Message) { l.out, l.has = m, true }

// State returns the state.
func (l *Lookup) State() State { return l.state }

// Answer returns the SDP address of a lookup that was accepted, and how long it is good for.
func (l *Lookup) Answer() (netip.AddrPort, CacheTime) {
	invariant.Must(l.state == Accepted, "portmap: answer of a lookup that was not accepted")
	return l.answer.AP, l.answer.CacheTime
}

// Poll appends the datagram that is to be sent to the server, and reports whether there is one.
func (l *Lookup) Poll(b []byte) ([]byte, bool) {
	if !l.has {
		return b, false
	}
	l.has = false
	return l.out.Append(b), true
}

// NextTimeout returns when HandleTimeout is due.
func (l *Lookup) NextTimeout() (time.Time, bool) { return l.deadline, l.state == Waiting }

// HandleTimeout sends the next PMReq when its time has come, or gives up (§7.5.1).
func (l *Lookup) HandleTimeout(now time.Time) {
	switch {
	case l.state != Waiting || now.Before(l.deadline):
	case l.sent < l.cfg.Tries:
		l.request(now)
	default:
		l.become(NoAnswer)
	}
}

// HandleUnreachable is for an error of the network, or of the server's host: nobody will answer.
func (l *Lookup) HandleUnreachable() {
	if l.state == Waiting {
		l.become(Unreachable)
	}
}

// HandleDatagram takes a datagram that came from where the PMReq went to. The first answer
// counts, and each other one is discarded (§7.5.1).
func (l *Lookup) HandleDatagram(b []byte) Verdict {
	m, err := ParseMessage(b)
	switch {
	case err != nil:
		return Malformed
	case m.Type != Accept && m.Type != Deny:
		return NotAnswer
	case m.Handle != l.cfg.Handle || m.CP.Port() != l.cfg.CP.Port() || m.CP.Addr() != l.cfg.CP.Addr().WithZone(""):
		return Stranger
	case l.state != Waiting:
		return Late
	case m.Type == Deny:
		l.become(Denied)
		return Taken
	case !mayConnect(l.cfg.Service.Addr(), m.AP):
		return BadAddress
	}
	l.become(Accepted)
	l.answer = m
	ack := m // §7.4: all but type and PmTime as in the PMAccept
	ack.Type, ack.CacheTime = Ack, OneUse
	l.put(ack)
	return Taken
}

// become ends the transaction. A PMReq that was not sent yet is not sent any more.
func (l *Lookup) become(s State) { l.state, l.deadline, l.has = s, time.Time{}, false }

// mayConnect tells whether who asked for a service may be sent to an SDP address: another host is the
// server's right (§7.4), but a client is never sent to itself by somebody else, or to no host.
func mayConnect(service netip.Addr, to netip.AddrPort) bool {
	a := to.Addr()
	switch {
	case to.Port() == 0, a.IsUnspecified(), a.IsMulticast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return false
	case a.Is4() != service.Is4(), a.Is4In6() && a != service.WithZone(""):
		return false
	}
	return !a.IsLoopback() || service.IsLoopback()
}
