// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/smcr-io/kube-smcr/internal/version"
)

// UsageError is a mistake in the command line.
type UsageError struct{ error }

// Unwrap returns what is wrong.
func (e UsageError) Unwrap() error { return e.error }

// Strict makes root refuse unknown commands, flags and outputs, and flags that exclude each other, with a UsageError. name is
// the name of the program in messages, for example "kubectl smcr".
func Strict(root *cobra.Command, name string, output *string) {
	root.SilenceUsage, root.SilenceErrors = true, true
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return UsageError{err} })
	root.PersistentFlags().StringVarP(output, "output", "o", "table", "table or json")
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.Args = func(_ *cobra.Command, a []string) error {
		if len(a) > 0 {
			return UsageError{fmt.Errorf("unknown command %q; see %s --help", a[0], name)}
		}
		return nil
	}
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := cmd.ValidateFlagGroups(); err != nil { // cobra does so later, with an error that cannot be told from others
			return UsageError{err}
		}
		if *output != "table" && *output != "json" {
			return UsageError{fmt.Errorf("output %q: want table or json", *output)}
		}
		return nil
	}
}

// Args makes the error of one of cobra's checks a UsageError. name is as for Strict.
func Args(name string, check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if err := check(cmd, a); err != nil {
			return UsageError{fmt.Errorf("%w; see %s %s --help", err, name, cmd.Name())}
		}
		return nil
	}
}

// Show prints v as JSON if that is the output, else as a table.
func Show[T any](w io.Writer, output string, v T, table func(io.Writer, T) error) error {
	if output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	return table(w, v)
}

// Version is the version of this program.
func Version() string { return version.String() }
