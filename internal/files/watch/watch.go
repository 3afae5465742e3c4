// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"errors"
	"fmt"

	"github.com/fsnotify/fsnotify"
)

// waiting is how many events wait for their receiver: an event tells no more than the one before it, but for
// its name.
const waiting = 16

// Dirs tells of changes in directories until stop is called. After an error it tells of those that can be watched, which may be
// none; events is nil only if there is no watcher at all, for want of descriptors for example. An event of no name says that
// others were lost.
func Dirs(dirs ...string) (events <-chan fsnotify.Event, stop func(), err error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, func() {}, err
	}
	var errs []error
	for _, d := range dirs {
		if err := w.Add(d); err != nil {
			errs = append(errs, fmt.Errorf("watch %s: %w", d, err))
		}
	}
	out, done := make(chan fsnotify.Event, waiting), make(chan struct{})
	go func() {
		defer close(done)
		forward(w, out)
	}()
	return out, func() {
		_ = w.Close() // nothing was written
		<-done
	}, errors.Join(errs...)
}

// forward forwards events until the watcher is closed. A watcher whose errors nobody takes stands still.
func forward(w *fsnotify.Watcher, out chan<- fsnotify.Event) {
	for {
		var e fsnotify.Event
		ok := false
		select {
		case e, ok = <-w.Events:
		case _, ok = <-w.Errors: // events were lost
		}
		if !ok {
			return
		}
		select {
		case out <- e:
		default: // events are waiting already, and their receiver looks at everything
		}
	}
}
