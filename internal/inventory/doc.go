// SPDX-License-Identifier: Apache-2.0

// Package inventory lists the devices that pods of a node can ask for, and tells
// when one comes, goes, or changes.
//
//	inv := inventory.New(inventory.Config{Host: vf.Host{}, Configured: configured, Log: log})
//	go inv.Run(ctx)
//	changed, stop := inv.Subscribe()
//	devices := inv.Devices()
//
// They are VFs, other RDMA devices of the kernel (package vf finds both), and the
// agent's software devices. The DRA driver publishes them as ResourceSlices and
// the device plugin as extended resources.
//
// # Who owns what
//
// The goroutine of Run looks at the machine: when the kernel tells of a change of
// a network interface, and every second, as ports of RDMA devices change without
// one. Everybody else reads what it found last.
//
// # Limitations
//
// The port of a VF that is in a pod is taken to be as that of its PF: the pod's
// namespace is not entered for it.
package inventory
