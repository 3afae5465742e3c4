// SPDX-License-Identifier: Apache-2.0

// Package streamfault is for tests of protocols on TCP: a proxy on loopback that hands a stream on in
// pieces, with pauses, and damages it once, all from a seed.
//
//	p := streamfault.Listen(t, seed, "127.0.0.1:0", server.Addr().String(), streamfault.Faults{Piece: 100})
//	conn, err := net.Dial("tcp", p.Addr())
//
// Where a stream is damaged follows from the seed alone. How its pieces meet with what the ends read
// and write does not: that is TCP's, and the scheduler's.
//
// # Who owns what
//
// Each direction of a connection is one goroutine's. All end, and all connections are closed, with
// the test.
//
// # Limitations
//
// A connection is damaged once. Packets are not lost, reordered or doubled: TCP mends that itself.
package streamfault
