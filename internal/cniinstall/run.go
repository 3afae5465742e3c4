// SPDX-License-Identifier: Apache-2.0

package cniinstall

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Run installs the plugin and keeps it installed until ctx ends. It leaves
// everything in place. What is in its way is in the status, and tried again: it
// is no reason to end.
func (in *Installer) Run(ctx context.Context) {
	for ctx.Err() == nil {
		l, err := tryLock(in.c.ConfDir)
		switch {
		case err == nil:
			in.work(ctx, l)
			l.release()
		case errors.Is(err, errBusy):
			in.update(func(s *Status) { s.State, s.Detail = StateStandby, err.Error() })
			pause(ctx, lockPoll)
		default:
			in.update(func(s *Status) { s.State, s.Detail = StateBroken, advise(err) })
			pause(ctx, troubleInterval)
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// work repairs until ctx ends, or until the directory is another one.
func (in *Installer) work(ctx context.Context, l *lock) {
	for _, dir := range []string{in.c.ConfDir, in.c.BinDir} {
		if err := removeTemps(dir); err != nil {
			in.log.Warn("remove temporary files", "error", err)
		}
	}
	w, complete := in.watch()
	if w != nil {
		defer func() { _ = w.Close() }()
	}
	for {
		in.pass()
		interval := in.c.Interval
		if s := in.Status(); !s.Working() || !complete {
			interval = min(interval, troubleInterval)
		}
		if !in.wait(ctx, w, interval) || !l.current(in.c.ConfDir) {
			return
		}
		if !complete && w != nil { // the directory of the binaries may have come
			complete = w.Add(in.c.BinDir) == nil
		}
	}
}

// watch watches both directories. It is nil where that does not work, and not
// complete where it does for one of them.
func (in *Installer) watch() (w *fsnotify.Watcher, complete bool) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		in.log.Warn("cannot watch the CNI directories, so they are looked at every few seconds", "error", err)
		return nil, false
	}
	for _, dir := range []string{in.c.ConfDir, in.c.BinDir} {
		if aerr := w.Add(dir); aerr != nil {
			in.log.Warn("cannot watch a CNI directory, so it is looked at every few seconds", "dir", dir, "error", aerr)
			err = aerr
		}
	}
	return w, err == nil
}

// wait waits until something changed and is quiet again, or for the interval. It
// is false when ctx ends.
func (in *Installer) wait(ctx context.Context, w *fsnotify.Watcher, interval time.Duration) bool {
	var events <-chan fsnotify.Event
	var errs <-chan error
	if w != nil {
		events, errs = w.Events, w.Errors
	}
	timer := time.NewTimer(interval)
	defer timer.Stop()
	var last <-chan time.Time // the end of all patience with a directory that is not quiet
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case <-last:
			return true
		case err := <-errs: // events were lost: look
			in.log.Debug("watch the CNI directories", "error", err)
			return true
		case e := <-events:
			if own, _ := filepath.Match(tempPattern, filepath.Base(e.Name)); own {
				continue
			}
			if last == nil {
				last = time.After(maxSettle)
			}
			timer.Reset(settle)
		}
	}
}
