// SPDX-License-Identifier: Apache-2.0

// Package terminal shows what a user of a cluster types and sees: commands that are run, with their real
// output, and checks.
//
//	t := &terminal.Terminal{Transcript: transcript.New(os.Stdout), P: p, Patience: time.Minute}
//	out, err := t.Kubectl(ctx, "get", "smcrlinks")
//	t.Eventually(ctx, "the link group is symmetric", func() (string, error) { ... })
//
// [Command] makes a program of a demo: its flags, its parts one after the other, and that nothing is
// left of them. Applications are in the namespace [Shop].
package terminal
