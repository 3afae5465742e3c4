// SPDX-License-Identifier: Apache-2.0

// Package siw tests our software iWARP against Linux' software iWARP, siw.
//
//	go test ./test/vm/siw
//	go test ./test/vm/siw -run 'TestSIW/programs/rping'
//
// There is one guest, with siw of the pinned kernel's sources. An iWARP connection is a TCP
// connection, so the machine that runs the guest joins its network (lab.Join), and the test's own process is
// the peer of the distribution's RDMA programs in the guest, in both roles. Where siw has to hear what
// softiwarp would never say, the test writes the bytes itself; everywhere else it has queue
// pairs of pkg/rdma/softiwarp. At the end tshark decodes everything that was on the wire: another
// implementation that has to understand each frame.
//
// These tests of pkg/rdma/verbs run in the guest, through libibverbs and rdma_cm, with siw at both ends and with siw at one end
// and softiwarp at the other:
//
//	TestSIW_conformance  the conformance suite of providers
//	TestSIW_connect      the ways to connect
//	TestSIW_rights       what siw lets a peer do with memory
//	TestSIW_sdp          SDP connections behave as TCP connections do
//
// Besides, the programs of demo/upgrade talk to each other, one of them on siw.
//
// For the last test iwpmd, the port mapper of rdma-core, runs in the guest: our client asks it about the
// programs there, and it asks our server about programs here.
//
// # Limitations
//
// The kernel is Debian's 6.12; Debian builds none with siw. Times say nothing: the guest is
// emulated.
//
// siw sends its Reply before it is ready to be told of more data, so it may overlook what arrives right behind
// the Reply until something else arrives. softiwarp waits a moment before it sends, and then sends empty
// WRITEs; the tests that write their frames themselves do the same.
//
// Two things stop the guest's kernel with a BUG in iw_cm, so no test does them: to close a connection between siw's Reply and the
// program's accept, and to send siw a Reply with more than 256 bytes of private data, RFC 6581's four among them
// (softiwarp does not, see Config.LongReplies).
package siw
