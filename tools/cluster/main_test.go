// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

// What is asked for wrongly is an error that says what to do, before anything starts.
func TestUp_wrong(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	for _, c := range []struct {
		name string
		args []string
		want string // in the error
	}{
		{"VFs without guests", []string{"--vfs"}, "say --rdma, too"},
		{"the kernel's SMC-R without guests", []string{"--kernel-smc"}, "say --rdma, too"},
		{"fewer guests than one", []string{"--rdma=-1"}, "-1 guests"},
		{"an argument", []string{"a"}, "unknown command"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			cmd := command()
			cmd.SetOut(&out)
			cmd.SetErr(&out)
			cmd.SetArgs(append([]string{"up", "--pack=false"}, c.args...))
			if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q in it\n%s", err, c.want, &out)
			}
		})
	}
}
