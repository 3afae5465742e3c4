// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestStrict: what a command line does not know is the user's mistake, and the
// message names it and where help is.
func TestStrict(t *testing.T) {
	for _, tt := range []struct {
		name, line string
		usage      bool
		want       string // in the error, or what is printed
	}{
		{"works", "show x", false, "x as table\n"},
		{"output", "show x -o json", false, "{\n  \"Name\": \"x\"\n}\n"},
		{"other output", "show x -o yaml", true, `output "yaml": want table or json`},
		{"unknown command", "shwo", true, `unknown command "shwo"; see prog --help`},
		{"unknown flag", "show x --fast", true, "unknown flag: --fast"},
		{"flags that exclude each other", "pick --this --that", true, "[that this] were all set"},
		{"arguments", "show", true, "accepts 1 arg(s), received 0; see prog show --help"},
		{"its own failure", "fail", false, "the machine is broken"},
		{"help", "", false, "show"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var output string
			var out strings.Builder
			root := &cobra.Command{Use: "prog"}
			Strict(root, "prog", &output)
			root.SetOut(&out)
			root.SetErr(io.Discard)
			pick := &cobra.Command{Use: "pick", RunE: func(*cobra.Command, []string) error { return nil }}
			pick.Flags().Bool("this", false, "")
			pick.Flags().Bool("that", false, "")
			pick.MarkFlagsMutuallyExclusive("this", "that")
			root.AddCommand(
				pick,
				&cobra.Command{Use: "show", Args: Args("prog", cobra.ExactArgs(1)), RunE: func(_ *cobra.Command, a []string) error {
					return Show(&out, output, struct{ Name string }{a[0]}, func(w io.Writer, v struct{ Name string }) error {
						_, err := fmt.Fprintln(w, v.Name, "as table")
						return err
					})
				}},
				&cobra.Command{Use: "fail", RunE: func(*cobra.Command, []string) error { return errors.New("the machine is broken") }},
			)
			root.SetArgs(strings.Fields(tt.line))
			err := root.Execute()
			var usage UsageError
			if errors.As(err, &usage) != tt.usage {
				t.Errorf("error %v, want a usage error: %v", err, tt.usage)
			}
			if usage.error != nil && !errors.Is(err, usage.Unwrap()) {
				t.Errorf("error %v does not unwrap to what is wrong", err)
			}
			if got := fmt.Sprint(out.String(), err); !strings.Contains(got, tt.want) {
				t.Errorf("%q does not say %q", got, tt.want)
			}
		})
	}
}
