// SPDX-License-Identifier: Apache-2.0

// Package portmapper asks and answers where a service listens for SDP, over UDP: the port mapper
// of the Sockets Direct Protocol (draft-pinkerton-iwarp-sdp-01, §7), which rdma-core's iwpmd
// speaks, too. The protocol is that of [github.com/smcr-io/kube-smcr/pkg/sdp/portmap]; this
// package is its shell.
//
// A client knows the conventional address of a service, where it listens for TCP:
//
//	c, err := portmapper.NewClient(portmapper.ClientConfig{})
//	conn, path, err := c.Dial(ctx, nil, netip.MustParseAddrPort("192.0.2.1:5001"))
//	// path.Mapped: conn is to the SDP address, and SDP is spoken; else it is plain TCP to the
//	// conventional address, and path.Reason says why.
//
// [Client.Lookup] is the question alone, for who connects by other means. Its error is a
// [*LookupError] with the same reasons.
//
// A server says where the services of its host listen for SDP:
//
//	s, err := portmapper.Listen(netip.MustParseAddrPort("192.0.2.1:3935"), portmapper.ServerConfig{})
//	err = s.Map(netip.MustParseAddrPort("192.0.2.1:5001"), netip.MustParseAddrPort("192.0.2.1:35001"))
//
// Where iwpmd runs it has the port, in the host's network namespace, and a client is enough.
//
// # When it is asked
//
// Once for each connection, but: an answer that may be kept is kept as long; and a port mapper that
// did not answer is not asked again for [DefaultSilentFor], since a host without one, behind a network
// that says nothing, costs each question 3.75 s. An SDP address that refuses the connection
// is forgotten.
//
// # What strangers can do
//
// A server hears a bounded number of datagrams per second of each peer, remembers a bounded
// number of peers and of transactions, answers with one datagram as long as the one asked for or
// with none, and never to an address that many hosts have. [Server.Stats] counts what it
// discards, by reason. A flood that fills the socket's buffer has the kernel drop what others send, too:
// they ask again, and then use plain TCP. A client hears only the server that it asked; who sees
// the question can answer it, and send the client to any host and port but its own.
//
// # Limitations
//
// Nothing is authenticated and nothing is encrypted. A connection of [Client.Dial] has a port of this
// host's for itself, because the question names it, where connections to different services may
// share one otherwise. It is a matter of Linux: a server names the address that an answer leaves
// from.
package portmapper
