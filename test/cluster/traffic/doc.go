// SPDX-License-Identifier: Apache-2.0

// The traffic command is the application of the end-to-end tests: it makes TCP
// connections in ways whose loss it can tell.
//
//	traffic serve :7000                 send back what comes
//	traffic once ADDR:7000              one connection
//	traffic connect ADDR:7000           say what connect() came to, and after how long
//	traffic cross ADDR:7100 --at=MS     the same, while ADDR connects to here, from port 7100 to port 7100
//	traffic full :7001                  listen with a backlog that is full
//	traffic load ADDR:7000              short connections, one after the other
//	traffic hold ADDR:7000              one connection that is never idle for long
//
// connect has the program's own ways: a socket that blocks, an IPv4 address on an IPv6 socket.
//
// load and hold write a line of JSON each second, and hold one when the
// connection ends. It knows nothing of SMC-R, but that with --smc the sockets of serve, once,
// load and hold are those of the kernel's SMC: for a machine outside of pods.
package main
