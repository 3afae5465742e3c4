// SPDX-License-Identifier: Apache-2.0

// Package inventory lists the devices that pods of a node can ask for, and tells when a
// device appears, disappears or changes.
//
//	inv := inventory.New(inventory.Config{Host: vf.Host{}, Configured: configured, Log: log})
//	go inv.Run(ctx)
//	changed, stop := inv.Subscribe()
//	devices := inv.Devices()
//
// These devices are VFs, other RDMA devices of the kernel (package vf finds both), and the
// agent's software devices. The DRA driver publishes them as ResourceSlices and the device
// plugin as extended resources.
//
// # Who owns what
//
// The goroutine of Run looks at the machine when the kernel tells of a change of a network interface, and
// now and then. The kernel does not tell of changes of RDMA ports, and nobody tells of pods that get a
// device: so Run takes a glance each second to find out whether to look. Other goroutines read the result
// of the last look.
//
// # Limitations
//
// A VF that is in a pod counts as up if its PF is up: Run does not enter the pod's namespace to look at
// its port. Some changes are found only within ten seconds, because the kernel does not tell of them, and
// a glance does not see them: for example, that a driver is bound to a VF without an interface.
package inventory
