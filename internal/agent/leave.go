// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// leave takes everything of kube-smcr off the node: the connections may end for
// a moment, and then the pods' tables, rules and routes go, of all pods that
// have a record, whether they were served or not, and the records. What the API
// uses is left to serve.
func (a *agent) leave(ctx context.Context) error {
	a.cfg.Log.Info("leaving the node clean", "conns", len(a.flows.list(nil)))
	runs := a.legacies.take()
	for key, p := range a.manager.snapshot() {
		if p.run != nil {
			runs = append(runs, p.run)
		} else {
			rest := *p
			a.manager.withdraw(&rest)
		}
		a.manager.put(key, nil)
	}
	err := a.drainFor(ctx, runs, min(leaveDrain, a.node.Load().DrainTimeout), nil)
	return errors.Join(err, a.sweepAll(), a.store.RemoveAll(), a.wire.remove(), a.cfg.host.sweepWire())
}

// sweepAll sweeps the namespaces of all records.
func (a *agent) sweepAll() error {
	atts, junk, err := a.store.List()
	errs := []error{err}
	for _, j := range junk {
		a.cfg.Log.Warn("a pod may keep a table that does nothing any more: its record cannot be read", "err", j)
	}
	swept := map[string]bool{}
	for _, att := range atts {
		if swept[att.NetNS] {
			continue
		}
		swept[att.NetNS] = true
		n, err := a.cfg.kernel.open(att.NetNS)
		if errors.Is(err, linux.ErrGone) {
			continue
		}
		if err == nil {
			if id := att.NetNSID; id == 0 || id == n.id() {
				err = n.sweep()
			}
			err = errors.Join(err, n.close())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("leave pod %v in %s: %w", podOf(att), att.NetNS, err))
		}
	}
	return errors.Join(errs...)
}

// leaveStandingBy leaves the node to the successor, which leaves it clean, or
// does it itself if there is none.
func (a *agent) leaveStandingBy(ctx context.Context) error {
	c, err := tryClaim(a.node.Load().APISocket)
	if errors.Is(err, errClaimed) {
		return a.drainFor(ctx, a.legacies.take(), 0, nil)
	}
	if err != nil {
		return err
	}
	return errors.Join(a.leave(ctx), c.release())
}

// removeDirs removes the directory of the devices, and of an agent that leaves the node
// the data directory, if nothing of others is in them. In a container that is a mount
// point, perhaps on a read-only root, and stays.
func (a *agent) removeDirs() error {
	dir := a.node.Load().DataDir
	if err := removeEmpty(softDir(dir)); err != nil || !a.left() {
		return err
	}
	return removeEmpty(dir)
}

func removeEmpty(dir string) error {
	err := os.Remove(dir)
	for _, stays := range []error{fs.ErrNotExist, syscall.ENOTEMPTY, syscall.EBUSY, syscall.EROFS} {
		if errors.Is(err, stays) {
			return nil
		}
	}
	return err
}

// left tells whether the agent was told to leave the node.
func (a *agent) left() bool {
	select {
	case <-a.cfg.Leave:
		return true
	default:
		return false
	}
}

// drainFor lets connections end for a time and stops the runs. It calls ended,
// if given, after each.
func (a *agent) drainFor(ctx context.Context, runs []*run, d time.Duration, ended func(*run)) error {
	a.draining.Store(true)
	ctx, cancel := a.hurried(context.WithoutCancel(ctx), d)
	defer cancel()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // guards errs
		errs []error
	)
	for _, r := range runs {
		wg.Go(func() {
			r.drain(ctx)
			err := r.stop(agentapi.CodeDraining, r.net.gone())
			if ended != nil {
				ended(r)
			}
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		})
	}
	wg.Wait()
	a.legacies.ending.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("leave pods: %w", err)
	}
	return nil
}
