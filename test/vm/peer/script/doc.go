// SPDX-License-Identifier: Apache-2.0

// Package script is what two ends do on a connection: one table of scripts,
// each with the client's and the server's part, over whatever carries the
// connection.
//
//	r := script.Dial(ctx, conn, spec, nil)  // spec, err := script.Parse("bulk:bytes=1M:size=64K")
//	r := script.Serve(ctx, conn)       // at the other end
//
// The client tells the server the script as the first message. Every byte of
// a stream is a function of its place, the connection's seed and the
// direction, so that both ends know what must come: a byte that is lost,
// doubled, moved by the size of a ring or of another connection is seen where
// it arrives. In the end the two compare what they counted.
//
// # Who owns what
//
// A script owns the connection while it runs, and has closed it when it ends,
// in the way that it is about. A context that ends resets the connection.
//
// # Limitations
//
// What a script expects of the end of a stream holds between our engine and
// the kernel in both roles. Where the two differ it only reports what it saw
// (see report.Conn.End), and the test judges.
package script
