// SPDX-License-Identifier: Apache-2.0

// Package preflight tries the features of a node that the agent needs, and says what is
// missing, what that means and what to do. smcrctl preflight prints the report; the agent
// writes it into its SMCRNode.
//
//	r := preflight.Examine(ctx, preflight.This())
//	node.Status.Capabilities = r.Capabilities()
//
// Each check tries the feature itself, if that leaves nothing behind: the version of a
// kernel says little about what a distribution built into it. Nothing is kept between
// calls, and a [Machine] belongs to the caller that made it.
//
// Limitations: root is assumed to have every capability. If a container lacks one, the
// checks that need it fail. RDMA devices of the kernel are listed with the GID that the
// agent would choose, but not opened.
package preflight
