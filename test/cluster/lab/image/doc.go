// SPDX-License-Identifier: Apache-2.0

// Package image packs files into an image as container runtimes import it, an
// archive with an OCI image layout, without docker, a registry or a network.
//
//	err := image.Write("redis.tar", image.Image{
//		Ref:        "kube-smcr.local/redis:1",
//		Entrypoint: []string{"/usr/bin/redis-server"},
//		Files:      files, // image.Program gives a program and its libraries
//	})
//
// The same input gives the same bytes: times are zero, owners are root and names
// are sorted. There is one layer, and it is not compressed: images are moved
// over a pipe of one machine only.
//
// # Limitations
//
// Program asks ldd, so that it finds what a program is linked with and not
// what it opens later; and it packs for the machine's own architecture.
package image
