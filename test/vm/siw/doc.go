// SPDX-License-Identifier: Apache-2.0

// Package siw tests our software iWARP against Linux' software iWARP, siw.
//
//	go test ./test/vm/siw
//	go test ./test/vm/siw -run 'TestSIW/programs/rping'
//
// There is one guest with siw of the pinned kernel's sources. A connection of iWARP is one of
// TCP: the machine that runs the guest joins it (lab.Join), and the test's own process is the
// peer of the RDMA programs of the distribution there, in both roles: byte by byte where a peer
// of ours would not say what siw is to hear, else with queue pairs of pkg/rdma/softiwarp. All
// that was on the wire tshark decodes at the end: another implementation that has to
// understand each frame.
//
// The conformance suite of providers runs in the guest, with siw at both ends, through libibverbs and rdma_cm, and at one of them, with
// softiwarp at the other: TestSIW_conformance of pkg/rdma/verbs; so do TestSIW_connect, about the ways to connect, TestSIW_rights, about
// what siw lets a peer do with memory, and TestSIW_sdp: connections of SDP are what those of TCP are. And the programs of demo/upgrade talk to each
// other, one on siw.
//
// iwpmd, the port mapper of rdma-core, runs in the guest for the last test: our client asks it for
// the programs there, and it asks our server for them.
//
// # Limitations
//
// The kernel is Debian's 6.12; Debian builds none with siw. Times say nothing: the guest is
// emulated.
//
// siw sends its Reply before it is ready to be told of more data. What comes right behind
// the Reply it sees only when more comes: softiwarp waits, and then sends a Write without data
// again, and so do the tests that write their frames themselves. A connection whose peer closes
// it between the Reply and the program's accept stops the kernel with a BUG in iw_cm, and so does
// a Reply with more than 256 bytes of private data, RFC 6581's four among them: no test does that, and softiwarp
// sends none (Config.LongReplies).
package siw
