// SPDX-License-Identifier: Apache-2.0

// Package synqueue decides about SYNs of applications that the kernel holds in a
// queue of a pod's network namespace, until it is known where their connections
// go. It is PURE: it reads packets as bytes and takes the time as an argument.
//
// [ParseSYN] reads a held packet. A [Table] knows which SYNs are held, for what connection and
// since when, and what was found out about destinations:
//
//	    HandleSYN                              Answer, deadline
//	new ---------> held, "where can it go?" ------------------> decided, forgotten after a while
//	 |                                                             ^   |
//	 +-- no room: its late decision at once -----------------------+   | the same SYN once more:
//	 +-- the destination is known as plain: passes at once --------+---+ the same decision at once
//
// About a destination of which nothing is known, one question is asked at a time. Once one of its
// connections was on SMC-R, or was refused, each connection that waits has its own:
//
//	0 ms   SYN a to 10.0.0.2:80: held, asked
//	1 ms   SYN b to 10.0.0.2:80: held, waits for the answer about a
//	2 ms   answer about a: divert, the destination speaks SMC-R. a is diverted, b is asked
//	3 ms   SYN c to 10.0.0.2:80: held, asked
//
// What has no room does not wait. A program that tries very many destinations therefore takes the
// room from others that are new, but not from those that are known to speak SMC-R: they have some
// places more.
//
// # Who owns what
//
// A Table belongs to one pod and has one owner, who calls [Table.Poll] after every
// other call until there is nothing more, and carries out what it says. Every
// packet that HandleSYN was given gets exactly one verdict.
//
// # Limitations
//
// TCP of Linux does not repeat a SYN while an earlier copy is in the queue. A
// repeated one is therefore seen only after the kernel or somebody else emptied the
// queue, or after the first one passed, or if a program writes packets itself.
package synqueue
