// SPDX-License-Identifier: Apache-2.0

// Package deviceinfo reads and writes device information files (Device Information
// Specification 1.1.0), by which a device plugin describes the devices that pods get, for
// Multus and CNI plugins. The device plugin writes one file per device into a directory,
// and a runtime one file per attachment of a device.
//
// # Limitations
//
// Only the details of PCI devices are read and written. The specification has no type
// for RDMA devices that are not PCI, so these have no file.
package deviceinfo
