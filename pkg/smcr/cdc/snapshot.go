// SPDX-License-Identifier: Apache-2.0

package cdc

import "fmt"

// SnapshotVersion is the version of a [Snapshot] that this package writes, and the only
// one that it reads. A field that comes, goes or changes its meaning makes another one.
const SnapshotVersion = 1

// Snapshot is all that a [Conn] knows, as a plain value: it can be encoded, also as JSON,
// and given to another process. A Snapshot has nothing that follows from the rest.
type Snapshot struct {
	Version     uint8 // SnapshotVersion
	Local, Peer Ring  // Peer is zero before Activate
	SendBuffer  uint32
	Token       AlertToken // the peer's; 0 before Activate
	State       State
	Send        SendSnapshot
	Receive     ReceiveSnapshot
	End         EndSnapshot
}

// SendSnapshot is the stream that we write.
type SendSnapshot struct {
	Produced, Sent, Completed uint64
	PeerConsumed              uint64
	AnnouncedTo               uint64
	Seq, Written              uint16
	Told                      []SentSnapshot // messages whose delivery is not confirmed, the oldest first
	Blocked, Validate, Repeat bool
	AskUpdate                 bool
	Urgent                    uint64
	UrgentTold                bool
	UrgentSent                uint64
	Coalesce                  uint32
	Flushed                   uint64
}

// SentSnapshot is a message whose delivery is not confirmed.
type SentSnapshot struct {
	Pos               uint64
	Seq               uint16
	Write, Validation bool
}

// ReceiveSnapshot is the stream that the peer writes.
type ReceiveSnapshot struct {
	PeerProduced, Consumed, Announced uint64
	Seq                               uint16
	Replaying, Blocked, UpdateAsked   bool
	Urgent                            bool
	UrgentEnd                         uint64
}

// EndSnapshot is how far the connection is closed.
type EndSnapshot struct {
	WantDone, WantClose, WantAbort, Failed bool
	SentFlags, PeerFlags                   Flags // of D, C and A
}

// Snapshot returns all that the connection knows. [Restore] makes the same one of it.
func (c *Conn) Snapshot() Snapshot {
	s := Snapshot{
		Version: SnapshotVersion,
		Local:   c.recv.ring, Peer: c.send.ring, SendBuffer: c.send.buffer, Token: c.token, State: c.end.state,
		Send: SendSnapshot{
			Produced: c.send.produced, Sent: c.send.sent, Completed: c.send.completed,
			PeerConsumed: c.send.peerConsumed, AnnouncedTo: c.send.announcedTo,
			Seq: c.sentMsgs.seq, Written: c.sentMsgs.written,
			Blocked: c.send.blocked, Validate: c.failover.validate, Repeat: c.failover.repeat, AskUpdate: c.send.askUpdate,
			Urgent: c.urgentOut.next, UrgentTold: c.urgentOut.told, UrgentSent: c.urgentOut.sent,
			Coalesce: c.coalesce.below, Flushed: c.coalesce.flushed,
		},
		Receive: ReceiveSnapshot{
			PeerProduced: c.recv.peerProduced, Consumed: c.recv.consumed, Announced: c.recv.announced, Seq: c.recvMsgs.seq,
			Replaying: c.recvMsgs.replaying, Blocked: c.recv.peerBlocked, UpdateAsked: c.recv.updateAsked,
			Urgent: c.urgentIn.pending, UrgentEnd: c.urgentIn.end,
		},
		End: EndSnapshot{
			WantDone: c.end.wantDone, WantClose: c.end.wantClose, WantAbort: c.end.wantAbort, Failed: c.end.failed,
			SentFlags: c.end.sentFlags, PeerFlags: c.end.peerFlags,
		},
	}
	for i := range c.sentMsgs.told.size {
		m := c.sentMsgs.told.q[(c.sentMsgs.told.head+i)%MaxInflight]
		s.Send.Told = append(s.Send.Told, SentSnapshot{Pos: m.pos, Seq: m.seq, Write: m.write, Validation: m.validation})
	}
	return s
}

// SnapshotError says which field of a snapshot cannot be.
type SnapshotError struct {
	Field string // as in Snapshot, with dots: "Send.Told[3].Pos"
	Why   string
}

func (e *SnapshotError) Error() string { return fmt.Sprintf("cdc: snapshot: %s: %s", e.Field, e.Why) }

// Restore makes a connection of a snapshot. One that no connection can have given is
// refused with a [*SnapshotError].
func Restore(s Snapshot) (Conn, error) {
	if err := s.validate(); err != nil {
		return Conn{}, err
	}
	c := Conn{
		token: s.Token,
		send: sendRing{
			ring: s.Peer, buffer: s.SendBuffer,
			produced: s.Send.Produced, sent: s.Send.Sent, completed: s.Send.Completed,
			peerConsumed: s.Send.PeerConsumed, announcedTo: s.Send.AnnouncedTo,
			blocked: s.Send.Blocked, askUpdate: s.Send.AskUpdate,
		},
		coalesce:  coalescing{below: s.Send.Coalesce, flushed: s.Send.Flushed},
		urgentOut: sentUrgent{next: s.Send.Urgent, told: s.Send.UrgentTold, sent: s.Send.UrgentSent},
		sentMsgs:  sentMessages{seq: s.Send.Seq, written: s.Send.Written},
		recv: receiveRing{
			ring:         s.Local,
			peerProduced: s.Receive.PeerProduced, consumed: s.Receive.Consumed, announced: s.Receive.Announced,
			peerBlocked: s.Receive.Blocked, updateAsked: s.Receive.UpdateAsked,
		},
		urgentIn: receivedUrgent{pending: s.Receive.Urgent, end: s.Receive.UrgentEnd},
		recvMsgs: receivedMessages{seq: s.Receive.Seq, replaying: s.Receive.Replaying},
		failover: failover{validate: s.Send.Validate, repeat: s.Send.Repeat},
		end: ending{
			state:    s.State,
			wantDone: s.End.WantDone, wantClose: s.End.WantClose, wantAbort: s.End.WantAbort, failed: s.End.Failed,
			sentFlags: s.End.SentFlags, peerFlags: s.End.PeerFlags,
		},
	}
	for _, m := range s.Send.Told {
		c.sentMsgs.told.push(sentMessage{pos: m.Pos, seq: m.Seq, write: m.Write, validation: m.Validation})
	}
	return c, nil
}

// rule is something that a field of a snapshot must be.
type rule struct {
	ok    bool
	field string
	why   string
}

// firstBroken is the error of the first rule that does not hold; nil: all do.
func firstBroken(rules ...rule) error {
	for _, r := range rules {
		if !r.ok {
			return &SnapshotError{Field: r.field, Why: r.why}
		}
	}
	return nil
}

func (s *Snapshot) validate() error {
	err := firstBroken(
		rule{s.Version == SnapshotVersion, "Version", "unknown"},
		rule{s.Local.isPossible(), "Local", "impossible geometry"},
		rule{s.Peer == (Ring{}) || s.Peer.isPossible(), "Peer", "impossible geometry"},
		rule{s.Token == 0 || s.Peer.Size != 0, "Token", "of a peer whose RMBE is not known"},
		rule{s.State <= ProcessAbort, "State", "unknown"},
		rule{s.End.SentFlags&^endFlags == 0, "End.SentFlags", "more than D, C and A"},
		rule{s.End.PeerFlags&^endFlags == 0, "End.PeerFlags", "more than D, C and A"},
	)
	if err == nil {
		err = s.Send.validate(s)
	}
	if err == nil {
		err = s.Receive.validate(s.Local)
	}
	return err
}

// endFlags are those that a connection remembers.
const endFlags = flagSendingDone | flagClosed | flagAbort

// isPossible reports whether the geometry has room for data.
func (r Ring) isPossible() bool {
	return (r.Origin == OriginLinux || r.Origin == OriginRFC) && r.Size > r.Origin
}

// validate checks the order of positions that the comment of Conn has. What is left out
// of a window or a buffer comes from differences, which must not wrap.
func (s *SendSnapshot) validate(c *Snapshot) error {
	window := uint64(0)
	if c.Peer.Size != 0 {
		window = uint64(c.Peer.Capacity())
	}
	err := firstBroken(
		rule{s.Completed <= s.Sent, "Send.Completed", "beyond Sent"},
		rule{s.PeerConsumed <= s.Sent, "Send.PeerConsumed", "beyond Sent"},
		rule{s.Sent <= s.AnnouncedTo, "Send.Sent", "beyond AnnouncedTo"},
		rule{s.AnnouncedTo <= s.Produced, "Send.AnnouncedTo", "beyond Produced"},
		rule{s.AnnouncedTo-s.PeerConsumed <= window, "Send.AnnouncedTo", "beyond the peer's RMBE"},
		rule{s.Produced-s.Completed <= uint64(c.SendBuffer), "Send.Produced", "beyond the send buffer"},
		rule{s.Urgent == 0 || s.Urgent >= s.AnnouncedTo, "Send.Urgent", "sent before"},
		rule{s.UrgentSent <= s.AnnouncedTo, "Send.UrgentSent", "beyond AnnouncedTo"},
		rule{s.PeerConsumed >= s.UrgentSent || s.AnnouncedTo == s.UrgentSent, "Send.UrgentSent", "data was sent after it"},
		rule{s.Flushed <= s.Produced, "Send.Flushed", "beyond Produced"},
		rule{len(s.Told) <= MaxInflight, "Send.Told", "too many"},
	)
	if err != nil {
		return err
	}
	for i, m := range s.Told {
		if m.Pos > s.Sent {
			return &SnapshotError{Field: fmt.Sprintf("Send.Told[%d].Pos", i), Why: "beyond Sent"}
		}
	}
	return nil
}

func (s *ReceiveSnapshot) validate(local Ring) error {
	return firstBroken(
		rule{s.Announced <= s.Consumed, "Receive.Announced", "beyond Consumed"},
		rule{s.Consumed <= s.PeerProduced, "Receive.Consumed", "beyond PeerProduced"},
		rule{s.PeerProduced-s.Announced <= uint64(local.Capacity()), "Receive.PeerProduced", "beyond the RMBE"},
		rule{s.UrgentEnd <= s.PeerProduced, "Receive.UrgentEnd", "beyond PeerProduced"},
	)
}
