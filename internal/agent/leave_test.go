// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
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

// TestSweepAll_stale: where the record of a pod that is gone has the path of one that is there, that one is swept.
func TestSweepAll_stale(t *testing.T) {
	b := newAbleBare(t, "", preferAll)
	p := b.attachAgain()
	must(t, b.a.sweepAll())
	if p.sweeps != 1 {
		t.Errorf("swept %d times", p.sweeps)
	}
}
