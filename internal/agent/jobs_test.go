// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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
		j.open()
		ask := func(key, what string, force, slow bool) <-chan struct{} {
			return j.submit(t.Context(), key, desired{force: force, atts: []cni.Attachment{{ContainerID: what}}}, func(_ context.Context, w desired) {
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
