// SPDX-License-Identifier: Apache-2.0

// Package peers counts the places of a listener that each peer has, so that one that connects and says nothing leaves places to
// others.
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
// It bounds what one peer has, and not what all have: a listener has a bound of its own for that, which also bounds the memory here.
package peers
