// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
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
