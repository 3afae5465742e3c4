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

// keeper is the process that keeps the queues of all pods (linux.KeepQueues). If it ends, another one
// is started and gets the queues.
type keeper struct {
	log *slog.Logger

	mu      sync.Mutex            // guards what is below
	process *linux.Keeper         // nil: there is none
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
	if err == nil {
		k.queues[h] = keptNumber{n, true}
	}
	return err
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
	if err := k.process.Release(q.number); err != nil && !errors.Is(err, syscall.EPIPE) {
		return err
	}
	return nil
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
	k.begin(p)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err = <-ended:
		return errors.Join(err, k.end(p))
	case <-ctx.Done():
		err = k.end(p) // which ends the process
		return errors.Join(err, <-ended)
	}
}

// begin gives a new process all queues.
func (k *keeper) begin(p *linux.Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.process = p
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
