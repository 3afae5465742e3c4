// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// keeper is the process that keeps the queues of all pods (linux.KeepQueues). If it ends, or reads
// nothing any more, another one is started and gets the queues.
type keeper struct {
	log *slog.Logger

	mu      sync.Mutex            // guards what is below
	process *linux.Keeper         // nil: there is none
	stuck   chan<- error          // gets why the process was given up, once
	queues  map[holder]keptNumber // of all pods
}

// keptNumber is the number of a queue in the process.
type keptNumber struct {
	number uint32
	kept   bool
}

// add gives the process a queue.
func (k *keeper) add(h holder) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.queues == nil {
		k.queues = map[holder]keptNumber{}
	}
	k.queues[h] = keptNumber{}
	return k.keepLocked(h)
}

func (k *keeper) keepLocked(h holder) error {
	if k.process == nil {
		return nil // the next one gets it
	}
	n, err := h.Keep(k.process)
	if k.gaveUpLocked(err) {
		return nil
	}
	if err == nil {
		k.queues[h] = keptNumber{n, true}
	}
	return err
}

// gaveUpLocked gives the process up if err says that it reads nothing: it was stopped alone, say.
func (k *keeper) gaveUpLocked(err error) bool {
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	k.process = nil
	k.stuck <- err // which has room: without a process there is no other such error
	return true
}

// remove takes a queue back.
func (k *keeper) remove(h holder) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	q := k.queues[h]
	delete(k.queues, h)
	if k.process == nil || !q.kept {
		return nil
	}
	err := k.process.Release(q.number)
	if k.gaveUpLocked(err) || errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return err
}

// run keeps a process running until ctx ends.
func (k *keeper) run(ctx context.Context, command func() *exec.Cmd) {
	for {
		began := time.Now()
		err := k.runOnce(ctx, command())
		if ctx.Err() != nil {
			return
		}
		k.log.Warn("keeper of queues ended; it is started again", "after", time.Since(began).Round(time.Millisecond), "err", err)
		if !sleep(ctx, keeperPause) {
			return
		}
	}
}

// runOnce runs one process until it or ctx ends.
func (k *keeper) runOnce(ctx context.Context, cmd *exec.Cmd) error {
	p, child, err := linux.NewKeeper()
	if err != nil {
		return err
	}
	cmd.ExtraFiles = []*os.File{child}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // signals of a terminal are for the agent
	err = cmd.Start()
	if err = errors.Join(err, child.Close()); err != nil {
		return errors.Join(fmt.Errorf("start keeper of queues: %w", err), p.Close())
	}
	stuck, ended := make(chan error, 1), make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	k.begin(p, stuck)
	select {
	case err = <-ended:
		return errors.Join(err, k.end(p))
	case err = <-stuck: // killed first: if it went on with its socket closed, it would drain the queues
		return errors.Join(err, cmd.Process.Kill(), <-ended, k.end(p))
	case <-ctx.Done():
	}
	err = k.end(p) // which ends the process
	late := time.NewTimer(keeperEndPatience)
	defer late.Stop()
	select {
	case werr := <-ended:
		return errors.Join(err, werr)
	case <-late.C: // it was stopped, say
		return errors.Join(err, cmd.Process.Kill(), <-ended)
	}
}

// begin gives a new process all queues.
func (k *keeper) begin(p *linux.Keeper, stuck chan<- error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.process, k.stuck = p, stuck
	for h := range k.queues {
		if err := k.keepLocked(h); err != nil {
			k.log.Warn("queue not kept", "err", err)
		}
	}
}

func (k *keeper) end(p *linux.Keeper) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.process = nil
	for h := range k.queues {
		k.queues[h] = keptNumber{}
	}
	return p.Close()
}
