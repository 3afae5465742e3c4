// SPDX-License-Identifier: Apache-2.0

package transcript_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

func TestTranscript_Summary(t *testing.T) {
	for _, tc := range []struct {
		name        string
		holds       []bool
		interrupted bool
		code        int
		want        string
	}{
		{"all hold", []bool{true, true}, false, 0, "\n== Part 1  (S s)\n\n  [ok] it is so: because\n  [ok] it is so: because\n\n2 checks, all hold (S s)\n"},
		{"one does not", []bool{false, true}, false, transcript.ExitFailed, "\n== Part 1  (S s)\n\n  [NOT SO] it is so: because\n  [ok] it is so: because\n\n" +
			"1 of 2 checks do not hold (S s):\n  it is so\n"},
		{"interrupted", nil, true, transcript.ExitInterrupted, "\n== Part 1  (S s)\n\n\ninterrupted after S s\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b strings.Builder
			tr := transcript.New(&b)
			tr.Title("Part %d", 1)
			for _, h := range tc.holds {
				tr.Check("it is so", h, "because\n")
			}
			if code := tr.Summary(tc.interrupted); code != tc.code {
				t.Errorf("exit code %d, want %d", code, tc.code)
			}
			got := regexp.MustCompile(`\d+ s`).ReplaceAllString(b.String(), "S s")
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("printed (-want +got):\n%s", diff)
			}
		})
	}
}
