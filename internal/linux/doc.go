// SPDX-License-Identifier: Apache-2.0

// Package linux is the part of the node agent and the CNI plugin that talks to the kernel:
// network namespaces, nftables, policy routing, socket options and socket diagnosis are
// here and nowhere else in internal/.
//
// # Namespaces
//
// [OpenNetNS] returns a [NetNS], a handle on one network namespace. Only [NetNS.Do] calls
// setns. A handle keeps its namespace alive, so its owner watches [NetNS.Gone] and closes
// the handle then.
//
// # Addresses
//
// [SetInterfaceIPs] gives an interface of a pod the addresses and routes that
// IPAM chose, [CheckInterfaceIPs] looks for them, and [Addresses] lists what a
// namespace has.
//
// [SetShadows] gives the node addresses of pods, to which packets go on as before, and [AddInet] gives one of its interfaces a
// network in which it has no address: that is what the kernel's SMC-R looks at of a pod that has a veth.
//
// # Redirection
//
// [InstallRedirect] puts into one pod's namespace everything that the agent
// needs there, and a [Redirect] is the handle on it:
//
//   - the nftables table inet kube-smcr, always changed as a whole in one
//     transaction;
//   - chain outbound (nat, output) and outbound-to: a new TCP connection to a
//     selected destination goes to the agent's listener on loopback. The
//     agent's own sockets (by mark) and everything on the loopback interface
//     are left alone. The agent learns the destination with [OriginalDst];
//   - chain inbound (filter, prerouting) and inbound-to: a SYN that carries
//     the SMC-R option (RFC 7609 appendix A.1: kind 254, E2D4C3D9) goes to the
//     agent's transparent listener ([ControlTransparent]). A SYN without the
//     option is not touched, nor is one from a link-local IPv6 address, nor one that
//     is forwarded, nor one to a port on which nobody listens, which the kernel refuses
//     as it does without us;
//   - chain doors (filter, input) and doors-to: a program that connects to the
//     address of these listeners itself is refused. If the kernel cannot refuse,
//     its SYNs are dropped. [OriginalDst] and [TransparentDst] recognize such a
//     connection, too;
//   - chains caught-out and caught-in, see below;
//   - chain renew (filter, output): a packet of the agent renews the diversion, see below;
//   - chains untracked-out and untracked-in, with [RedirectConfig.Untracked];
//   - chain answer (filter, output): a SYN to a required destination that a rule of another
//     program excludes from connection tracking, and so from the diversion, is refused;
//   - a rule, routes and a sysctl that bring the answers of the application
//     back to the agent when it connects under the client's address
//     ([DialFrom]);
//   - a sysctl that makes connection tracking forget a connection as soon as it is
//     reset. By default it remembers the connection, and that it was diverted, for
//     ten seconds. If a connection of the agent gets the same port for the same
//     destination in that time, it is diverted too, to the agent itself.
//
// # Other redirectors
//
// Another program may redirect connections in the namespace, as the sidecar of a
// service mesh does. Then the two could divert each other's connections without end:
//
//	application -> agent -> sidecar -> agent -> sidecar -> ...
//
// [FindOthers] finds such rules. It reads a bounded number of rules, because a program
// that may set up a pod's network can make very many. Rules that are added later are
// noticed when they take effect: if the destination of an agent's SYN was changed, a rule
// of ours puts an element into the set "caught" before the SYN is delivered, and nothing
// is diverted while that element is there ([Redirect.Caught]).
//
// FindOthers also finds rules that match the user, group or cgroup of packets, which do not
// know the agent's packets for those of the program for which it sends them, rules that
// change marks, and rules that exclude packets from connection tracking, which are not diverted
// then. Nothing notices them when they take effect, but that the last do not hold for what is required.
//
// # Connection tracking
//
// The table makes the kernel load connection tracking for the namespace. With Untracked,
// packets that are not TCP, and TCP connections that no set selects, are not tracked, so
// that they do not fill the table of connections (nf_conntrack_max). A rule excludes the
// SYN of such a connection, and a sysctl makes the kernel not track connections from their
// middle. Other programs' rules in the namespace may need tracking: then Untracked must
// not be set.
//
// # Sysctls
//
// Before a variable is changed, its value is stored in the set "found". [Sweep] restores
// it, also after the agent was killed. A variable that another program changed since is
// left alone.
//
// # Fail open
//
// Every rule that diverts first looks into the set "alive", which has one element that
// expires after [RedirectConfig.FailOpenTTL]. The agent renews the element
// ([Redirect.Renew]) at least three times per period. An agent that was killed, hangs or was
// stopped does not, and when the element has expired, new connections go directly to their
// destination. With one element instead of a timeout on each destination, a renewal costs
// the same for every policy. It is a packet that a rule notices, and no transaction: these wait
// for one another, in all namespaces of a machine while one of them takes long.
//
// The kernel resets redirected connections when the last nat chain of a
// namespace is deleted, even for an instant, and breaks them when the last rule that needs
// connection tracking is deleted. So [Redirect.Update] changes the table in one
// transaction, [Redirect.Remove] and [EndDiversion] only empty "alive", and only [Sweep]
// deletes the table.
//
// # The wire
//
// [InstallWireFilter] puts the table inet kube-smcr-wire into the host's
// namespace. RoCEv2 packets (UDP port 4791) reach the addresses of our RDMA devices only
// from the devices of other nodes and from configured peers, and never by the interfaces
// of pods. Packets of pods to other nodes' devices, and of other users' local processes,
// do not leave. There is a counter for each reason to drop a packet. The table is replaced
// as a whole in one transaction, in which the counters keep their values. It stays when
// its agent is killed: the next agent replaces it. Only the agent that manages the node
// may remove the table; an agent that managed the node before may remove its own
// ([WireFilter.RemoveOwn]). The filter does not see packets that an RNIC takes without the
// kernel.
//
// # The option of the pod's own kernel
//
// Where the kernel of a pod offers SMC-R by itself (package kernelpath), [FilterOption] takes the
// option from the SYNs that no policy selects. The table inet kube-smcr-option needs no agent that
// lives: nobody renews it, and it filters until [SweepOptionFilter].
//
// A pod in the node's own network is a [Place] in that namespace: the sockets of a [Cgroup], and of those below it. Its table has the
// cgroup's ID in its name, and "socket cgroupv2" in its rules. [Cgroups] is the hierarchy as the node's first process sees it, and
// [Cgroups.FindPods] knows how kubelet names what it makes for pods. A socket belongs to the cgroup in which its program
// was when it made it, and what a listener accepts to that of the listener, wherever the programs are now.
//
// # Sockets of pods' programs
//
// [TCPConns] lists the connections of a namespace, [TCPSockets] with those that listen and their cgroups, [FindSocketFiles] finds the programs in it that have
// some sockets, [SocketFile.Open] opens one, and [ShutDown] ends its connection. That needs the processes
// of the node in /proc, and the right to open their files.
//
// # Held SYNs
//
// With [RedirectConfig.Hold] the SYNs of a pod's applications to selected destinations wait in a
// netfilter queue of its namespace, a [Queue], and a [Holder] gives each a verdict, as package
// synqueue decides: it goes on as the application's own connection, or with a mark, by which
// rules divert it to the agent or refuse it as its destination did. [ProbeQueue] tells whether the
// kernel has queues, and by which expression rules say so.
//
// With nobody on the queue SYNs go on at once. The process of [KeepQueues] has a copy of the
// queue's socket: it lets go what an agent that was killed had held, and what one that was stopped
// holds for longer than [KeeperPatience]. What is held is lost, until TCP repeats it, when
// anybody takes a base chain of any table out of the namespace. A table that holds SYNs is
// therefore changed in place.
//
// # Who owns what
//
// A Redirect belongs to one attachment of the agent; its methods may be called
// from several goroutines. The caller owns the listeners and their ports. A
// WireFilter belongs to the agent; its methods may be called from several goroutines, too.
// A namespace has one such table, so only one agent may have a WireFilter for it.
//
// # Limitations
//
// DialFrom cannot use a client's link-local IPv6 address. The connections of a client to one
// server port have different ephemeral ports, those in TIME_WAIT included, so plain TCP sustains
// some 470 connections per second. On SMC-R, the connection between the agents takes one of these,
// and the one to the application one of the 4,536 ports above them. When those are in use or in
// TIME_WAIT, DialFrom takes one that Linux chooses; then, or if the client has another range, the
// client may choose the same one, and waits until it is free. [ErrNoPort] says that there is none.
//
// Concatenated interval sets need Linux 5.6; [Probe] says what else
// is missing on a machine. In a pod with a user namespace of its own the kernel may hide
// the variables of connection tracking. Then they are not set, and TCP is tracked in spite
// of Untracked. A redirector that gives packets another mark, or works without connection
// tracking, is found by FindOthers, but not by the set "caught".
package linux
