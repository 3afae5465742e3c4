// SPDX-License-Identifier: Apache-2.0

// Package place gives what runs for a test, a cluster or guests, a directory
// that says whether it still runs: whoever holds the lock of the file "lock" in it
// owns it, from its start to its end, however it ends. A directory whose lock is
// free is what somebody left who was killed.
//
//	lock, err := place.TryLock(dir) // makes it; ErrInUse if somebody else has it
//	...                             // hand the lock on to the processes that run
//	err = errors.Join(place.Remove(dir), lock.Close())
//
// Limitations: one machine, and a file system with flock.
package place
