// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// TestNodeLock: one agent at a time has the node's lock, also when files come and go.
func TestNodeLock(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "sub", "a.sock")
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // of who has the node's lock
		have int
	)
	for range 8 {
		wg.Go(func() {
			for got := 0; got < 50; {
				l, err := tryLockNode(socket)
				if errors.Is(err, errNodeLocked) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				got++
				if !mu.TryLock() {
					t.Error("two have the claim")
					return
				}
				have++
				mu.Unlock()
				if err := l.release(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if have != 400 {
		t.Errorf("%d claims, want 400", have)
	}
	if _, err := os.Lstat(nodeLockPath(socket)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("lock file: %v", err)
	}
}
