// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agent/rnics"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// TestManager_detachWhileAttaching: a pod that is detached while it is set up for
// the first time, in whatever step, is not served afterwards and keeps nothing. DEL
// waits for that.
func TestManager_detachWhileAttaching(t *testing.T) {
	for _, step := range []string{"open device", "open stack", "listen", "others", "install"} {
		t.Run(step, func(t *testing.T) {
			o := newOwnBench(t, "vf1")
			b := o.bench
			reached, proceed := make(chan struct{}), make(chan struct{})
			gate := func(at string) {
				if at == step {
					select {
					case reached <- struct{}{}:
						<-proceed
					case <-proceed: // the next time
					}
				}
			}
			openOwn, newStack := b.cfg.openOwn, b.cfg.newStack
			b.cfg.openOwn = func(d *rnics.Own, in rnics.Namespace) (rdma.Device, func() error, error) {
				gate("open device")
				return openOwn(d, in)
			}
			b.cfg.newStack = func(cfg smcr.Config) (stack, error) {
				gate("open stack")
				return newStack(cfg)
			}
			var a *agent
			b.cfg.Observe = func(v View) { a = v.a }
			b.start()
			p := b.kernel.add("/netns/a", 1)
			p.gate = gate
			o.give("a", "net1", "vf1")
			notify := func(verb string) <-chan error {
				done := make(chan error, 1)
				go func() { done <- cni.Notify(t.Context(), b.cfg.Node.APISocket, cni.Event{Verb: verb, ContainerID: "a"}) }()
				return done
			}
			added := notify("ADD")
			<-reached
			must(t, b.store.Delete("a", "net1"))
			deleted := notify("DEL")
			eventually(t, func() string {
				a.manager.jobs.mu.Lock()
				defer a.manager.jobs.mu.Unlock()
				if j := a.manager.jobs.busy["/netns/a"]; j == nil || j.next == nil || len(j.next.atts) > 0 {
					return "the manager does not know that the pod is gone"
				}
				return ""
			})
			select {
			case err := <-deleted:
				t.Fatalf("DEL is over before the set-up is: %v", err)
			default:
			}
			close(proceed)
			must(t, <-deleted)
			must(t, <-added)
			if s := b.status(); s.Pods.Attached != 0 || s.Pods.Failed != 0 {
				t.Errorf("pods %+v", s.Pods)
			}
			if n, k := o.openNow("vf1"), b.kernel.handles(); n != 0 || k != 0 {
				t.Errorf("the device is open %d times, the namespace %d times", n, k)
			}
			b.kernel.change(func() {
				if p.sweeps == 0 {
					t.Error("not swept")
				}
				if p.redir == nil {
					return
				}
				if step != "install" {
					t.Error("redirection installed although the pod was gone")
				}
				p.redir.look(func() {
					if !p.redir.removed {
						t.Error("redirection not removed")
					}
				})
			})
			for _, port := range p.ports {
				if c, err := b.reach(port); err == nil {
					_ = c.Close()
					t.Errorf("a listener is open on port %d", port)
				}
			}
			for _, s := range o.stacks {
				if !s.closed {
					t.Error("the SMC-R stack is open")
				}
			}
		})
	}
}
