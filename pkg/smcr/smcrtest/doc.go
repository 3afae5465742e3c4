// SPDX-License-Identifier: Apache-2.0

// Package smcrtest is the room where SMC-R peers meet without a network: two
// peers, their link groups, links that behave as reliable queue pairs, and
// faults. Time and chance are the simulation's, so that a seed or a script
// always gives the same run.
//
// # Use
//
// A [World] has two peers. Connect starts a connection with its rendezvous;
// Write, Read, Shutdown, Close and Abort are what the applications at its two
// ends do; KillLink breaks a queue pair; Run lets time pass. Check says whether
// anything is wrong so far, and Finish ends everything in order and says
// whether something was lost, left or stuck. [Random] does all of that by
// chance.
//
// Real bytes move between real buffers: each end writes a stream that the
// other end can recompute, and every byte read is compared. The link takes
// them from the send buffer as late as a retransmission would, and puts them
// where the RDMA write says.
//
// A peer is either this project's package linkgroup, or a model of the Linux
// kernel's SMC-R, written apart from it: one RMBE per RMB, CONFIRM RKEY before
// and DELETE RKEY after each connection, its own rules for window updates, and
// requests dropped when exchanges cross.
//
// # Limitations
//
// The CLC messages of the rendezvous are function calls with a delay. A path
// between the peers has one link.
package smcrtest
