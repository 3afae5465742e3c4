// SPDX-License-Identifier: Apache-2.0

// Package dra is the driver for dynamic resource allocation (resource.k8s.io/v1)
// in the node agent: pods claim the node's RDMA devices by their attributes.
//
//	d := dra.New(dra.Config{Client: clientset, Node: name, DataDir: dir, Inventory: inv, Log: log})
//	d.Run(ctx)
//
// A [Driver] publishes the devices of package inventory as ResourceSlices and prepares the
// claims that the scheduler allocated. Preparing a claim means to write its record (package
// claims): pods get no device file, so there is nothing for the container runtime to do.
// The CNI plugin then moves a claimed VF into the pod, and the agent runs the pod's link
// groups on the claimed devices. The driver also writes into the status of the claim which
// interface, with which addresses, the plugin made of a claimed VF.
//
// An [Assigned] reads the records for the agent. Every agent has one, also an agent that
// drains, or whose driver cannot start.
//
// # Devices
//
// A VF is for one claim of one pod. Other devices are shared: up to [MaxSharers] pods may
// have one at a time. Where the API server does not support consumable capacity (before
// Kubernetes 1.36), each shared device is published as [MaxSharers] slots.
// A device whose port is down stays in the slice, with linkState "down", which
// the DeviceClass does not select.
//
// # Who owns what
//
// The goroutine of Run starts and stops the servers for kubelet, and publishes;
// another one writes the status of claims. kubelet's calls come on goroutines of gRPC, one
// at a time: Kubernetes' helper package has a lock file, which also serializes the calls of
// two agents of the node. All state is on disk.
//
// # Limitations
//
// A claim that several pods share must be for shared devices. It is prepared once, when the first of
// the pods starts. Kubelet does not tell of pods for which it is reserved later: they have the node's
// devices. Attributes that need the RDMA device, such as its name, are missing for a VF whose device is
// in a pod.
package dra
