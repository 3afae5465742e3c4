// SPDX-License-Identifier: Apache-2.0

// Command peer is one end of connections in a guest: with our engine, with the
// kernel's SMC as smc_run makes programs use it, or with TCP.
//
//	peer serve -stack kernel -listen 10.0.0.1:5000
//	peer dial -stack engine -device soft:10.0.0.2 -to 10.0.0.1:5000 -do echo,bulk:bytes=64M -conns 3
//
// What is done on a connection is a script of package script, which the client
// tells the server. The output is lines of package report. A server ends in
// order by SIGTERM or SIGINT, or after -count connections. SIGUSR1 tells a client
// that the time which a script was given is over.
//
// With several scripts a client runs one after the other, each on as many new
// connections as -conns says: these are all open before the script begins on
// any of them.
//
// # Who owns what
//
// A stack (listener or dialer) belongs to one run of the program and is closed
// before the last line is printed, which tells what it had left.
//
// # Limitations
//
// Linux only. The engine needs what package synopt needs. Built with cgo the
// engine has RDMA devices of the machine (-device verbs:NAME), without only the
// software device.
package main
