// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"flag"
	"strings"
	"testing"
)

func TestStatus(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		code int
		said string
	}{
		{"all was measured", nil, 0, ""},
		{"help", flag.ErrHelp, 0, ""},
		{"a mistake", errors.New("no path"), 1, "bench: no path\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var w strings.Builder
			if code := status(&w, "bench", tt.err); code != tt.code || w.String() != tt.said {
				t.Errorf("exit code %d, said %q", code, w.String())
			}
		})
	}
}
