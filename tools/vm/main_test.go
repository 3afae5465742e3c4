// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

func TestExitCode(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want int
	}{
		{"of the command", &lab.ExitError{Code: 4}, 4},
		{"of a command that a signal ended", &lab.ExitError{Code: -1, Signal: 9}, 137},
		{"of one of several", errors.Join(nil, fmt.Errorf("run: %w", &lab.ExitError{Code: 3})), 3},
		{"of this program", errors.New("no guests"), 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := exitCode(c.err); got != c.want {
				t.Errorf("exit code %d, want %d", got, c.want)
			}
		})
	}
}

// What is asked for wrongly, or of guests that are not there, is an error that
// says what to do.
func TestCommand(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	for _, c := range []struct {
		name string
		args []string
		want string // in the error; empty for none
	}{
		{"nothing to run", []string{"run"}, "go run ./tools/vm run --help"},
		{"exec in guests that are down", []string{"exec", "--name", "a", "g0", "--", "true"}, "go run ./tools/vm up --name a"},
		{"exec without a command", []string{"exec", "g0"}, "requires at least 2 arg"},
		{"no such command", []string{"start"}, "unknown command"},
		{"a wrong name", []string{"down", "--name", "../a"}, "want lower case letters"},
		{"down of what is not there", []string{"down", "--name", "a"}, ""},
		{"down of all", []string{"down", "--all"}, ""},
		{"list", []string{"list"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			cmd := command()
			cmd.SetOut(&out)
			cmd.SetErr(&out)
			cmd.SetArgs(c.args)
			err := cmd.ExecuteContext(t.Context())
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
		})
	}
}
