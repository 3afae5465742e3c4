// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// laterEnv names a file for tests that are to run again later. Several commands may write to it at a time.
const laterEnv = "AGAIN_LATER"

// put writes tests that failed to a file.
func put(out io.Writer, file string, failed []failure) error {
	var lines bytes.Buffer
	for _, f := range failed {
		fmt.Fprintf(out, "again: %s of %s, later\n", &f, f.Pkg)
		if err := json.NewEncoder(&lines).Encode(f); err != nil {
			return fmt.Errorf("a test for later: %w", err)
		}
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(lines.Bytes()) // in one piece, so that others do not write in between
	return errors.Join(err, f.Close())
}

// later runs the tests that others have put into a file, all of them also if one fails again.
func later(ctx context.Context, out io.Writer, file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var errs []error
	for line := range bytes.Lines(b) {
		var f failure
		if err := json.Unmarshal(line, &f); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		errs = append(errs, again(ctx, out, []failure{f}))
	}
	return errors.Join(errs...)
}
