// SPDX-License-Identifier: Apache-2.0

// Package plaintcp opens TCP connections and listeners that are never Multipath TCP, which package net prefers for listeners:
// what carries RDMA over a connection takes its descriptor over and sets options of TCP, and a Multipath TCP socket has not all of them.
//
//	l, err := plaintcp.Listen(ctx, "192.0.2.1:0")
//	c, err := plaintcp.Dial(ctx, net.Dialer{}, l.Addr().String())
//
// Connections and listeners are the caller's.
//
// # Limitations
//
// A Dialer that forces Multipath TCP by its Control function is not noticed.
package plaintcp
