// SPDX-License-Identifier: Apache-2.0

// Package image makes what a guest boots: a kernel and its modules, and the
// programs of a distribution on a disk.
//
// The kernel is one version, named by URL and SHA-256: SMC-R over rxe works with
// Debian's 6.12, not with its 6.1 (the peer's CONFIRM LINK is never sent) and
// not with its 7.2 (no smc module). The programs are Debian 12's, of the version
// that the mirror has, with everything they depend on.
//
// Software iWARP (siw) is in no kernel of Debian: [GetSIW] builds it of the sources that
// Debian has of the same version, which are pinned too. Soft RoCE of 6.12 works in the host's
// network namespace only: [GetRXE] builds one that can be in a pod, as an RNIC's function is.
//
// It needs apt-get, dpkg-deb, tar, xz, zstd, depmod and mke2fs, for these two gcc and make, and
// the Debian keyring; it needs no rights. From the machine's own apt configuration it takes
// the mirror of Debian's archive, and deb.debian.org where that names none by http or https;
// it touches nothing there. What it made is kept in the cache directory, under the hash
// of what it is made of, until that changes: a directory there is complete.
package image
