// SPDX-License-Identifier: Apache-2.0

// Package vf gives a pod its own RDMA device and takes it back: SR-IOV VFs, and
// network interfaces with an RDMA device that is not PCI (rxe, siw).
//
// [Host.Devices] lists what there is, [Host.Attach] wires one device into a
// pod's network namespace, [Host.Check] compares, [Host.Detach] and
// [Host.Collect] bring the device back as it was. Addresses and routes are the
// caller's; [Announce] tells the network about them afterwards.
//
// # Two ways of wiring
//
// [ModeMove] puts the device's network interface into the pod. The RDMA device
// of a real RNIC follows when the RDMA subsystem keeps devices apart by
// namespace ("exclusive") and stays where it is otherwise ("shared"). One of
// software dies with the move, so it is made again inside the pod, under its
// former name. That needs a kernel whose rxe carries traffic in other
// namespaces than the first one, which [Host.Probe] finds out by trying.
//
// [ModeIPVlan] is for kernels where it does not: the interface stays in the host
// with its RDMA device, and the pod gets an ipvlan child of it for TCP.
//
// [ModeAuto] takes the first that works.
//
// # What is remembered where
//
// The journal <DataDir>/devices/<id>.json is on disk before the first change. It
// has the owner and the original state, whole, and is not a list of steps: to
// bring a device back means to compare it with the original state and to change
// what differs, so it does not matter where an Attach was killed, and it can be
// done twice. The owner and the most important of the original state are also in
// the interface's alias, which stays with it when the journal is lost and when
// the namespace ends and the kernel gives the interface back.
//
// # Who owns what
//
// A [Host] is a value without state. Everything that changes a device holds the
// lock <DataDir>/devices/<id>.lock (flock, so it ends with its process), and
// only changes a device whose journal, or alias if there is no journal, names
// the owner it acts for.
//
// # Limitations
//
// Of an interface that is moved, name, MAC, MTU, alias, addresses and whether
// it was up come back; routes by hand, sysctls and queueing disciplines do not.
// Moving one that has the default route, or belongs to a bridge or bond, is
// refused. When somebody else took the name meanwhile, the interface keeps the
// one that the kernel gave it.
package vf
