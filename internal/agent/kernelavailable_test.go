// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/kernelpath"
	"github.com/smcr-io/kube-smcr/internal/records"
	"github.com/smcr-io/kube-smcr/internal/smcnl"
)

const kernelPreferred = "policies:\n- {name: all, datapath: KernelIfAvailable, ports: [80]}\n"

func TestKernelPath_ifAvailable(t *testing.T) {
	b, s := newKernelBench(t, kernelPreferred)
	b.attach("a", 1)
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "Kernel" || a.NotKernel != "" {
		t.Errorf("attachment %+v", a)
	}
	b.stop()
	s.change(func() { s.fitErr = errors.New("the device is away") })
	b.start()
	if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "Kernel" {
		t.Errorf("attachment of an agent that started while the device was away: %+v", a)
	}
}

// A pod that cannot have the kernel's SMC-R has the agent's, says why, and keeps it: only an agent that
// starts looks again.
func TestKernelPath_notAvailable(t *testing.T) {
	for _, step := range []string{"open", "fit", "attach"} {
		t.Run(step, func(t *testing.T) {
			b, s := newKernelBench(t, kernelPreferred)
			set := map[string]*error{"open": &s.openErr, "fit": &s.fitErr, "attach": &s.attachErr}[step]
			*set = errors.New("missing " + step)
			p := b.attach("a", 1)
			b.start()
			onAgent := func() {
				t.Helper()
				if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "" || !strings.Contains(a.NotKernel, "missing "+step) || a.Detail != "" {
					t.Errorf("attachment %+v", a)
				}
				p.redir.look(func() {
					if p.redir.removed {
						t.Error("the agent's redirection is not in the pod")
					}
				})
			}
			onAgent()
			if n := b.kernel.handles(); n != 1 {
				t.Errorf("%d handles of the namespace are open, want that of the proxy", n)
			}
			if e := value(b.client.Explain(t.Context(), "test/a", "198.51.100.1:80"))(t); !strings.Contains(e.NotKernel, "missing "+step) || e.Code != agentapi.CodeUnseen {
				t.Errorf("explanation %+v", e)
			}
			s.change(func() { *set = nil })
			b.sync()
			onAgent()
			if s.pinned() {
				t.Error("the program is there, and no pod uses it")
			}
			b.stop()
			b.start()
			if a := b.attachment("a"); a.State != agentapi.StateReady || a.Datapath != "Kernel" || a.NotKernel != "" {
				t.Errorf("attachment of the next agent %+v", a)
			}
		})
	}
}

// A pod that fits, and cannot be attached, beside one that is: it has one proxy, once and for all, and that begins when what an earlier
// agent left of it in the kernel is gone.
func TestKernelPath_notAttached(t *testing.T) {
	b, s := newKernelBench(t, kernelPreferred)
	var a *agent
	b.cfg.Observe = func(v View) { a = v.a }
	b.attach("other", 2)
	b.start()
	s.change(func() {
		s.attachErr = fmt.Errorf("missing attach: %w", kernelpath.ErrUnfit)
		s.pods[3], s.sockets[3] = kernelpath.PodConfig{}, true
	})
	p, q := b.attach("a", 1), b.attach("b", 3)
	onAgent := func(name string, p *fakePod) (r *fakeRedirect) {
		t.Helper()
		b.sync()
		if a := b.attachment(name); a.State != agentapi.StateReady || a.Datapath != "" || !strings.Contains(a.NotKernel, "missing attach") {
			t.Errorf("attachment %+v", a)
		}
		p.k.change(func() {
			if r = p.redir; len(p.ports) != 2 { // outbound and inbound
				t.Errorf("%s: %d listeners were opened", name, len(p.ports))
			}
		})
		return r
	}
	first := onAgent("a", p)
	for range 2 {
		if onAgent("a", p) != first {
			t.Error("another proxy took the pod over")
		}
		if a := b.attachment("b"); a.Reason != agentapi.CodeOldSockets {
			t.Errorf("attachment of a pod with sockets of SMC %+v", a)
		}
	}
	s.change(func() { s.sockets[3] = false })
	if first := onAgent("b", q); onAgent("b", q) != first {
		t.Error("another proxy took the pod over that had sockets of SMC")
	}
	if n := len(a.proxies.list()); n != 2 || b.kernel.handles() != 3 {
		t.Errorf("%d proxies and %d handles, want 2, and those of 3 pods", n, b.kernel.handles())
	}
	if o := b.attachment("other"); o.Datapath != "Kernel" {
		t.Errorf("attachment of the other pod %+v", o)
	}
}

// A pod that an earlier agent attached, that this one finds unfit and that has sockets of SMC, is looked at again until these are gone:
// what kept it away may be over.
func TestManager_stepKernelAgain(t *testing.T) {
	bench, s := newKernelBench(t, kernelPreferred)
	s.pins, s.attachErr = true, kernelpath.ErrNoVethRNIC
	s.pods[1], s.sockets[1] = kernelpath.PodConfig{}, true
	b := newBare(t, bench)
	b.kernel.add("/netns/a", 1)
	p, now := &pod{atts: []cni.Attachment{attachmentOf("a", "192.0.2.1/24")}, set: b.a.rnics.Node()}, time.Now()
	step := func(after time.Duration, unavailable bool) {
		t.Helper()
		now = now.Add(after)
		if done := b.a.manager.stepKernel(p, false, now); !done || p.kernel == nil || p.kernel.leaving != unavailable || (p.unavailable != nil) != unavailable {
			t.Errorf("done %t, pod %+v", done, p)
		}
	}
	step(0, true)
	s.change(func() { s.attachErr = nil })
	step(retryMost/2, true)
	step(retryMost/2, false)
	step(0, false)
}

// A pod that an earlier agent attached stays so, with its connections, while an error that may be over soon keeps this one from attaching it.
func TestManager_stepKernelInherited(t *testing.T) {
	for _, step := range []string{"addresses", "open", "attach"} {
		t.Run(step, func(t *testing.T) {
			bench, s := newKernelBench(t, kernelPreferred)
			s.pins, s.pods[1], s.sockets[1] = true, kernelpath.PodConfig{}, true
			b := newBare(t, bench)
			b.kernel.add("/netns/a", 1)
			failed := map[string]*error{"addresses": &s.addressesErr, "open": &s.openErr, "attach": &s.attachErr}[step]
			*failed = unix.ENOMEM
			p, now := &pod{atts: []cni.Attachment{attachmentOf("a", "192.0.2.1/24")}, set: b.a.rnics.Node()}, time.Now()
			for range 2 {
				if done := b.a.manager.stepKernel(p, false, now); !done || p.state != podFailed || !errors.Is(p.err, unix.ENOMEM) || p.unavailable != nil || p.kernel != nil {
					t.Errorf("done %t, pod %+v", done, p)
				}
				now = now.Add(retryMost)
			}
			if _, is := s.pod(1); !is || len(s.revoking.asked) != 0 {
				t.Errorf("chosen %t, connections looked at %+v", is, s.revoking.asked)
			}
			s.change(func() { *failed = nil })
			if done := b.a.manager.stepKernel(p, false, now); !done || p.state != podKernel || p.err != nil {
				t.Errorf("done %t, pod %+v when the error is over", done, p)
			}
		})
	}
}

// A pod with a proxy of which it is not known that nothing of it is in the kernel loses the proxy first.
func TestManager_stepKernelWithProxy(t *testing.T) {
	bench, s := newKernelBench(t, preferAll)
	s.pins = true
	b := newBare(t, bench)
	p := b.proxy("a")
	left := pod{atts: *p.px.atts.Load(), state: podReady, proxy: p.px, set: b.a.rnics.Node()}
	if done := b.a.manager.stepKernel(&left, false, time.Now()); done || left.proxy != nil || !left.noKernel || len(b.a.proxies.list()) != 0 || b.kernel.handles() != 0 {
		t.Errorf("done %t, left %+v, %d handles", done, left, b.kernel.handles())
	}
}

// A pod whose RNIC comes with a further network, after the agent took the pod for one without, is its kernel's, unless it has
// connections by then, which would end.
func TestKernelPath_furtherNetwork(t *testing.T) {
	for _, connected := range []bool{false, true} {
		b, s := newKernelBench(t, kernelPreferred)
		var a *agent
		b.cfg.Observe = func(v View) { a = v.a }
		s.fitErr = errors.New("missing child")
		p := b.attach("a", 1)
		b.start()
		conn := &session{proxy: a.manager.snapshot()["/netns/a"].proxy}
		if connected {
			a.sessions.add(conn)
		}
		s.change(func() { s.fitErr = nil })
		b.sync()
		if a := b.attachment("a"); a.Datapath != "" || a.NotKernel == "" {
			t.Errorf("attachment before there is another interface %+v", a)
		}
		must(t, b.store.Write(cni.Attachment{
			ContainerID: "a", IfName: "net1", NetNS: "/netns/a", NetNSID: 1, Network: "roce", Pod: records.Pod{Namespace: "test", Name: "a"},
			IPs: []netip.Prefix{netip.MustParsePrefix("127.0.0.2/8")},
		}))
		b.sync()
		if a := b.attachment("a"); (a.Datapath == "Kernel") != !connected || (a.NotKernel == "") != !connected {
			t.Errorf("with connections %t: attachment %+v", connected, a)
		}
		p.redir.look(func() {
			if p.redir.removed != !connected {
				t.Errorf("with connections %t: the agent's redirection is removed: %t", connected, p.redir.removed)
			}
		})
		a.sessions.remove(conn)
	}
}

// The attachments of a pod on its kernel's SMC-R have the RDMA devices that its interfaces are of, which the agent leaves alone, and
// link groups on these their PCI addresses.
func TestKernelPath_devices(t *testing.T) {
	b, s := newKernelBench(t, kernelAll)
	of := groupOfNode
	of.Links = []smcnl.Link{{ID: 1, Device: "mlx5_2", State: "ACTIVE"}, {ID: 2, Device: "rxe0", State: "ACTIVE"}}
	s.witness.shared = []smcnl.Group{of}
	b.attach("a", 1)
	must(t, b.store.Write(cni.Attachment{
		ContainerID: "b", IfName: "net1", NetNS: "/netns/a", NetNSID: 1, Network: "roce", Pod: records.Pod{Namespace: "test", Name: "a"},
		Devices: []cni.AttachedDevice{{ID: "0000:41:10.2", PCI: "0000:41:10.2", RDMA: []string{"mlx5_2"}, VF: 1}, {ID: "0000:41:10.3", VF: 2}},
	}))
	b.start()
	for _, id := range []string{"a", "b"} {
		if a := b.attachment(id); a.Datapath != "Kernel" || !slices.Equal(a.Devices, []string{"0000:41:10.2"}) {
			t.Errorf("attachment %+v", a)
		}
	}
	if all := value(b.client.Devices(t.Context()))(t); slices.ContainsFunc(all.Devices, func(d agentapi.PodDevice) bool { return d.Used != nil }) {
		t.Errorf("the agent has a device of its own open: %+v", all)
	}
	if g := value(b.client.Links(t.Context()))(t).LinkGroups; len(g) != 1 || len(g[0].Links) != 2 || g[0].Links[0].PCI != "0000:41:10.2" || g[0].Links[1].PCI != "" {
		t.Errorf("link groups %+v, want the PCI address of the device that is the pod's alone", g)
	}
}

// A policy that begins to prefer the kernel's SMC-R does not end connections of pods that cannot have it.
func TestKernelPath_notAvailableLater(t *testing.T) {
	b, s := newKernelBench(t, preferAll)
	s.fitErr = errors.New("missing child")
	p := b.attach("a", 1)
	b.start()
	redirection := func() (r *fakeRedirect) {
		p.k.change(func() { r = p.redir })
		return r
	}
	first := redirection()
	b.policies(kernelPreferred)
	if a := b.attachment("a"); a.State != agentapi.StateReady || !strings.Contains(a.NotKernel, "missing child") {
		t.Errorf("attachment %+v", a)
	}
	first.look(func() {
		if first.removed || redirection() != first {
			t.Error("the agent's redirection was taken away for a look")
		}
	})
	b.policies(preferAll)
	if a := b.attachment("a"); a.NotKernel != "" {
		t.Errorf("attachment of a pod that wants the agent: %+v", a)
	}
	b.policies(kernelAll)
	eventually(t, func() string { // the agent's redirection ends first
		if a := b.attachment("a"); a.State != agentapi.StateFailed || a.NotKernel != "" {
			return fmt.Sprintf("attachment of a pod that wants the kernel: %+v", a)
		}
		return ""
	})
}
