// SPDX-License-Identifier: Apache-2.0

// Package watch tells of changes in directories.
//
//	events, stop, err := watch.Dirs("/var/lib/x", "/run/x")
//	defer stop()
//	<-events // something has changed: look
//
// # Limitations
//
// What is told is that something changed, and not each change: the receiver looks at what it wants to know of. It
// looks from time to time without being told, too, as a directory that is replaced by another one of its name is not
// watched any more.
package watch
