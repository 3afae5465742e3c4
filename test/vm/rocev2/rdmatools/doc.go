// SPDX-License-Identifier: Apache-2.0

// Package rdmatools plays the other end of the RDMA tools that distributions
// have: ibv_rc_pingpong of libibverbs and the ib_* programs of perftest.
//
// Those programs tell each other the numbers of their queue pairs over a TCP
// connection and then use verbs. This package does the same with any
// [rdma.Device], in both roles, so that the real program in a guest completes
// against a device of ours.
//
//	report, err := rdmatools.Run(ctx, conn, dev, rdmatools.Config{Tool: rdmatools.WriteBW, Iters: 100, SizeBytes: 65536, PSN: 1})
//
// # The exchange
//
// It was observed between two programs of Debian 12 (libibverbs-utils 44.0,
// perftest 4.5+0.20, which calls itself 6.06 in the exchange). All of it is in
// turns of equal length: the client writes and reads, the server reads and
// writes.
//
// ibv_rc_pingpong: one turn of 52 bytes, the text LID:QPN:PSN:GID in
// hexadecimal with a zero byte behind it; then the client writes "done" and a
// zero byte, upon which both may send.
//
// perftest: turns of 16 bytes (version), 4 (0x1000, see cycleBuffer), 4 (0x40,
// the cache line), 2 (the path MTU's code as a digit) and then four of 108
// bytes, of which the last three only say that the side is ready:
//
//	LID:reads:QPN:PSN:rkey:address:16 bytes of GID:SRQ number:
//
// After the traffic the programs that measure one side's bandwidth have five
// turns of 8 bytes with the client's results; all but ib_write_lat end with
// another 108 bytes and with "done" from both sides.
//
// # Limitations
//
// RC over one queue pair, one size, by number of iterations. What the other
// program prints is the caller's to look at; it verifies no data.
package rdmatools
