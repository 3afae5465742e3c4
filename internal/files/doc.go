// SPDX-License-Identifier: Apache-2.0

// Package files replaces files in one step, and locks them.
//
//	err := files.Write("/var/lib/x/state.json", b, 0o600)
//	lock, err := files.TryLock("/var/lib/x/lock")
//
// After [Write], also after an error, a crash or a power cut at any moment, the file is
// either the complete old one or the complete new one. A [Lock] keeps out the other
// processes of the node, also those of other containers that see the same file, and ends
// with the process that has it.
//
// # Limitations
//
// The directories must exist. A writer that is killed leaves a temporary file beside the
// file that it was about to replace; the caller chooses the pattern of its name, and
// [RemoveTemps] removes those that [WriteLockedTemp] made. Locks are
// advisory, and on network file systems they depend on flock there.
package files
