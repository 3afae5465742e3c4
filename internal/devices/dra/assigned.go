// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/files/watch"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// Assigned tells from the records on disk which devices pods claimed. Its methods may be
// called by any goroutine.
type Assigned struct {
	store   claims.Store
	log     *slog.Logger
	changed chan struct{}

	mu     sync.Mutex // guards what is below
	claims []claims.Claim
	said   string
}

// NewAssigned reads the records of a data directory.
func NewAssigned(dataDir string, log *slog.Logger) *Assigned {
	a := &Assigned{store: claims.NewStore(dataDir), log: log, changed: make(chan struct{}, 1)}
	a.look()
	return a
}

// Run reads the records again whenever they change, until ctx ends.
func (a *Assigned) Run(ctx context.Context) {
	events, stop := watchAll(a.log, a.store)
	defer stop()
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for {
		a.look()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-events:
		}
	}
}

// A directory is a directory of records that can be watched.
type directory interface {
	MakeDir() error
	Dir() string
}

// watchAll tells of changes in directories until stop is called.
func watchAll(log *slog.Logger, dirs ...directory) (events <-chan fsnotify.Event, stop func()) {
	var errs []error
	paths := make([]string, 0, len(dirs))
	for _, d := range dirs {
		errs = append(errs, d.MakeDir())
		paths = append(paths, d.Dir())
	}
	events, stop, err := watch.Dirs(paths...)
	if err := errors.Join(append(errs, err)...); err != nil {
		log.Warn("records are not watched, but read every few seconds", "err", err)
	}
	return events, stop
}

// look reads the records. While they cannot be read, all claims stay as they were.
func (a *Assigned) look() {
	all, err := a.store.List()
	a.mu.Lock()
	defer a.mu.Unlock()
	text, unread := "", errors.Is(err, claims.ErrUnread)
	if err != nil {
		text = err.Error()
	}
	switch {
	case text == "" || text == a.said:
	case unread:
		a.log.Warn("records of claims cannot be read; pods have the devices that they had", "err", err)
	default:
		a.log.Warn("records of claims cannot be read; pods whose claims they are have no devices to the agent", "err", err)
	}
	a.said = text
	if unread {
		return
	}
	slices.SortStableFunc(all, func(x, y claims.Claim) int { return x.Prepared.Compare(y.Prepared) })
	same := slices.EqualFunc(all, a.claims, func(x, y claims.Claim) bool {
		return x.UID == y.UID && slices.Equal(x.Pods, y.Pods) && slices.Equal(x.Devices, y.Devices)
	})
	if same {
		return
	}
	a.claims = all
	select {
	case a.changed <- struct{}{}:
	default: // a value is waiting already
	}
}

// Changed gets a value when an answer of Devices or Claimed has changed.
func (a *Assigned) Changed() <-chan struct{} { return a.changed }

// Devices returns the IDs of the devices that a pod claimed, in the order of its claims. The
// claims of a former pod of the name, which is still ending, do not count.
func (a *Assigned) Devices(pod config.PodName) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	of := func(p records.Pod) bool { return p.Namespace == pod.Namespace && p.Name == pod.Name }
	uid := ""
	for _, c := range a.claims { // in the order in which they were prepared: the last one is the newest pod's
		for _, p := range c.Pods {
			if of(p) {
				uid = p.UID
			}
		}
	}
	var out []string
	for _, c := range a.claims {
		if !slices.ContainsFunc(c.Pods, func(p records.Pod) bool { return of(p) && p.UID == uid }) {
			continue
		}
		for _, d := range c.Devices {
			if !slices.Contains(out, d.ID) {
				out = append(out, d.ID)
			}
		}
	}
	return out
}

// Claimed says whether a pod has a device through a claim.
func (a *Assigned) Claimed(podUID string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.claims, func(c claims.Claim) bool { return len(c.Devices) > 0 && c.Of(podUID) })
}
