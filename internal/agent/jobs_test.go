// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
)

// TestJobs: one thing after the other for a pod, and nothing of it waits for
// another pod.
func TestJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			j    jobs
			mu   sync.Mutex // guards did
			did  []string
			gate = make(chan struct{})
		)
		j.begin()
		ask := func(key, what string, force, slow bool) <-chan struct{} {
			return j.ask(key, wish{force: force, atts: []cni.Attachment{{ContainerID: what}}}, func(w wish) {
				if slow && w.atts[0].ContainerID == what {
					<-gate
				}
				mu.Lock()
				defer mu.Unlock()
				did = append(did, key+" "+w.atts[0].ContainerID)
			})
		}
		over := func(c <-chan struct{}) bool {
			synctest.Wait()
			select {
			case <-c:
				return true
			default:
				return false
			}
		}
		first := ask("a", "1", false, true)
		skipped := ask("a", "2", false, false)
		forced := ask("a", "3", true, false)
		joined := ask("a", "4", false, false)
		replaces := ask("a", "5", true, false)
		if !over(ask("b", "1", false, false)) {
			t.Error("one pod waits for another")
		}
		for name, c := range map[string]<-chan struct{}{"first": first, "skipped": skipped, "forced": forced, "joined": joined, "replaces": replaces} {
			if over(c) {
				t.Errorf("%s is over before the first is", name)
			}
		}
		close(gate)
		for name, c := range map[string]<-chan struct{}{"first": first, "forced": forced, "joined": joined, "replaces": replaces} {
			if !over(c) {
				t.Errorf("%s is not over", name)
			}
		}
		if want := []string{"b 1", "a 1", "a 5"}; !slices.Equal(did, want) {
			t.Errorf("did %v, want %v", did, want)
		}
		gate = make(chan struct{})
		ask("a", "6", true, true)
		dropped := ask("a", "7", true, false)
		time.AfterFunc(time.Second, func() { close(gate) })
		start := time.Now()
		j.finish()
		if took := time.Since(start); took != time.Second || over(dropped) || did[len(did)-1] != "a 6" {
			t.Errorf("finished after %v: %v", took, did)
		}
	})
}

// TestManager_slowPod: a pod whose namespace cannot be opened for a while holds
// up neither others nor what is asked about them, and is not said to be in line.
func TestManager_slowPod(t *testing.T) {
	b := newBench(t, "", preferAll)
	b.start()
	hang := make(chan struct{})
	b.kernel.change(func() { b.kernel.hang = map[string]chan struct{}{"/netns/slow": hang} })
	b.attach("slow", 1)
	b.attach("other", 2)
	must(t, cni.Notify(t.Context(), b.cfg.Node.APISocket, cni.Event{Verb: "ADD", ContainerID: "other"}))
	if x := b.attachment("other"); x.State != agentapi.StateReady {
		t.Errorf("attachment %+v", x)
	}
	if s := b.status(); s.Pods.Attached != 1 {
		t.Errorf("pods %+v", s.Pods)
	}
	close(hang)
	b.sync()
	if x := b.attachment("slow"); x.State != agentapi.StateReady {
		t.Errorf("attachment %+v", x)
	}
}

// TestManager_manyAtOnce: pods that share devices are set up and ended at once.
func TestManager_manyAtOnce(t *testing.T) {
	b := newBench(t, "", preferAll)
	for i := range 40 {
		b.attach(fmt.Sprintf("p%d", i), uint64(i+1))
	}
	b.start()
	if s := b.status(); s.Pods.Ready != 40 {
		t.Errorf("pods %+v", s.Pods)
	}
	for i := range 40 {
		must(t, b.store.Delete(fmt.Sprintf("p%d", i), "eth0"))
	}
	b.sync()
	if s := b.status(); s.Pods.Attached != 0 || s.NodeBudget.ConnsUsed != 0 {
		t.Errorf("%+v", s)
	}
}
