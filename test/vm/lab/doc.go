// SPDX-License-Identifier: Apache-2.0

// Package lab runs guests on this machine: QEMU with Debian's kernel 6.12, which
// has soft RoCE (rxe) and SMC-R, both of which the machine that runs the tests
// lacks.
//
//	l := lab.ForTest(t, lab.Config{})
//	g := l.Guest(0)
//	if err := g.AddRXE(ctx, 0); err != nil { ... }
//	out, err := g.Run(ctx, "ibv_devinfo", "-d", "rxe0")
//
// A test makes one lab, usually of two guests, and runs what it has to try as
// subtests. A guest has one core unless Config says otherwise: two of them fill the two cores that continuous
// integration has. QEMU, 7.2 or newer, emulates (TCG) and needs no rights and no
// KVM; times in a guest mean nothing, ratios within one run little.
//
// Config.Kernels are for what that kernel cannot do: 7.2 has soft RoCE in every
// network namespace, but Debian builds it without SMC-R.
//
// # Network
//
// All NICs of all guests are on one Ethernet segment, which nothing leaves. NIC n
// of guest i (both from 0) is eth<n>, 10.0.0.(1+i+10n)/24 and fd00::(1+i+10n)/64;
// what has the address of a NIC leaves by it. One subnet, because the kernel takes a
// second SMC-Rv2 link only from the subnet of the first. The MTU is 9000 unless
// Config says otherwise: the RDMA path MTU is 4096 then, 1024 with 1500. A link is cut by
// [Guest.SetLink], never by "ip link set down" in a guest: rxe retransmits for
// ever then, and the kernel's link group hangs with it.
//
// [Lab.Join] makes the machine that runs the guests a member of the segment, 10.0.0.100 and
// fd00::64, in a network namespace of its own. That takes rights. [Lab.Plug]
// connects the segment to another network of this machine, as that of a cluster.
//
// With Config.PFs each guest has igb NICs besides, pf0 and so on, for virtual
// functions: [Guest.MakeVFs] makes pf0v0. They are on a second segment, all of
// them, and addresses there are the test's. QEMU 10 emulates them, which is
// downloaded beside the image; the installed one stays what it is.
//
// # Files
//
// The root file system is package image's and can be written to; it is forgotten
// with the guest, and by [Guest.Reset]; Config.Disks are not by that. [Lab.Share] is a directory of the host that
// guests see as /host, [Lab.Build] puts programs there, and [Lab.BuildCNIPlugins]
// those of CNI. They are kept in the cache directory, so that one that has not changed
// is not linked again; to remove "vm/programs" there is always right. Guests start
// copies, which they keep in [GuestBin], and look for new ones when the directory has
// changed: rename a program into it. With cgo programs are linked to the C library of
// this machine, which must not be newer than Debian 12's.
//
// # Who owns what
//
// The Lab owns its processes and its directory below the cache directory. Whoever holds
// the lock there owns the directory: that is QEMU, which inherits it. QEMU ends with
// the process that called [Up], however that ends, unless Config.Detach says
// otherwise; [Up] removes the directories that dead labs left.
//
// A guest that panics or hangs is an error of everything that is asked of it, within
// seconds; see [CrashError] and [ErrUnresponsive]. What the kernel complained of
// short of that is in [Lab.Complaints], and fails a test that uses [ForTest].
package lab
