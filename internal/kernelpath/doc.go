// SPDX-License-Identifier: Apache-2.0

// Package kernelpath makes the TCP sockets of chosen pods sockets of the kernel's SMC,
// without a library, a wrapper or a change of the pod: an eBPF program gives socket(2) the
// protocol SMC in place of TCP. Their connections run on the kernel's SMC-R then, where the
// peer and the network allow it, and are TCP elsewhere.
//
//	err := kernelpath.Probe(kernelpath.Dir) // a *MissingError says what this machine lacks
//	c, err := kernelpath.Open(kernelpath.Config{Dir: kernelpath.Dir})
//	err = c.Choose(Choice{NetNS: cookie}) // of linux.NetNS.Cookie
//
// # Rules
//
// A rule is for a network namespace, by its cookie, or for a cgroup, by its ID: that of a pod in
// the host's network. A rule of a cgroup counts more than one of a namespace, and that of a
// deeper cgroup more than that of one above it. The program makes sockets of a task SMC
// if the rule that counts says so. It looks at socket(2) only: sockets that are there already
// stay what they are, so a program that listens must open its socket anew, and so do
// sockets that are made otherwise, as by io_uring.
//
// The cgroups of [Config.Exclude] are never chosen: the agent's own, which opens
// sockets in pods. The root cgroup cannot be excluded.
//
// # Pods
//
// A pod is a linux.Place: a network namespace or, in that of the node, a cgroup. [Chooser.Attach] does all that it needs: it filters
// the option of SMC-R on SYNs by the policies, since the kernel would offer it to everybody (linux.FilterOption), sets the sizes
// of buffers in a namespace of the pod's own, and makes the rule. [Chooser.Detach] takes it back. [Fit] tells whether the kernel finds an
// RDMA device for a pod, and [AddUEIDs] gives the machine's SMC its enterprise IDs.
//
// Pods with a veth need more, which [Veths] make where [PodConfig] has Veth: what they make is on the node, and in a record, as long as the
// pod is attached, whoever lives.
//
// [Conns] lists the connections of a pod, and [Chooser.WatchFallbacks] tells of those that become TCP, as they do. [Revoke] ends the connections on SMC-R of a pod that its filter no longer selects.
//
// # Who owns what
//
// With a directory of the BPF file system the program and its rules are pinned there.
// They work on when this process ends, however it ends, and the next Open finds
// them; [Unpin] takes them away. A newer program takes the place of an older one without a
// moment in between. Without a directory they end with the [Chooser]. The second program, which tells
// of fallbacks, is not pinned and ends with its watch. The Chooser's methods may be called by several goroutines.
//
// Namespaces' cookies and cgroups' IDs are not used again, so a rule that is left behind does nothing.
// But there is room for a bounded number ([ErrFull]): who knows which pods there are
// forgets the others' ([Chooser.Others]).
//
// # Limitations
//
// Linux 6.11 with CONFIG_SMC, CONFIG_MPTCP (whose source has the hook), CONFIG_BPF_JIT and
// BTF; root, or CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN. Of the programs on the hook the last one is asked
// first, and decides if it answers: one that comes after ours takes its pods, until [Chooser.Lead] or the next
// Open. While a [Chooser] is open the module smc cannot be unloaded; when none is, and no pod has a socket
// of SMC, who unloads it, and keeps the kernel from loading it again, has pods' sockets refused. Cgroups deeper than 12 levels are
// judged by their first 12, and there is no rule for the root cgroup. Of pods that have a namespace Fit knows those with a VF or another RDMA device's own interface, and those with a macvlan
// or ipvlan child of one; with Veths, those with a veth that has an IPv4 address. One RNIC serves all of these, and if its own address is taken away and comes
// back, its GID may come after that of ours for a while: connections are then opened slowly, and are TCP. Between two of one node the kernel takes 4 s to
// fall back to TCP, so their addresses have to be among the filter's Never. Revoke sees the programs that /proc
// shows, and needs CAP_SYS_PTRACE. A socket that only a process outside of the pod's network namespace has, or
// none, as one that is on its way through a Unix socket, it does not find, and says so.
package kernelpath
