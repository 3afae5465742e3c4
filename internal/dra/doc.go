// SPDX-License-Identifier: Apache-2.0

// Package dra is the driver for dynamic resource allocation (resource.k8s.io/v1)
// in the node agent: pods claim the node's RDMA devices by their attributes.
//
//	d := dra.New(dra.Config{Client: clientset, Node: name, DataDir: dir, Inventory: inv, Log: log})
//	d.Run(ctx)
//
// A [Driver] publishes the devices of package inventory as ResourceSlices and
// prepares the claims that the scheduler allocated. To prepare a claim is to
// record it (package claims): pods get no device file, so there is nothing for the
// container runtime. The CNI plugin then moves a claimed VF into the pod, and the
// agent runs the pod's link groups on what the pod claimed.
//
// What the plugin made of a claimed VF, the interface in the pod with its addresses,
// stands in the status of the claim.
//
// An [Assigned] reads the records for the agent. It works in every agent, also in
// one that drains and one whose driver cannot start.
//
// # Devices
//
// A VF goes to one claim of one pod. Other devices are shared: up to
// [MaxSharers] pods have one at a time. Where the API server knows no consumable
// capacity (before Kubernetes 1.36), each of them is published as so many slots.
// A device whose port is down stays in the slice, with linkState "down", which
// the DeviceClass does not select.
//
// # Who owns what
//
// The goroutine of Run starts and stops the servers for kubelet, and publishes;
// another one writes the status of claims. kubelet's calls come on goroutines of
// gRPC, one at a time, also with another agent beside this one: the helper holds a
// lock file. All state is on disk.
//
// # Limitations
//
// A claim that several pods share must be for shared devices. Attributes that need
// the RDMA device, such as its name, are missing for a VF whose device is in a pod.
package dra
