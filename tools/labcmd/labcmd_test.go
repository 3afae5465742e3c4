// SPDX-License-Identifier: Apache-2.0

package labcmd

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestLabs_down(t *testing.T) {
	errBusy := errors.New("busy")
	for _, tt := range []struct {
		name string
		args []string
		want string // what was done
		err  error
	}{
		{"the default one", nil, "down local, sweep", nil},
		{"one by name", []string{"--name", "b"}, "down b, sweep", nil},
		{"all", []string{"--all"}, "down a, down b, sweep", nil},
		{"one that does not end", []string{"--name", "busy"}, "down busy", errBusy},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var done []string
			cmd := Labs{
				Default: "local",
				Names:   func() ([]string, error) { return []string{"a", "b"}, nil },
				Down: func(_ context.Context, name string) error {
					done = append(done, "down "+name)
					if name == "busy" {
						return errBusy
					}
					return nil
				},
				Sweep: func() error { done = append(done, "sweep"); return nil },
			}.down(Texts{})
			cmd.SetArgs(tt.args)
			cmd.SetOut(io.Discard)
			cmd.SetErr(io.Discard)
			if err := cmd.ExecuteContext(t.Context()); !errors.Is(err, tt.err) {
				t.Errorf("%v, want %v", err, tt.err)
			}
			if got := strings.Join(done, ", "); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// TestLabs_list: a laboratory that cannot be opened is in the list, with the reason.
func TestLabs_list(t *testing.T) {
	cmd := Labs{
		Names:   func() ([]string, error) { return []string{"a", "broken"}, nil },
		Columns: []string{"NODES", "LOGS"},
		Row: func(_ context.Context, name string) ([]string, error) {
			if name == "broken" {
				return nil, errors.New("no answer")
			}
			return []string{"3", "/tmp/" + name}, nil
		},
	}.list(Texts{})
	var out bytes.Buffer
	cmd.SetArgs(nil)
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := "NAME    NODES  LOGS\na       3      /tmp/a\nbroken  -      no answer\n"
	if got := out.String(); got != want {
		t.Errorf("list:\n%s\nwant:\n%s", got, want)
	}
}
