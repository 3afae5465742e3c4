// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// queues is the kernel's list of the queues in the namespace.
func (s *space) queues(t testing.TB) (list string) {
	t.Helper()
	must(t, s.ns.Do(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_queue")
		list = string(b)
		return err
	}))
	return list
}

// TestKeeper_startsAgain: after a keeper was killed, a new keeper has copies of the queues. When the
// agent ends, no process has the queues.
func TestKeeper_startsAgain(t *testing.T) {
	l := newHoldLab(t, preferAll)
	var begun atomic.Int32
	mark := func(i int32) string { return fmt.Sprintf("KEEPER_OF=%s/%d", l.a.dir, i) }
	l.a.cfg.Keeper = func() *exec.Cmd {
		c := keeperCommand()
		c.Env = append(c.Environ(), mark(begun.Add(1)))
		return c
	}
	pid := func(i int32) int { // 0: it does not run
		all, err := filepath.Glob("/proc/[0-9]*/environ")
		must(t, err)
		for _, name := range all {
			if env, err := os.ReadFile(name); err == nil && strings.Contains("\x00"+string(env), "\x00"+mark(i)+"\x00") {
				return value(strconv.Atoi(filepath.Base(filepath.Dir(name))))(t)
			}
		}
		return 0
	}
	sockets := func(i int32) int { // that the process has, besides the one to the agent
		n := -1
		dir := fmt.Sprintf("/proc/%d/fd", pid(i))
		files, err := os.ReadDir(dir)
		if err != nil {
			return -1
		}
		for _, f := range files {
			if to, err := os.Readlink(filepath.Join(dir, f.Name())); err == nil && strings.HasPrefix(to, "socket:") {
				n++
			}
		}
		return n
	}
	l.a.start(t)
	keeps := func(i int32) {
		t.Helper()
		eventually(t, func() string {
			if n := sockets(i); n != 1 {
				return fmt.Sprintf("keeper %d has %d queues, want that of the pod", i, n)
			}
			return ""
		})
	}
	keeps(1)
	must(t, syscall.Kill(pid(1), syscall.SIGKILL))
	keeps(2)
	if got := l.a.pod.queues(t); strings.Count(got, "\n") != 1 {
		t.Errorf("queues of the pod:\n%s", got)
	}
	must(t, l.a.stop())
	if got := l.a.pod.queues(t); got != "" {
		t.Errorf("queues of the pod after the end of the agent:\n%s", got)
	}
}

// keptHolder is a holder that tells a keeper whatever say does.
type keptHolder struct {
	holder
	say func(k *linux.Keeper) error
}

func (h *keptHolder) Keep(k *linux.Keeper) (uint32, error) { return 1, h.say(k) }

// TestKeeper_readsNothing: a process that reads nothing, and ends for no closed socket, is killed: if the agent has something to
// tell it, for which another process gets all queues, and when the agent ends.
func TestKeeper_readsNothing(t *testing.T) {
	t.Parallel() // the test mostly waits
	fill := func(k *linux.Keeper) error {
		for {
			if err := k.Release(1); err != nil {
				return err
			}
		}
	}
	var full atomic.Bool // until the next process, whatever a queue is kept for waits
	say := func(k *linux.Keeper) error {
		if full.CompareAndSwap(true, false) {
			return fill(k)
		}
		return nil
	}
	k := &keeper{log: slog.New(slog.DiscardHandler)}
	var begun atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		k.run(ctx, func() *exec.Cmd {
			begun.Add(1)
			return exec.Command("sleep", "600")
		})
	}()
	defer func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(waitLimit):
			t.Error("the keeper does not end")
		}
	}()
	first, second := &keptHolder{say: say}, &keptHolder{say: say}
	runs := func(n int32) {
		t.Helper()
		eventually(t, func() string {
			k.mu.Lock()
			defer k.mu.Unlock()
			if begun.Load() != n || k.process == nil || !k.queues[first].kept {
				return fmt.Sprintf("process %d of %d, with %+v", begun.Load(), n, k.queues)
			}
			return ""
		})
	}
	must(t, k.add(first))
	runs(1)
	full.Store(true)
	must(t, k.add(second))
	runs(2)
	k.mu.Lock()
	if got := fill(k.process); !errors.Is(got, os.ErrDeadlineExceeded) {
		t.Errorf("the process does not read: %v", got)
	}
	k.mu.Unlock()
	must(t, k.remove(second))
	runs(3)
	must(t, k.remove(first))
}

// TestHold_handover: a successor opens a queue of its own, and the agent before it closes its queue.
func TestHold_handover(t *testing.T) {
	l := newHoldLab(t, "  takeover: true\n"+preferAll)
	l.a.start(t)
	l.b.start(t)
	serve(t, l.b.pod.listen(t, podB+":80"), says("server"))
	_ = l.a.pod.try(t, attempt{dst: podB + ":80"})
	stop := l.a.pod.load(t, podB+":80")
	first := l.a.stop
	l.a.start(t)
	must(t, first())
	got := stop()
	if got.failed+got.reset+got.silent > 0 || got.connects < 10 {
		t.Errorf("%+v, want that none failed", got)
	}
	t.Logf("%+v", got)
	eventually(t, func() string {
		if list := l.a.pod.queues(t); strings.Count(list, "\n") != 1 {
			return "queues of the pod:\n" + list
		}
		return ""
	})
	eventually(t, func() string {
		_ = l.a.pod.try(t, attempt{dst: podB + ":80"})
		if l.a.status(t).Conns.TotalSMCR == 0 {
			return "nothing is on SMC-R with the successor"
		}
		return ""
	})
}
