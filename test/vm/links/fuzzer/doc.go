// SPDX-License-Identifier: Apache-2.0

// Command fuzzer is a client that makes a correct rendezvous of SMC-Rv2 and then
// breaks the protocol: LLC and CDC messages that are damaged, of a wrong length or
// at the wrong time, names of things that do not exist, RDMA writes that are not
// permitted, and more messages than there is room for.
//
//	fuzzer -device verbs:rxe0 -to 10.0.0.2:5000 -seed 1 -rounds 15
//
// Each round is one attack on a link group of its own. All that happens follows
// from the seed and the number of the round; one line of JSON per round tells
// what was sent. What becomes of the server is for others to judge.
//
// # Who owns what
//
// A round owns its TCP connection and its RDMA objects, and closes them in the end
// without a word to the peer.
//
// # Limitations
//
// It speaks version 2 only and has one link. How many messages arrive depends on
// when the server ends the link.
package main
