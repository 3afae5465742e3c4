// SPDX-License-Identifier: Apache-2.0

// Package transcript is what demos print: their parts, and statements of which each
// is a check.
//
//	ctx, stop, err := transcript.Interruptible()
//	t := transcript.New(os.Stdout)
//	t.Title("A pod on each node")
//	t.Check("the pods reach each other", err == nil, "%v", err)
//	os.Exit(t.Summary(ctx.Err() != nil))
//
// # Limitations
//
// It is text for eyes: a program learns only the exit code. The main demo has a report
// of its own, which can be JSON.
package transcript
