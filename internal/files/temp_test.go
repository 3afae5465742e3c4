// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// duringRead calls do when it is read.
type duringRead struct{ do func() }

func (r duringRead) Read([]byte) (int, error) {
	r.do()
	return 0, errors.New("read once")
}

// TestRemoveTemps: the locks of writers decide, and not the times of files.
func TestRemoveTemps(t *testing.T) {
	dir := t.TempDir()
	put := func(name string, at time.Time) {
		path := filepath.Join(dir, name)
		must(t, errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, at, at)))
	}
	put("a", time.Unix(0, 0))
	put(".tmp-past", time.Unix(0, 0))
	put(".tmp-now", time.Now())
	put(".tmp-future", time.Now().Add(24*time.Hour))
	must(t, syscall.Mkfifo(filepath.Join(dir, ".tmp-pipe"), 0o600))
	_, err := WriteLockedTemp(dir, tempPattern, duringRead{func() {
		ours, err := filepath.Glob(filepath.Join(dir, tempPattern))
		must(t, err)
		for _, path := range ours {
			must(t, os.Chtimes(path, time.Unix(0, 0), time.Unix(0, 0)))
		}
		must(t, RemoveTemps(dir, tempPattern))
		if got := names(t, dir); len(got) != 2 || got[1] != "a" {
			t.Errorf("files while one is written: %v, want it and a", got)
		}
	}})
	if err == nil {
		t.Error("no error of the reader")
	}
	if diff := cmp.Diff([]string{"a"}, names(t, dir)); diff != "" {
		t.Errorf("files (-want +got)\n%s", diff)
	}
}
