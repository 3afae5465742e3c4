// SPDX-License-Identifier: Apache-2.0

// Package version tells the version of the running program.
//
//	fmt.Println("node-agent", version.String())
//
// Go puts it into a program that is built in a git checkout. It cannot do so in
// a worktree of git or in a checkout of another user's; whoever builds there and
// knows the version gives it to the linker:
//
//	go build -ldflags "-X github.com/smcr-io/kube-smcr/internal/version.linked=v0.4.0" ./cmd/node-agent
package version
