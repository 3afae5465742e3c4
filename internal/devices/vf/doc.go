// SPDX-License-Identifier: Apache-2.0

// Package vf gives a pod its own RDMA device and takes it back: SR-IOV VFs, and
// network interfaces with an RDMA device that is not PCI (rxe, siw).
//
// [Host.Devices] lists the devices, [Host.Attach] wires one device into a pod's network
// namespace, [Host.Check] compares a wiring with the state of the machine, [Host.Detach]
// and [Host.Collect] bring a device back to its original state. The caller sets addresses
// and routes; [Announce] tells the network about the addresses afterwards.
//
// # Two ways of wiring
//
// [ModeMove] puts the device's network interface into the pod. The RDMA device
// of a real RNIC is moved too if the RDMA subsystem separates devices by
// namespace ("exclusive"), and stays in the host if it does not ("shared"). The kernel
// removes a software RDMA device when its interface moves, so the device is made again
// inside the pod, with its former name. That needs a kernel whose rxe carries traffic in
// namespaces other than the first one, which [Host.Probe] finds out by trying.
//
// [ModeIPVlan] is for kernels whose rxe does not: the interface stays in the host with
// its RDMA device, and the pod gets an ipvlan child of the interface for TCP.
//
// [ModeAuto] chooses the first of the two that works.
//
// # The journal and the alias
//
// The journal <DataDir>/devices/<id>.json is on disk before the first change. It has the
// owner and the whole original state. It is not a list of steps: to bring a device back
// means to compare it with the original state and to change what differs. So it does not
// matter after which step an Attach was killed, and a device can be brought back twice.
// The owner and the most important parts of the original state are also in the interface's
// alias. The interface keeps the alias when the journal is lost, and when the pod's
// namespace ends and the kernel puts the interface back into the host.
//
// # Who owns what
//
// A [Host] is a value without state. A call that changes a device has the lock
// <DataDir>/devices/<id>.lock (flock, so the lock ends with its process), and changes only
// a device whose journal, or alias if there is no journal, names the owner that the call
// is for.
//
// # Limitations
//
// When an interface comes back, its names, MAC, MTU, alias, addresses, flags (see [Traits]) and
// whether it was up are restored; routes that somebody added, sysctls and queueing disciplines are not. An
// interface that has the default route, or belongs to a bridge or bond, is not moved. If
// another interface has the name by then, the interface is called "vf" and what the ID has
// of letters and digits.
package vf
