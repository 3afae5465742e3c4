// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/internal/cni"
)

// TestLeave: all pods with a record are swept, whether they were served or not,
// and nothing stays on the disk.
func TestLeave(t *testing.T) {
	leave := make(chan struct{})
	b := newBench(t, "", "policies:\n- {name: p, pods: {names: [served, broken]}}\n")
	b.cfg.Leave = leave
	pods := map[string]*fakePod{"served": b.attach("served", 1), "idle": b.attach("idle", 2), "broken": b.attach("broken", 3)}
	pods["broken"].failStep = "install"
	pods["served"].dst = b.server()
	b.start()
	c := b.dial(pods["served"], 0)
	pingOnce(t, c)
	before := map[string]int{}
	b.kernel.change(func() {
		for name, p := range pods {
			before[name] = p.sweeps
		}
	})
	close(leave)
	wantReset(t, c)
	if err := <-b.done; err != nil {
		t.Errorf("Run = %v", err)
	}
	b.done = nil
	for name, p := range pods {
		if p.sweeps == before[name] {
			t.Errorf("pod %s was not swept", name)
		}
	}
	if _, err := os.Lstat(b.dir); !errors.Is(err, os.ErrNotExist) {
		left, _ := filepath.Glob(b.dir + "/*")
		t.Errorf("data directory is there, with %v", left)
	}
}

// TestLeave_standingBy: an agent that handed over leaves, too.
func TestLeave_standingBy(t *testing.T) {
	b := newHandoverBench(t, "old")
	leave := make(chan struct{})
	b.cfg.Leave = leave
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	c := b.dial(p, 0)
	pingOnce(t, c)
	b.cfg.Leave = nil
	b.successor("new")
	sweeps := p.sweeps
	close(leave)
	wantReset(t, c)
	if err := <-b.done; err != nil {
		t.Errorf("Run = %v", err)
	}
	b.done = nil
	if p.sweeps != sweeps {
		t.Error("the pod of the successor was swept")
	}
}

// TestEnd_mayBeLast: an agent that may be the node's last one waits for a successor, though it carries
// nothing, and leaves the node clean if it is to after that.
func TestEnd_mayBeLast(t *testing.T) {
	for _, tt := range []struct {
		name           string
		last, succeeds bool // what the cluster knows at the beginning of the drain, and at its end
	}{{"another agent comes", false, true}, {"no other agent comes", true, false}, {"known later that one comes", true, true}} {
		t.Run(tt.name, func(t *testing.T) {
			leave, asked := make(chan struct{}), false
			b := newBench(t, "", preferAll)
			b.cfg.Node.DrainTimeout = 500 * time.Millisecond
			b.cfg.Leave, b.cfg.MayBeLast = leave, func() bool { return tt.last }
			b.cfg.NoSuccessor = func() {
				if asked = true; !tt.succeeds {
					close(leave)
				}
			}
			b.attach("a", 1)
			b.start()
			begin := time.Now()
			b.stop()
			if took := time.Since(begin); tt.last && took < b.cfg.Node.DrainTimeout {
				t.Errorf("the agent waited %v for a successor, want %v", took, b.cfg.Node.DrainTimeout)
			}
			_, err := os.Lstat(b.dir)
			if clean := errors.Is(err, os.ErrNotExist); clean == tt.succeeds || asked != tt.last {
				t.Errorf("clean: %t, asked: %t", clean, asked)
			}
		})
	}
}

// TestEnd_succeeded: an agent that may be the node's last one gives the node to a successor that comes, and leaves
// everything there.
func TestEnd_succeeded(t *testing.T) {
	b := newHandoverBench(t, "old")
	b.cfg.Node.DrainTimeout = time.Hour
	b.cfg.Leave = make(chan struct{})
	b.cfg.MayBeLast = func() bool { return true }
	b.cfg.NoSuccessor = func() { t.Error("there is a successor") }
	p := b.attach("a", 1)
	p.dst = b.server()
	b.start()
	b.cancel()
	eventually(t, func() string {
		if !b.status().Draining {
			return "the agent does not drain"
		}
		return ""
	})
	b.cfg.Leave, b.cfg.MayBeLast, b.cfg.NoSuccessor = nil, nil, nil
	b.successor("new")
	b.stop()
	pingOnce(t, b.dial(p, 2))
}

// TestDrainFor_late: one pod in which the kernel is at something does not keep the agent.
func TestDrainFor_late(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newAbleBare(t, "", preferAll)
		slow, other := b.proxy("slow"), b.proxy("other")
		end := make(chan struct{})
		slow.redir.removing = func() { <-end }
		start := time.Now()
		must(t, b.a.drainFor(t.Context(), []*proxy{slow.px, other.px}, time.Second, time.Minute, nil))
		if took := time.Since(start); took != time.Second+time.Minute || other.sweeps != 1 || !strings.Contains(b.log.String(), "pod not left clean") {
			t.Errorf("took %v, the other one was swept %d times", took, other.sweeps)
		}
		close(end)
		synctest.Wait()
		if n := b.kernel.handles(); n != 0 {
			t.Errorf("%d handles", n)
		}
	})
}

// TestRun_slowPods: an agent that is told to end does so though the end of one pod, or its set-up, takes long.
func TestRun_slowPods(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.cfg.jobPatience, b.cfg.stopPatience = 100*time.Millisecond, 100*time.Millisecond
	hang := make(chan struct{})
	slow, other := b.attach("slow", 1), b.attach("other", 2)
	b.start()
	slow.redir.look(func() { slow.redir.removing = func() { <-hang } })
	b.kernel.change(func() { b.kernel.hang = map[string]chan struct{}{"/netns/new": hang} })
	late := b.attach("new", 3)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := cni.Notify(ctx, b.cfg.Node.APISocket, cni.Event{Verb: "ADD", ContainerID: "new"}); err == nil {
		t.Fatal("the pod is set up")
	}
	b.cancel()
	select {
	case err := <-b.done:
		b.done = nil
		must(t, err)
	case <-time.After(waitLimit):
		t.Error("the agent does not end")
	}
	if other.sweeps == 0 {
		t.Error("the other pod was not swept")
	}
	close(hang)
	eventually(t, func() string {
		if n := b.kernel.handles(); n != 0 {
			return fmt.Sprintf("%d handles", n)
		}
		return ""
	})
	if late.redir != nil {
		t.Error("the pod was set up after the agent's end")
	}
}

// TestReleaseDraining: a pod that is late with the end of its diversion does not keep a successor; one from which something
// is being removed does.
func TestReleaseDraining(t *testing.T) {
	t.Parallel() // the test mostly waits
	b := newAbleBare(t, "", preferAll)
	slow, other := b.proxy("slow"), b.proxy("other")
	end := make(chan struct{})
	defer close(end)
	slow.redir.removing = func() { <-end }
	proxies := []*proxy{slow.px, other.px}
	other.px.leaving.Lock() // as during a sweep
	err := b.a.releaseDraining(proxies)
	other.px.leaving.Unlock()
	if err == nil || !strings.Contains(err.Error(), "test/other is being left") {
		t.Errorf("releaseDraining = %v", err)
	}
	if err := b.a.releaseDraining(proxies); err != nil || !slow.px.released.Load() || !other.px.released.Load() {
		t.Errorf("releaseDraining = %v; released %v, %v", err, slow.px.released.Load(), other.px.released.Load())
	}
	b.a.manager.late = []string{"/netns/late"}
	if err := b.a.releaseDraining(proxies); err == nil {
		t.Error("a successor gets a pod that is being set up")
	}
}

// TestSweepAll_stale: where the record of a pod that is gone has the path of one that is there, that one is swept.
func TestSweepAll_stale(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.attachAgain()
	must(t, b.a.sweepAll())
	if p.sweeps != 1 {
		t.Errorf("swept %d times", p.sweeps)
	}
}
