// SPDX-License-Identifier: Apache-2.0

package portmap

import "time"

const (
	// Port is the UDP port of port mappers (§16).
	Port = 3935

	// Len is the length of a message in bytes (§7.3). Longer datagrams are read as far as that.
	Len = 48

	// DefaultTries is how many PMReqs a client sends until it gives up, and DefaultTimeout how long it
	// waits for an answer to the first one; it is twice as long for each of the following ones. A
	// host without a port mapper, whose network says nothing either, costs 3.75 s, once per
	// a shell's memory of it; half a second is enough for most of the hosts that answer and
	// have lost a datagram.
	DefaultTries   = 4
	DefaultTimeout = 250 * time.Millisecond

	// MaxTries and MaxTimeout bound what a shell may ask for: 17 minutes in all.
	MaxTries   = 10
	MaxTimeout = time.Second

	// MaxCacheTime bounds how long an answer is kept that says it is good for ever: its server
	// may be long gone.
	MaxCacheTime = time.Hour

	// DefaultMaxMappings bounds a server's table, which is its owner's and of no peer's making. At
	// 100 bytes it is some 400 KiB.
	DefaultMaxMappings = 4096

	// DefaultMaxPending bounds the accepted transactions that wait for their PMAck, of all peers, at 200
	// bytes each; DefaultMaxPendingPerPeer those of one. More are denied (§15.2.1).
	DefaultMaxPending        = 4096
	DefaultMaxPendingPerPeer = 64

	// DefaultAckTimeout is how long a transaction waits for its PMAck, or for the connection: longer
	// than a client's last wait for an answer, and no longer than a flood should be felt.
	DefaultAckTimeout = 5 * time.Second

	// DefaultPeerRate is how many datagrams a server hears of one peer per second, and
	// DefaultPeerBurst how many at once: a connection takes two, and who makes more than this has a
	// cache.
	DefaultPeerRate  = 200
	DefaultPeerBurst = 400

	// DefaultMaxPeers bounds the peers whose rate is known. Those beyond it share the rate of one, so that
	// a flood from addresses without number leaves the known ones alone.
	DefaultMaxPeers = 4096
)
