// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/linux"
)

// leave removes everything of kube-smcr from the node. The connections get a moment to end. Then
// the tables, rules and routes are removed in all pods that have a record, whether they were served
// or not, and then the records. The API's socket stays, since the API still answers.
func (a *agent) leave(ctx context.Context) error {
	a.cfg.Log.Info("leaving the node clean", "conns", a.sessions.count(nil))
	proxies := a.legacies.take()
	for key, p := range a.manager.snapshot() {
		if p.proxy != nil {
			proxies = append(proxies, p.proxy)
		} else {
			rest := *p
			a.manager.dropKernel(&rest)
			a.manager.releaseDevices(&rest)
		}
		a.manager.put(key, nil)
	}
	err := a.drainFor(ctx, proxies, min(leaveDrain, a.node.Load().DrainTimeout), nil)
	return errors.Join(err, a.sweepAll(), a.kernelPath.remove(), cni.RemoveAll(a.cfg.Node.DataDir), a.wire.remove(), a.wire.closeHandedOver(), a.cfg.host.sweepWire())
}

// end ends the agent: its connections may end until DrainTimeout, and new ones go directly. A
// successor that asks meanwhile gets the node at once. An agent that may be the node's last one
// waits for a successor all that time, and leaves the node clean if none has asked.
func (a *agent) end(ctx context.Context, api *apiServer, stopAPI func()) error {
	proxies, drained := a.manager.shutdown(context.WithoutCancel(ctx))
	last := a.cfg.MayBeLast != nil && a.cfg.MayBeLast()
	var patience <-chan struct{} // closed when the wait for a successor is over; nil: it is, or nobody waits
	if last {
		wait, cancel := a.hurried(context.WithoutCancel(ctx), a.node.Load().DrainTimeout)
		defer cancel()
		patience = wait.Done()
	}
	var err error
	for drained != nil || patience != nil {
		select {
		case err = <-drained:
			drained = nil
		case <-patience:
			patience = nil
		case h := <-a.manager.handovers:
			a.manager.noHandover() // of two successors one waits for the other
			a.manages(false)
			for _, px := range proxies {
				px.releaseDraining()
			}
			a.giveUpNode(h, api)
			stopAPI()
			if drained != nil {
				err = <-drained
			}
			return err
		}
	}
	a.manager.noHandover()
	if last {
		a.cfg.NoSuccessor()
	}
	if a.left() {
		return errors.Join(err, a.leave(ctx))
	}
	return errors.Join(err, a.wire.end())
}

// sweepAll removes what agents left in the namespaces of all records.
func (a *agent) sweepAll() error {
	atts, junk, err := a.store.List()
	errs := []error{err}
	for _, j := range junk {
		a.cfg.Log.Warn("a pod may keep a table that does nothing any more: its record cannot be read", "err", j)
	}
	groups, _ := byNamespace(atts)
	for _, key := range slices.Sorted(maps.Keys(groups)) {
		att := groups[key][0]
		n, err := a.cfg.kernel.open(att.NetNS)
		if errors.Is(err, linux.ErrGone) {
			continue
		}
		if err == nil {
			if id := att.NetNSID; id == 0 || id == n.id() {
				err = errors.Join(n.sweep(), n.sweepOption())
			}
			err = errors.Join(err, n.close())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("leave pod %v in %s: %w", podOf(att), att.NetNS, err))
		}
	}
	return errors.Join(errs...)
}

// leaveStandingBy ends an agent that stands by when it is told to leave. If there is a successor,
// that removes everything from the node; if not, this agent does.
func (a *agent) leaveStandingBy(ctx context.Context) error {
	l, err := tryLockNode(a.node.Load().APISocket)
	if errors.Is(err, errNodeLocked) {
		return errors.Join(a.drainFor(ctx, a.legacies.take(), 0, nil), a.wire.endStandby(agentapi.WireNone))
	}
	if err != nil {
		return err
	}
	return errors.Join(a.leave(ctx), l.release())
}

// removeDirs removes the directory of the software devices and, if the agent leaves the node, the
// data directory, unless they have files of others. A mount point in a container, which may be on a
// read-only root, stays.
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

// left reports whether the agent was told to leave the node.
func (a *agent) left() bool {
	select {
	case <-a.cfg.Leave:
		return true
	default:
		return false
	}
}

// drainFor gives the sessions time d to end and stops the proxies, all at once. It calls ended, if
// given, after each proxy. Sessions that a change of the policies does not allow any more are reset
// at once.
func (a *agent) drainFor(ctx context.Context, proxies []*proxy, d time.Duration, ended func(*proxy)) error {
	a.draining.Store(true)
	ctx, cancel := a.hurried(context.WithoutCancel(ctx), d)
	defer cancel()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // guards errs
		errs []error
	)
	for _, px := range proxies {
		wg.Go(func() {
			px.drain(ctx)
			err := px.stop(agentapi.CodeDraining, px.net.gone())
			if ended != nil {
				ended(px)
			}
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		})
	}
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	for draining := true; draining; {
		select {
		case <-done:
			draining = false
		case <-a.cfg.Reload:
			a.reload()
			for _, px := range proxies {
				px.enforcePolicies()
			}
		}
	}
	a.legacies.ending.Wait()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("leave pods: %w", err)
	}
	return nil
}
