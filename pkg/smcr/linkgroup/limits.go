// SPDX-License-Identifier: Apache-2.0

package linkgroup

import "time"

// Limits of a link group.
const (
	// MaxLinks is the largest link group of RFC 7609 §2.2.2.
	MaxLinks = 8
	// MaxRNICs is how many of our devices a group can use: one for each link.
	MaxRNICs = MaxLinks
	// DefaultMaxLinks is what RFC 7609 §2.2.2 demands at least.
	DefaultMaxLinks = 2
	// MaxConns is what Linux carries on one group; more connections start a
	// parallel group (§3.5.3).
	MaxConns = 255
	// MaxRTokens bounds the peer's RMBs that we remember, as Linux does.
	MaxRTokens = 255
	// MaxRMBs bounds our own RMBs, because the peer remembers no more.
	MaxRMBs = 255
	// MaxMessage is the longest message of ours: ADD LINK of version 2 with all our RMBs.
	MaxMessage = 72 + 16*MaxRMBs
	// SendBudget is how many SENDs may be unacknowledged on a link: Linux
	// posts 48 receive buffers and answers a 49th with RNR NAK.
	SendBudget = 40
	// llcReserve is the part of SendBudget that only LLC messages may use, so
	// that data cannot starve them.
	llcReserve = 4
	// patientSends is how many SENDs of all connections may be unacknowledged
	// before it is worth while to hear at once when they are not: a quarter of
	// SendBudget, so that it is not used up meanwhile.
	patientSends = SendBudget / 4
	// RecvDepth is how many receive buffers the shell posts on a link; more
	// than any peer's SendBudget.
	RecvDepth = 64
	// SendDepth is the send queue a link needs: each message may follow two
	// RDMA writes.
	SendDepth = 3 * SendBudget
	// release1 is the release of version 2 since which CLC negotiates the limits.
	release1 = 1
	// maxExchanges bounds the LLC exchanges that wait for their turn.
	maxExchanges = 2 * MaxRMBs
	// maxLLCQueue bounds the LLC messages that wait for the send budget. Only a
	// peer that asks without taking the answers fills it.
	maxLLCQueue = 256
	// maxRestoredQueue bounds the same of a snapshot: an input adds few to a queue that
	// is nearly full, and so do our own requests.
	maxRestoredQueue = 2 * maxLLCQueue
	// maxRMBEs is what the one-byte index of CLC messages can say (A.2.3).
	maxRMBEs = 255
	// maxSlots is how many connections a client may have, those included that
	// the server has done with: several times MaxConns. The last byte of an alert
	// token tells slotsPerByte of them apart, and is not 0.
	maxSlots     = 4 * slotsPerByte
	slotsPerByte = 255
	// maxRKeyRetries bounds how often the peer may ask for a CONFIRM RKEY
	// again before the RMB counts as refused.
	maxRKeyRetries = 16
)

// Timers. RFC 7609 leaves the values open.
const (
	// ConfirmLinkTimeout is how long a client waits for the server's CONFIRM
	// LINK, as Linux does, and a server for the confirmation of a further link.
	ConfirmLinkTimeout = 4 * time.Second
	// ConfirmLinkReplyTimeout is how long the server of a first contact waits for
	// the answer to its own. A Linux client whose answer is on its way uses the
	// connection 3 s later, and a Decline after that would break it.
	ConfirmLinkReplyTimeout = 2500 * time.Millisecond
	// ExchangeTimeout is how long an LLC request waits for its answer.
	ExchangeTimeout = 5 * time.Second
	// ResendInterval is when a CONFIRM RKEY or DELETE RKEY without an answer
	// is sent again: Linux drops a request that crosses one of its own.
	ResendInterval = 2 * time.Second
	// DeleteAllInterval is after what time DELETE LINK for all is repeated while the
	// peer has not said that it knows: often enough for several in the time that
	// queue pairs outlive their group.
	DeleteAllInterval = 300 * time.Millisecond
	// lastWordsTime is how long a group that is over repeats it: about as long as its
	// queue pairs linger.
	lastWordsTime = time.Second
	// DrainTimeout is how long the messages under way on a link that is
	// deleted in order may take before they are repeated over another one: a
	// multiple of any round trip, well below what peers wait for an answer.
	DrainTimeout = 500 * time.Millisecond
	// StallTimeout is how long a link may at least owe all acknowledgements
	// while another link could carry its connections: longer than a busy peer
	// takes to be scheduled, shorter than people notice.
	StallTimeout = 200 * time.Millisecond
	// QuietStallTimeout is that of a link without connections: long enough for the
	// neighbour's address to be asked for twice, as Linux does after a second.
	QuietStallTimeout = 2500 * time.Millisecond
	// AddLinkRetryMin and AddLinkRetryMax are the first and the longest time
	// after which a server tries again to add a second link (C.8), and a client
	// asks for one again. Ports that come up, and clients that say so, are not
	// waited for.
	AddLinkRetryMin = time.Second
	AddLinkRetryMax = 10 * time.Minute
	// RKeyRetryInterval is between further tries of a CONFIRM RKEY while the
	// peer's configuration changes; maxRKeyRetries of them outlast ExchangeTimeout
	// by little.
	RKeyRetryInterval = 350 * time.Millisecond
	// TestLinkInterval is the quiet time after which a link is tested.
	TestLinkInterval = 10 * time.Second
	// TestLinkTimeout is how long a TEST LINK waits for its answer while another link
	// is alive.
	TestLinkTimeout = 2 * time.Second
	// LastLinkTimeout is that of a group's only link, and of each if none shows that
	// it is alive. With it the connections end, so it is longer than a peer in user
	// space may be kept from its processor: 3 s and more where pods compete for two
	// of them.
	LastLinkTimeout = 8 * time.Second
	// IdleTimeoutServer and IdleTimeoutClient end a group without
	// connections; the client waits longer, so that the server does it.
	IdleTimeoutServer = 600 * time.Second
	IdleTimeoutClient = 610 * time.Second
	// RMBEHold is how long RMBEs are kept from other connections after the
	// group lost a link, and after the peer can have heard of it if that is later:
	// longer than it takes to repeat what it thinks was lost.
	RMBEHold = 500 * time.Millisecond
	// ZombieGrace is how long a connection that was given up may keep its RMBE
	// before other RMBs are used first: longer than CLC messages and their
	// time-outs take.
	ZombieGrace = 15 * time.Second
	// CloseTimeout bounds the wait for a peer that does not close (§4.8.1).
	CloseTimeout = 60 * time.Second
	// maxSpan is how far from now the times of a snapshot may be: longer than any
	// group lives, and so short that sums of times do not overflow.
	maxSpan = 50 * 365 * 24 * time.Hour
)
