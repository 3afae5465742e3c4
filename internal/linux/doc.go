// SPDX-License-Identifier: Apache-2.0

// Package linux is the kernel room of the node agent and the CNI plugin: network namespaces,
// nftables, policy routing, socket options and socket diagnosis live here and
// nowhere else in internal/.
//
// # Namespaces
//
// [OpenNetNS] gives a [NetNS], a handle on one network namespace. [NetNS.Do]
// is the only place of the program that calls setns. A handle keeps its
// namespace alive, so the owner watches [NetNS.Gone] and closes it.
//
// # Addresses
//
// [SetInterfaceIPs] gives an interface of a pod the addresses and routes that
// IPAM chose, [CheckInterfaceIPs] looks for them, and [Addresses] lists what a
// namespace has.
//
// # Redirection
//
// [InstallRedirect] puts into one pod's namespace everything that the agent
// needs there, and a [Redirect] is the handle on it:
//
//   - the nftables table inet kube-smcr, always replaced as a whole in one
//     transaction;
//   - chain outbound (nat, output) and outbound-to: a new TCP connection to a
//     selected destination goes to the agent's listener on loopback. The
//     agent's own sockets (by mark) and everything on the loopback interface
//     are left alone. The agent learns the destination with [OriginalDst];
//   - chain inbound (filter, prerouting) and inbound-to: a SYN that carries
//     the SMC-R option (RFC 7609 appendix A.1: kind 254, E2D4C3D9) goes to the
//     agent's transparent listener ([ControlTransparent]). A SYN without the
//     option never leaves its way to the application, nor does one to a port
//     on which nobody listens: its sender is refused as ever;
//   - chain doors (filter, input) and doors-to: whoever connects to these
//     listeners himself is refused. [OriginalDst] and [TransparentDst] know such
//     a connection, too;
//   - chains caught-out and caught-in, see below;
//   - chains untracked-out and untracked-in, with [RedirectConfig.Untracked];
//   - a rule, a route and a sysctl that bring the answers of the application
//     back to the agent when it connects under the client's address
//     ([DialFrom]);
//   - a sysctl that makes connection tracking forget at once a connection that
//     was reset. It remembers for ten seconds otherwise, together with the
//     diversion, and when a connection of the agent's gets the same port for the
//     same destination meanwhile, it would come back to the agent.
//
// # Other redirectors
//
// Another program may redirect connections in the namespace, as the sidecar of a
// service mesh does. What the agent sends would then come to that program, whose
// own connection would be diverted to the agent, and so on. [FindOthers] finds
// such rules. Rules that come later are caught in the act: when the destination of
// an agent's SYN was changed, a rule enters that in the set "caught", before the
// SYN gets anywhere, and nothing is diverted while it is there
// ([Redirect.Caught]).
//
// # Connection tracking
//
// The table loads connection tracking for the namespace. With Untracked all is
// kept from it that is not TCP, and connections that no set selects, so that they
// take no place in its table (nf_conntrack_max). Their SYNs are kept from it; the
// packets that follow are not taken up because a sysctl says so. Who else has
// rules there may count on tracking: then Untracked must not be set.
//
// # Sysctls
//
// What a variable was before is in the set "found" before it is changed. [Sweep]
// sets it back, also after an agent that was killed. A variable that somebody else
// changed meanwhile is left alone.
//
// # Fail open
//
// Every diversion begins with a look into the set "alive", whose one element
// expires after [RedirectConfig.FailOpenTTL]. The agent renews it
// ([Redirect.Renew]) about three times per period. An agent that was killed,
// hangs or was stopped renews nothing, and from then on new connections go
// straight to where they would go without it. One element instead of a
// timeout on each destination makes the renewal cost the same for every
// policy.
//
// The kernel resets redirected connections when the last nat chain of a
// namespace goes away, even for an instant, and cuts them when the last rule
// goes that needs connection tracking. So [Redirect.Update] replaces the table
// inside one transaction, [Redirect.Remove] only empties "alive", and only
// [Sweep] deletes.
//
// # The wire
//
// [InstallWireFilter] puts the table inet kube-smcr-wire into the host's
// namespace: RoCEv2 packets (UDP port 4791) reach the addresses of our RDMA
// devices only from the devices of other machines of ours and from configured
// peers, and never from where pods are; packets of pods to other machines'
// devices, and of other users' local processes, do not leave. Every reason to
// drop one has a counter. The table is replaced as a whole in one transaction, the
// counters go on, and it stays when its agent is killed: the next one replaces
// it. Only who manages the machine may remove it. Of what an RNIC takes without
// the kernel it sees nothing.
//
// # Who owns what
//
// A Redirect belongs to one attachment of the agent; its methods may be called
// from several goroutines. The caller owns the listeners and their ports. A
// WireFilter belongs to the agent, and its methods may be called so, too; a
// namespace has one table, so one agent manages it.
//
// # Limitations
//
// A client that has a link-local IPv6 address cannot be impersonated by
// DialFrom. A client has one range of ephemeral ports towards a pod, TIME_WAIT
// included: plain TCP sustains some 470 connections per second of one client to
// one server port. On SMC-R the connection between the agents and the one to the
// application each take such a port, so half as many (measured: 14,085 within a
// minute, then [ErrNoPort] until some leave TIME_WAIT).
//
// Concatenated interval sets need Linux 5.6; [Probe] says what else
// is missing on a machine. In a pod with a user namespace of its own the kernel
// may hide the variables of connection tracking; they are left alone then, and with
// Untracked TCP is tracked. A redirector that gives packets another mark, or works
// without connection tracking, is not caught, only found.
package linux
