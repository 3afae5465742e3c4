// SPDX-License-Identifier: Apache-2.0

// Package cli prints what agents answer, for people. smcrctl on a node and
// kubectl smcr from anywhere show the same tables.
//
//	cli.PrintStatus(os.Stdout, status)
//	cli.Table(os.Stdout, cli.Row("NAME", "AGE"), cli.Row("web-0", "3d"))
//
// [Strict], [Args] and [Show] are what their command lines have in common.
//
// It only formats: it asks nobody and decides nothing. Ages are from the clock of
// this machine, which may differ from the node's.
package cli
