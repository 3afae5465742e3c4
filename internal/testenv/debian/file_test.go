// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFile_urls(t *testing.T) {
	f := File{Dir: "pool/main/q/qemu/", Name: "q.deb"}
	want := []string{"http://a/debian/pool/main/q/qemu/q.deb", "http://b/debian/pool/main/q/qemu/q.deb", snapshot + "/pool/main/q/qemu/q.deb"}
	if diff := cmp.Diff(want, f.urls([]string{"http://a/debian", "http://b/debian"})); diff != "" {
		t.Errorf("URLs (-want +got):\n%s", diff)
	}
}

func TestFile_check(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k.deb")
	if err := os.WriteFile(file, []byte("a kernel"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := File{SHA256: "6ce0bee2a6a28e06a3a5b2b4f6b1a2ab5c4ae6fd2f08ab5b1c4bc7f0c1d0e4aa"}
	if err := f.check(file); err == nil || !strings.Contains(err.Error(), f.SHA256) {
		t.Errorf("another kernel: %v", err)
	}
	f.SHA256 = "4fff0d3e643b3894c17a0738fbdc591953aa722c9d42774425090accc4377126"
	if err := f.check(file); err != nil {
		t.Errorf("the kernel: %v", err)
	}
}
