// SPDX-License-Identifier: Apache-2.0

package cdc

// Size is the length of a CDC message (RFC 7609 A.4): what fits into a
// receive element without a buffer of its own.
const Size = 44

// MaxInflight is how many messages of one connection may be sent and not yet
// delivered. Each takes a receive element of the link, of which a Linux peer
// posts 48 for all connections; fewer than those, so that one connection
// cannot run the link dry.
const MaxInflight = 32

// maxSeqLag is how far the sequence number of a failover validation message
// may be behind: a quarter of the number space, since the peer tells old from
// new within half of it.
const maxSeqLag = 1 << 14
