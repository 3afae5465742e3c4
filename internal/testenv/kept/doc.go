// SPDX-License-Identifier: Apache-2.0

// Package kept keeps what tests download and build in the user's cache directory,
// under the hash of what it is made of.
//
//	dir, err := kept.Dir("vm/image-", version, packages)
//	err = kept.Make(dir, "vm", "the guests' image", os.Stderr, complete, build)
//
// A directory gets its name when it is complete, so one that is there is, and it
// stays until somebody clears the cache.
//
// Limitations: one machine, and a file system with flock.
package kept
