// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"
)

func TestRun_usage(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		code int
	}{
		"help":           {[]string{"--help"}, 0},
		"unknown flag":   {[]string{"--fast"}, exitUsage},
		"argument":       {[]string{"now"}, exitUsage},
		"unknown output": {[]string{"-o", "xml"}, exitUsage},
		"nothing built":  {[]string{"--bin", t.TempDir()}, exitFailed},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(tc.args, &stdout, &stderr); code != tc.code || stderr.Len() == 0 {
			t.Errorf("%s: exit code %d, %q", name, code, stderr.String())
		}
	}
}
