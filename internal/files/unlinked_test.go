// SPDX-License-Identifier: Apache-2.0

package files

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestUnlinked: an open directory is reached by its descriptor after its end, as by a mount.
func TestUnlinked(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "net.d")
	must(t, os.Mkdir(dir, 0o755))
	f, err := os.Open(dir)
	must(t, err)
	defer func() { _ = f.Close() }()
	held := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	if Unlinked(dir) || Unlinked(held) {
		t.Error("unlinked while it is there")
	}
	must(t, os.Remove(dir))
	if Unlinked(dir) || !Unlinked(held) {
		t.Errorf("removed: %t, and %t as the mount shows it", Unlinked(dir), Unlinked(held))
	}
	must(t, os.Mkdir(dir, 0o755))
	if Unlinked(dir) || !Unlinked(held) {
		t.Errorf("made anew: %t, and %t as the mount shows it", Unlinked(dir), Unlinked(held))
	}
}
