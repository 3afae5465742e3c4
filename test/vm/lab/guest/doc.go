// SPDX-License-Identifier: Apache-2.0

// The guest program is the first process of a guest of package lab.
//
// The kernel starts it as /init of the initramfs. It mounts the root file system
// of package image, with memory over it so that it can be written to, loads the
// modules of the boot, sets the network up, and then waits for orphans to end:
// nobody else reaps them. A child of it, the agent, runs the commands that the
// host sends, see package wire; programs of the host as copies, which start faster.
//
// What it is to know stands on the kernel's command line: lab.guest and
// lab.name, lab.nics, lab.mtu, lab.modules.
package main
