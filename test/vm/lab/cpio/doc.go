// SPDX-License-Identifier: Apache-2.0

// Package cpio writes archives that the Linux kernel unpacks as its initramfs.
//
// The kernel takes several archives one after another: [Writer.Part] is one that
// another may follow.
package cpio
