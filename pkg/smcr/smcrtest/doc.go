// SPDX-License-Identifier: Apache-2.0

// Package smcrtest is the room where SMC-R peers meet without a network: two
// peers or more, their RNICs, their link groups, links that behave as reliable
// queue pairs, and faults. Time and chance are the simulation's, so that a seed
// or a script always gives the same run.
//
// # Use
//
// A [World] has peers with RNICs, each of which reaches all of the others'.
// Connect starts a connection with its rendezvous; Write, Read, Shutdown, Close
// and Abort are what the applications at its two ends do; Port, Remove, Insert,
// Blackhole, Heal, KillLink, Restart and JumpClock are what goes wrong; End has a peer
// end its groups in order; Run lets time pass. Check says whether anything is wrong so far, and Finish mends
// all faults, ends everything in order and says whether something was lost,
// left or stuck.
//
// A [Schedule] is a world and a list of such events, each an [Op]. [Random]
// draws one from a seed; Shorten removes what a failure does not need; String
// prints it as a scenario for testdata, which a reader of the protocol can
// follow.
//
// Of 28 bugs put in on purpose 22 were found within 3,000 schedules, 21 of them
// within 100: see docs/design/0008-simulation.md.
//
// # What is checked
//
// What each end sends is held against the rules of the sender: one sequence
// number after the other, a validation message with the right number after the
// loss of a link, no end before all writes are acknowledged. What the two sides
// of a rendezvous agree on is compared, and is what their settings demand.
//
// Real bytes move between real buffers: each end writes a stream that the other
// end can recompute. Each RDMA write must carry bytes of its stream to where
// they belong, into an RMBE that the connection holds, over no byte that is
// still to be read; every byte read is compared. The queue pair takes the bytes
// from the send buffer as late as a retransmission would. At the end both sides
// must agree on links and states, and nothing may be held that nobody uses.
//
// A peer is either this project's package linkgroup, or a model of the Linux
// kernel's SMC-R, written apart from it: one RMBE per RMB, CONFIRM RKEY before
// and DELETE RKEY after each connection, its own rules for window updates, two
// links, one LLC flow at a time, and requests dropped when exchanges cross. What it has under way when it moves a
// connection that is being closed to another link, it loses.
//
// # Handovers
//
// With Config.Handover the groups of this project are replaced, after each step or now and
// then, by what linkgroup.Restore makes of their snapshots. The world goes on as it would
// have without: tests compare all messages and events of each scenario, and of the first
// HANDOVER_SCHEDULES (2000) schedules, after a handover at each step.
//
// # Queue pairs
//
// Loss shows as delay, and at last as an error of the queue pair: what it then
// had under way has arrived or not. A blackhole of one direction lets requests
// arrive whose acknowledgements never come.
//
// # Rendezvous
//
// Each connection begins with a [clc.Client] and a [clc.Server], joined by a TCP
// connection that carries their bytes. What a shell decides, the simulator
// decides from what that side knows: the group, its link, whether to decline.
// Peers have version 1, version 2 or both, enterprise IDs, releases and limits;
// there may be a router between them.
//
// # Limitations
//
// The model of the kernel uses package clc for its own CLC messages, too.
package smcrtest
