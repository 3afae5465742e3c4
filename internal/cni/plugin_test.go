// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"os"
	"path/filepath"
	"testing"
)

func TestRealPath(t *testing.T) {
	// The test's own directory may be behind a link.
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(root, "run", "netns"), 0o755))
	must(t, os.Mkdir(filepath.Join(root, "var"), 0o755))
	must(t, os.Symlink("../run", filepath.Join(root, "var", "run")))
	must(t, os.Symlink("nowhere:[1]", filepath.Join(root, "run", "netns", "magic")))
	for _, tt := range []struct{ name, in, want string }{
		{"behind a link", "var/run/netns/cni-1", "run/netns/cni-1"},
		{"without a link", "run/netns/cni-1", "run/netns/cni-1"},
		{"itself a link", "var/run/netns/magic", "run/netns/magic"},
		{"in /proc", "/proc/self/ns/net", "/proc/self/ns/net"},
		{"no such directory", "var/lib/netns/cni-1", "var/lib/netns/cni-1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in, want := filepath.Join(root, tt.in), filepath.Join(root, tt.want)
			if filepath.IsAbs(tt.in) {
				in, want = tt.in, tt.want
			}
			if got := realPath(in); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
}
