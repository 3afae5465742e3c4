// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/smcr-io/kube-smcr/internal/files"
)

// ErrReplaced means that one of the directories was removed on the node, and may have been
// made anew: this process has the former one mounted, and does not see the one that counts.
var ErrReplaced = errors.New("was removed or replaced on the node")

// Run installs the plugin and keeps it installed until ctx ends; then it leaves the plugin
// in place. Its only error is [ErrReplaced], after which the process has to start again in
// a container that mounts the directories anew. Any other one is in the status, and Run
// tries again.
func (in *Installer) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		l, err := tryLock(in.c.ConfDir)
		switch {
		case err == nil:
			err = in.work(ctx, l)
			_ = l.Unlock() // the error is that of closing a directory
			if err != nil {
				return err
			}
		case errors.Is(err, errBusy):
			in.update(func(s *Status) { s.State, s.Detail = StateStandby, err.Error() })
			pause(ctx, lockPoll)
		default:
			in.update(func(s *Status) { s.State, s.Detail = StateBroken, advise(err) })
			pause(ctx, troubleInterval)
		}
	}
	return nil
}

// replaced is the ErrReplaced of a directory.
func (in *Installer) replaced() error {
	for _, dir := range []string{in.c.ConfDir, in.c.BinDir} {
		if files.Unlinked(dir) {
			return fmt.Errorf("%s %w: the agent starts again", dir, ErrReplaced)
		}
	}
	return nil
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// work keeps the plugin installed until ctx ends, or until the directory that l is a lock
// on was replaced by another one. The error is an ErrReplaced.
func (in *Installer) work(ctx context.Context, l *files.Lock) error {
	for _, dir := range []string{in.c.ConfDir, in.c.BinDir} {
		if err := removeTemps(dir); err != nil {
			in.log.Warn("remove temporary files", "err", err)
		}
	}
	w, complete := in.watch()
	if w != nil {
		defer func() { _ = w.Close() }()
	}
	for {
		if err := in.replaced(); err != nil {
			in.update(func(s *Status) { s.State, s.Detail = StateBroken, err.Error() })
			return err
		}
		in.pass()
		interval := checkInterval
		if s := in.Status(); !s.Working() || !complete {
			interval = troubleInterval
		}
		if !in.wait(ctx, w, interval) || !l.Stands() {
			return nil
		}
		if !complete && w != nil { // the directory of the binaries may have appeared
			complete = w.Add(in.c.BinDir) == nil
		}
	}
}

// watch watches both directories. w is nil if that is not possible; complete is false if
// one of the directories is not watched.
func (in *Installer) watch() (w *fsnotify.Watcher, complete bool) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		in.log.Warn("CNI directories not watched; they are read every few seconds instead", "err", err)
		return nil, false
	}
	for _, dir := range []string{in.c.ConfDir, in.c.BinDir} {
		if aerr := w.Add(dir); aerr != nil {
			in.log.Warn("CNI directory not watched; it is read every few seconds instead", "dir", dir, "err", aerr)
			err = aerr
		}
	}
	return w, err == nil
}

// wait returns true after a change, once there was no other one for debounce or
// maxDebounce is over, and after the interval. It returns false when ctx ends.
func (in *Installer) wait(ctx context.Context, w *fsnotify.Watcher, interval time.Duration) bool {
	var events <-chan fsnotify.Event
	var errs <-chan error
	if w != nil {
		events, errs = w.Events, w.Errors
	}
	timer := time.NewTimer(interval)
	defer timer.Stop()
	var last <-chan time.Time // maxDebounce after the first change
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case <-last:
			return true
		case err := <-errs: // events were lost
			in.log.Debug("watch the CNI directories", "err", err)
			return true
		case e := <-events:
			if own, _ := filepath.Match(tempPattern, filepath.Base(e.Name)); own {
				continue
			}
			if last == nil {
				last = time.After(maxDebounce)
			}
			timer.Reset(debounce)
		}
	}
}
