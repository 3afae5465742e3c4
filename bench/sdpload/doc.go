// SPDX-License-Identifier: Apache-2.0

// Package sdpload makes the loads of package load on connections of SDP: streams by Write and Read, which copy, or by
// Buffers, which do not, and round trips. Either side says what its library has copied.
//
//	go sdpload.Serve(stack, listener)                      // the server
//	result, err := sdpload.Load(stack, conn, l, way)       // the client, on a connection of its own
//
// # Who owns what
//
// Serve owns the connections that it accepts; it ends with the listener, and what it answers with the stack. Load owns the
// connection that it is given, and closes it.
//
// # Limitations
//
// One connection, and messages of up to 1 MiB.
package sdpload
