// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// patience is for what takes milliseconds.
const patience = 10 * time.Second

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// until waits for an event of the name.
func until(t *testing.T, events <-chan fsnotify.Event, name string) {
	t.Helper()
	end := time.After(patience)
	for {
		select {
		case e := <-events:
			if e.Name == name {
				return
			}
		case <-end:
			t.Fatalf("no event of %q", name)
		}
	}
}

// TestDirs: a directory that is not there keeps no other one from being watched, and a receiver that was
// busy for long learns of what is new.
func TestDirs(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	events, stop, err := Dirs(filepath.Join(a, "none"), a, b)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want that a directory is not there", err)
	}
	name := filepath.Join(b, "record")
	for range 10 * waiting {
		must(t, os.WriteFile(name, nil, 0o600))
	}
	until(t, events, name)
	must(t, os.WriteFile(filepath.Join(a, "record"), nil, 0o600))
	stop()
	for len(events) > 0 {
		<-events
	}
	must(t, os.WriteFile(name, nil, 0o600))
	if len(events) > 0 {
		t.Error("an event after the end")
	}
}

// TestForward_lostEvents: when the kernel had no room for more events, the receiver is told that
// some were lost, and of what comes then.
func TestForward_lostEvents(t *testing.T) {
	w, err := fsnotify.NewWatcher()
	must(t, err)
	dir := t.TempDir()
	must(t, w.Add(dir))
	out, done := make(chan fsnotify.Event, waiting), make(chan struct{})
	go func() {
		defer close(done)
		forward(w, out)
	}()
	for range 2 {
		select {
		case w.Errors <- fsnotify.ErrEventOverflow:
		case <-time.After(patience):
			t.Fatal("the watcher stands still")
		}
		until(t, out, "")
	}
	name := filepath.Join(dir, "record")
	must(t, os.WriteFile(name, nil, 0o600))
	until(t, out, name)
	must(t, w.Close())
	<-done
}
