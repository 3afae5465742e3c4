// SPDX-License-Identifier: Apache-2.0

// Package preflight tries what the agent needs of a node, and says what is
// missing, what that means and what to do. smcrctl preflight prints it; the
// agent writes it into its SMCRNode.
//
//	r := preflight.Examine(ctx, preflight.This())
//	node.Status.Capabilities = r.Capabilities()
//
// Each check tries the thing itself, where that leaves nothing behind: versions
// of kernels say little about what distributions built into them. Nothing is
// kept between calls, and a [Machine] belongs to whoever made it.
//
// Limitations: root is taken to have every capability; a container that lacks
// one sees it in the checks that need it. RDMA devices of the kernel are
// listed with what would be chosen of them, and not opened.
package preflight
