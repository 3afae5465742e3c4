// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/demo/transcript"
)

// TestMain is the programs of the demo, too.
func TestMain(m *testing.M) {
	if code, is := runRole(os.Args[1:]); is {
		os.Exit(code)
	}
	os.Exit(m.Run())
}

func TestRun_usage(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		code int
	}{
		"help":         {[]string{"-help"}, 0},
		"unknown flag": {[]string{"-fast"}, transcript.ExitUsage},
		"argument":     {[]string{"now"}, transcript.ExitUsage},
		"nothing":      {[]string{"-mib", "0"}, transcript.ExitUsage},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(tc.args, &stdout, &stderr); code != tc.code || stderr.Len() == 0 {
			t.Errorf("%s: exit code %d, %q", name, code, stderr.String())
		}
	}
}

// TestRun plays the demo with fewer bytes.
func TestRun(t *testing.T) {
	var stdout, stderr bytes.Buffer
	if code := run([]string{"-mib", "20"}, &stdout, &stderr); code != 0 {
		t.Fatalf("exit code %d\n%s\n%s", code, stdout.String(), stderr.String())
	}
	if want := "5 checks, all hold"; !strings.Contains(stdout.String(), want) {
		t.Errorf("no %q in\n%s", want, stdout.String())
	}
}
