// SPDX-License-Identifier: Apache-2.0

// Package cli prints agents' answers as tables. smcrctl and kubectl smcr print the same
// tables.
//
//	cli.PrintStatus(os.Stdout, status)
//	cli.Table(os.Stdout, cli.Row("NAME", "AGE"), cli.Row("web-0", "3d"))
//
// [Strict], [Args] and [Show] are the common parts of their command lines.
//
// The package only formats. Ages are computed with the clock of this machine, which may
// differ from the node's.
package cli
