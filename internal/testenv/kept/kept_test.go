// SPDX-License-Identifier: Apache-2.0

package kept

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
)

// TestMake: a directory is made once, of what it is named after, and what could not
// be made leaves nothing.
func TestMake(t *testing.T) {
	t.Setenv(clustertools.CacheEnv, t.TempDir())
	dir, err := Dir("kind/thing-", "a", 1)
	if other, err2 := Dir("kind/thing-", "a", 2); err != nil || err2 != nil || dir == other {
		t.Fatalf("two things have the directories %s and %s: %v, %v", dir, other, err, err2)
	}
	there := func() bool { _, err := os.Stat(filepath.Join(dir, "file")); return err == nil }
	calls := 0
	fill := func(tmp string) (string, error) {
		if calls++; calls == 1 {
			return "", errors.New("no mirror")
		}
		made := filepath.Join(tmp, "made")
		return made, errors.Join(os.Mkdir(made, 0o700), os.WriteFile(filepath.Join(made, "file"), nil, 0o600))
	}
	if err := Make(dir, "test", "the thing", io.Discard, there, fill); err == nil || !strings.Contains(err.Error(), "build the thing: no mirror") {
		t.Errorf("the first time: %v", err)
	}
	if left, err := filepath.Glob(dir + "*"); err != nil || len(left) != 1 || left[0] != dir+".lock" {
		t.Errorf("left are %v, %v, want only the lock", left, err)
	}
	for range 2 {
		if err := Make(dir, "test", "the thing", io.Discard, there, fill); err != nil || !there() {
			t.Errorf("it is there: %t, %v", there(), err)
		}
	}
	if calls != 2 {
		t.Errorf("it was made %d times, want once without an error and once with", calls)
	}
	if _, err := os.Stat(dir + ".new"); err == nil {
		t.Error("the directory for making it is left")
	}
}
