// SPDX-License-Identifier: Apache-2.0

// Package debian gets files of Debian's archive for tests: packages, and the
// sources of applications.
//
//	f := debian.File{Dir: "pool/main/r/redis/", Name: "redis_7.0.15.orig.tar.gz", SHA256: "4b1d..."}
//	name, err := f.Download(ctx, dir)
//
// A File is one version of a file, and its bytes are checked. It comes from the
// mirrors that the machine's own apt configuration names by http or https, or from
// deb.debian.org where there is none; and at last from the snapshots, which keep what
// mirrors have dropped. Nothing of the machine's apt is changed.
//
// Limitations: it needs apt-helper, which is part of apt, for the proxies and
// certificates that apt has.
package debian
