// SPDX-License-Identifier: Apache-2.0

// Package machine starts a machine that is made of namespaces: mount, network,
// process, host name, IPC and cgroup namespace of its own, and a root directory
// of its own, in which /usr and what belongs to it are the host's, read only.
// The processes of a Kubernetes node run in it as on a node.
//
//	m, err := machine.Start(program, machine.Spec{Name: "n1", Root: dir, Logs: logs, Cgroup: "kube-smcr-x/n1"})
//	defer m.PowerOff()
//	err = m.StartService(machine.Service{Name: "containerd", Args: []string{"containerd"}})
//	out, err := m.Command(ctx, "nft", "list", "ruleset").Output()
//
// program is a binary whose main calls [Main] when [IsMachine] says so: it is
// the machine's process 1, which mounts, starts and stops services, and reaps.
//
// # Who owns what
//
// A Machine may be used by several goroutines. What is in Root and Logs
// survives PowerOff, as a disk does; /run, /tmp, the network and the processes
// do not. A machine ends, with all its processes, when PowerOff is called, when
// the process that started it ends in whatever way, or when its process 1 is
// killed. Nothing of it is in the host's namespaces but its process ids, two
// directories, and the directory of its cgroup, which [RemoveCgroup] removes.
//
// # Limitations
//
// Linux and root. The kernel is one, so that its modules, the few settings
// that no namespace isolates, memory and processors are shared: of these
// settings, the machine sees files of its own for those that kubelet writes.
// Both versions of cgroups work; the tests of this project ran on version 1.
package machine
