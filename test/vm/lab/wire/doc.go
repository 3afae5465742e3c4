// SPDX-License-Identifier: Apache-2.0

// Package wire is what the host and the program of a guest say to each other
// over a virtio serial port.
//
// A message is a kind, a stream and a payload. A stream is one command, numbered
// by the host; stream 0 is the port itself. The host begins with [Hello] and 16
// bytes of its own choice and forgets everything that it reads until the guest
// repeats them: what a host before it left in the port. Then:
//
//	host                         guest
//	Start (a Command)      ->
//	                       <-    Started (an Answer), or Exit with an error
//	Stdin (bytes)          ->
//	                       <-    StdinTaken: the next Stdin may come
//	StdinEnd               ->
//	                       <-    Stdout, Stderr (bytes)
//	Signal (one byte)      ->
//	                       <-    Exit (an Answer)
//	Ping                   ->
//	                       <-    Pong
//
// When the host closes the port, the guest kills the commands of that port.
package wire
