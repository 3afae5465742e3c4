// SPDX-License-Identifier: Apache-2.0

// Package invariant stops the program when its own state is wrong.
//
// A violated invariant is a bug of ours, never something a peer, a user or
// the kernel can cause: those are errors. A panic here is meant to be loud,
// because going on with a broken state would put wrong bytes into somebody
// else's memory.
//
// [Must] is for the data path, too: it takes a constant message and allocates
// nothing.
package invariant
