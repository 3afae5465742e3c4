// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// A namespace that is not found is gone, or elsewhere than the agent looks: then the error says what to do.
func TestUnseen(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"run/netns", "var"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../run", filepath.Join(root, "var/run")); err != nil {
		t.Fatal(err)
	}
	in := func(name string) string { return filepath.Join(root, name) }
	for _, tt := range []struct {
		name, path, want string
	}{
		{"it is gone", in("run/netns/cni-1"), ""},
		{"a directory of the node that is a link here", in("var/run/netns/cni-1"), "or out of the agent's sight: to the agent " + in("var/run/netns") + " is " + in("run/netns") + ", on the node it is a directory of its own. Make it the same there (/var/run a link to /run)"},
		{"a directory that is not here", in("state/netns/cni-1"), "or out of the agent's sight: the agent has no " + in("state/netns") + ". Let the container runtime keep network namespaces in /run/netns"},
		{"of a process", "/proc/0/ns/net", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := linux.OpenNetNS(tt.path)
			if !errors.Is(err, linux.ErrGone) {
				t.Fatalf("open %s: %v", tt.path, err)
			}
			got := unseen(tt.path, err)
			if !errors.Is(got, linux.ErrGone) || tt.want == "" && got.Error() != err.Error() || !strings.Contains(got.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", got, tt.want)
			}
		})
	}
	if err := unseen(in("var/run/netns/cni-1"), fs.ErrPermission); err.Error() != fs.ErrPermission.Error() {
		t.Errorf("another error became %v", err)
	}
}
