// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"flag"
	"strings"
	"testing"
	"time"
)

func TestSettings(t *testing.T) {
	for _, tt := range []struct {
		name, args, err string
	}{
		{"defaults", "", ""},
		{"some", "-rounds 1 -time 100ms -o json", ""},
		{"unknown output", "-o xml", `unknown output "xml"`},
		{"no round", "-rounds 0", "-rounds from 1"},
		{"too long", "-time 1h", "-time from 1ms to 10s, -more, and"},
		{"argument", "conn", "no arguments"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var s Settings
			f := flag.NewFlagSet("test", flag.ContinueOnError)
			output := s.Define(f, time.Second, "nobody")
			err := f.Parse(strings.Fields(tt.args))
			if err == nil {
				err = s.Check(*output, f.NArg(), ", -more", true)
			}
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
		})
	}
	good := Settings{Rounds: 1, Duration: time.Second}
	if err := good.Check("table", 0, "", false); err == nil {
		t.Error("the program's own flags are wrong, and it is no error")
	}
}
