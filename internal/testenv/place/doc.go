// SPDX-License-Identifier: Apache-2.0

// Package place gives a cluster or guests of a test a directory that shows whether their
// processes still run. The processes have the lock of the file "lock" in the directory from
// their start to their end, however they end. A directory whose lock is free was left behind
// by processes that were killed.
//
//	lock, err := place.TryLock(dir) // makes the directory; ErrInUse if others have it
//	...                             // hand the lock on to the processes that run
//	err = errors.Join(place.Remove(dir), lock.Close())
//
// Limitations: one machine, and a file system with flock.
package place
