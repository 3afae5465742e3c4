// SPDX-License-Identifier: Apache-2.0

// Package load makes load on connections of any kind, and measures it: round
// trips, streams, the opening of connections.
//
// The client says in the first bytes of each connection what the server shall do:
//
//	go load.Serve(listener, &held)                                   // server
//	r, err := load.Load{Kind: load.Echo, SizeBytes: 64, Duration: d}.Run(ctx, dial)
//
// # Who owns what
//
// Run closes the connections that it opened. Those of Hold belong to a Held.
// Serve ends with its listener.
//
// # Limitations
//
// A connection that is measured has to be able to close one direction.
package load
