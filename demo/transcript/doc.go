// SPDX-License-Identifier: Apache-2.0

// Package transcript is what demos print: their parts, and statements of which each
// is a check.
//
//	os.Exit(transcript.Play("demo", os.Stdout, os.Stderr, time.Minute, func(ctx context.Context, t *transcript.Transcript) error {
//		t.Title("A pod on each node")
//		t.Check("the pods reach each other", err == nil, "%v", err)
//		return nil
//	}))
//
// # Limitations
//
// It is text for eyes: a program learns only the exit code. The main demo has a report
// of its own, which can be JSON.
package transcript
