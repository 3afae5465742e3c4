// SPDX-License-Identifier: Apache-2.0

// Package siw tests iWARP against Linux' software iWARP, siw.
//
//	go test ./test/vm/siw -run TestSIW/host$
//	go test ./test/vm/siw -run TestSIW/vectors -update
//
// There are two guests with siw of the pinned kernel's sources. Programs of the
// distribution run between them, for vectors. A connection of iWARP is one of TCP: the machine that runs the
// guests joins them (lab.Join), and a test talks to the programs there in both roles, byte
// by byte.
//
// # Vectors
//
// testdata has what siw said to siw, for tests that have no guests. Each line is one
// frame: who sent it, the initiator or the responder of MPA, and its bytes in hex. The
// first two are the Request and the Reply, what follows are FPDUs, in the order in which they
// were on the wire. Lines that begin with # say what it was.
//
// # Limitations
//
// The kernel is Debian's 6.12; Debian builds none with siw. Times say nothing: the guests are
// emulated.
//
// siw sends its Reply before it is ready to be told of more data. What comes right behind
// the Reply it sees only when more comes: between guests the tests delay packets, and from this
// machine they send Writes without data. A connection whose peer closes it between the Reply and
// the program's accept stops the kernel with a BUG in iw_cm, so that no test does that. Two siw
// were seen to stop in ib_read_bw with its own number of outstanding READs, for a reason that is
// not known: it has one at a time.
package siw
