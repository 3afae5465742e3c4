// SPDX-License-Identifier: Apache-2.0

//go:build smcrcrash

package vf

import (
	"fmt"
	"os"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// steps counts the calls of Step.
var steps atomic.Int64

// Step ends the process like a power cut after the number of changes in the environment
// variable SMCR_CRASH_AFTER. It appends "number name" for each change to the file that
// SMCR_CRASH_LOG names.
func Step(name string) {
	n := steps.Add(1)
	if file := os.Getenv("SMCR_CRASH_LOG"); file != "" {
		f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			panic(err)
		}
		_, err = fmt.Fprintf(f, "%d %s\n", n, name)
		if cerr := f.Close(); err != nil || cerr != nil {
			panic(fmt.Sprint(err, cerr))
		}
	}
	if after, err := strconv.ParseInt(os.Getenv("SMCR_CRASH_AFTER"), 10, 64); err == nil && n == after {
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		select {} // wait for the signal, which comes at once
	}
}
