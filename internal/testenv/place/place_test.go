// SPDX-License-Identifier: Apache-2.0

package place

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTryLock(t *testing.T) {
	all := filepath.Join(t.TempDir(), "all")
	if names, err := Names(all); err != nil || len(names) > 0 {
		t.Errorf("Names() of nothing = %q, %v", names, err)
	}
	dir := filepath.Join(all, "one")
	lock, err := TryLock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := TryLock(dir); !errors.Is(err, ErrInUse) {
		t.Errorf("TryLock() of a locked directory: %v, want %v", err, ErrInUse)
	}
	if err := os.WriteFile(filepath.Join(all, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	names, err := Names(all)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"one"}, names); diff != "" {
		t.Errorf("Names() (-want +got):\n%s", diff)
	}
	// Who removes its directory gives it up, though it has the lock still.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	again, err := TryLock(dir)
	if err != nil {
		t.Fatalf("TryLock() of a directory that was removed: %v", err)
	}
	if err := errors.Join(lock.Close(), again.Close()); err != nil {
		t.Fatal(err)
	}
	lock, err = TryLock(dir)
	if err != nil {
		t.Fatalf("TryLock() of what a dead one left: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Error(err)
	}
}
