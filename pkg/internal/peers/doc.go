// SPDX-License-Identifier: Apache-2.0

// Package peers bounds how many places of a listener one peer can take, so that a peer that connects again and again, and says
// nothing, leaves places to others.
//
//	peer := peers.Of(conn.RemoteAddr())
//	if !places.Take(peer) {
//		return conn.Close()
//	}
//	defer places.GiveBack(peer)
//
// A [Places] belongs to its listener, and is safe for concurrent use.
//
// # Limitations
//
// The places of all peers together are not bounded here. A listener has a bound of its own for that, and this also bounds how many
// peers are remembered.
package peers
