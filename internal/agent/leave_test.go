// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
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
