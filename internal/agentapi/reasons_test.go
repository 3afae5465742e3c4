// SPDX-License-Identifier: Apache-2.0

package agentapi

import (
	"os"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

func TestCodes_haveTexts(t *testing.T) {
	seen := map[string]Code{}
	for _, c := range Codes() {
		text := c.Text()
		if text == "" || strings.HasPrefix(text, "unknown") {
			t.Errorf("%s has the text %q", c, text)
		}
		if other, ok := seen[text]; ok {
			t.Errorf("%s and %s have the same text", c, other)
		}
		seen[text] = c
	}
	if got := Code("NEW").Text(); got != "unknown reason NEW" {
		t.Errorf("text of an unknown code: %q", got)
	}
	if CodeOf(clc.ReasonNone) != CodeOK || CodeOf(clc.ReasonMem) != "MEM" || CodeOf(0x12345678) != CodeUnknownReason {
		t.Error("CodeOf is wrong")
	}
}

// TestCodes_advice: a setting of the agents is called neither as in their configuration file nor as in the chart, which have it in
// different places: who reads the advice has one of the two.
func TestCodes_advice(t *testing.T) {
	for _, c := range Codes() {
		for _, place := range []string{" node.", "(node.", "agent."} {
			if strings.Contains(c.Advice(), place) {
				t.Errorf("%s: %q has %q", c, c.Advice(), place)
			}
		}
	}
}

// TestCodes_ofMismatches: the code of each mismatch is one of those that have a text.
func TestCodes_ofMismatches(t *testing.T) {
	for m, want := range map[config.Mismatch]Code{
		config.MismatchNone:      CodeOK,
		config.MismatchTransport: CodeTransport,
		config.MismatchVersion:   CodeOf(clc.ReasonVersMismat),
	} {
		if got := Code(m.Code()); got != want {
			t.Errorf("%v has the code %q, want %q", m, got, want)
		}
	}
}

// TestCodes_documented: the operations manual says what to do about each code.
func TestCodes_documented(t *testing.T) {
	b, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range Codes() {
		if !strings.Contains(string(b), "`"+string(c)+"`") {
			t.Errorf("docs/operations.md does not have %s", c)
		}
	}
}
