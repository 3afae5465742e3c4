// SPDX-License-Identifier: Apache-2.0

// Package portmap is the protocol of SDP's port mapper (draft-pinkerton-iwarp-sdp-01, §7), by
// which a program that knows where a service listens for TCP learns where it listens for SDP:
// the one message format, the machine of a client's question, and the machine of a server.
//
// It is PURE: datagrams come in and go out as slices, time comes in as an argument, and
// NextTimeout says when HandleTimeout is due. The shell is [github.com/smcr-io/kube-smcr/pkg/sdp/portmapper].
//
// # Words
//
// The connecting peer (CP) is who wants the connection, the accepting peer (AP) has the service. The
// conventional address of a service is where it listens for TCP, the SDP address where for SDP.
// A transaction is a PMReq and what follows from it.
//
//	client                       server
//	  --- PMReq: CP, AP ----------->        AP is the conventional address
//	  <-- PMAccept: CP, AP ---------        AP is the SDP address
//	  --- PMAck -------------------->
//	or
//	  <-- PMDeny --------------------       the conventional address it is
//
// # Who owns what
//
// A [Lookup] is one transaction of a client, a [Server] all of a server's. Neither is safe for
// concurrent use. A server's owner says which services it has ([Server.Map]); whatever peers
// send, it takes a bounded amount of memory, costs bounded work for each datagram, is counted, and
// is answered with one datagram of the same length or with none.
//
// # What the draft leaves open
//
// The draft has no times but those of the cache: the others are in limits.go. It wants the ApPort
// of a PMDeny to be zero in §7.3.1.6 and that of the PMReq in §7.4: here it is that of the PMReq,
// as with rdma-core's iwpmd, and nobody reads it. iwpmd's PMReq has 64 bytes instead of 48, a port in
// the reserved field and rubbish behind IPv4 addresses; all of that is let through.
//
// # Limitations
//
// Nothing is authenticated: who sees a PMReq can answer it, and who can answer decides where the
// client connects to.
package portmap
