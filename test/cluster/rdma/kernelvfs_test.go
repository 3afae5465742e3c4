// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

// kernelVFScenarios are about pods with VFs whose connections are the kernel's. The first needs a guest whose kernel has no
// SMC-R, and the second gives it that.
var kernelVFScenarios = []scenario{
	{name: "mixed", run: kernelVFsMixed, patience: later},
	{name: "both", run: kernelVFsBoth, patience: later},
}

// TestKernelVFs is about pods with VFs of their own on the SMC-R of their nodes' kernels: first on one guest of two.
func TestKernelVFs(t *testing.T) {
	testenv.Builds("...")
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.ClusterTools, testenv.VM)
	b := bed{
		guests: guest.Config{VFs: 1, KernelSMC: true}, logs: logDir("test-cluster-kernel-vfs"),
		values: slices.Concat(installed, withVFs(), []string{"kernelPath.enabled=true"}), prepare: oneWithoutSMC,
	}
	c, p := b.setUp(t)
	firstPods(newSuite(t, c, p))
	for _, s := range kernelVFScenarios {
		s.play(t, c, p)
	}
}

// noSMC is a file that keeps a guest's kernel from loading the module.
const noSMC = "/etc/modprobe.d/no-smc.conf"

// oneWithoutSMC takes the second guest its kernel's SMC-R, before an agent sees it.
func oneWithoutSMC(s *suite) error {
	_, err := s.hw[1].Guest.Shell(s.Context(), "mkdir -p $(dirname "+noSMC+"); echo install smc /bin/false >"+noSMC+"; rmmod smc_diag smc")
	return errors.Join(err, secondNetwork(s))
}

// givesSMC gives the second guest its kernel's SMC-R back. Its agent, which is made anew, finds it.
func (s *suite) givesSMC() {
	s.Helper()
	_, err := s.hw[1].Guest.Shell(s.Context(), "rm -f "+noSMC+"; modprobe -a smc smc_diag")
	s.must(err)
	s.deleteAgents()
	for _, n := range s.hw {
		s.capable(n.Name, "Available")
	}
}

// withFunction makes a pod with a VF on a guest, and returns it when it has the status, and the same with the VF's address.
func (s *suite) withFunction(o *corev1.Pod, n *guest.Node, status string) (first, second pod) {
	s.Helper()
	first = s.run(o, n.Node)
	s.status(first, status)
	second, _ = s.withVF(n, first, 1)
	return first, second
}

// kernelVFsMixed: with KernelIfAvailable pods are the kernel's on the node whose kernel has SMC-R, the agent's on that whose kernel
// has not, and plain TCP on that without devices. Those of a kernel and of an agent talk on SMC-R, whoever connects. Pods in the
// nodes' own network are the kernel's, too, or plain TCP with the reason.
func kernelVFsMixed(s *suite) {
	s.capable(s.hw[0].Name, "Available")
	for _, name := range []string{s.hw[1].Name, s.plain.Name} {
		s.capable(name, "Unavailable")
	}
	ns := s.namespace("test-mixed")
	defer s.endNamespaces(ns)
	again := s.unchanged()
	s.policy(ns, fmt.Sprintf(ofKernel, v1alpha1.DatapathKernelIfAvailable, "peers: {cidrs: [10.0.0.0/8]}, ports: []"))
	s.vfTemplate(ns, "vf", 1)
	on0 := on(claiming(ns, "kernel", "vf"), s.hw[0])
	s.must(s.p.Client.Create(s.Context(), on0.DeepCopy())) // the two start at the same time
	firstOfAgents, agents := s.withFunction(on(asking(ns, "agent", deviceplugin.ResourceVF, 1), s.hw[1]), s.hw[1], v1alpha1.PodStatusEnabled)
	first, kernels := s.withFunction(on0, s.hw[0], v1alpha1.PodStatusKernel)
	s.agents(agents, agentapi.CodeOK)
	before := s.kernelCounters(s.hw[0], kernels)
	s.verdictOf(agents.node, kernels, agents, agentapi.CodeOK)
	s.verdictOf(agents.node, agents, kernels, agentapi.CodeOK)
	if d := s.kernelCounters(s.hw[0], kernels).Sub(before); d.ClientV2 == 0 || d.ServerV2 == 0 {
		s.Errorf("the kernel of %s counts %+v, want connections on SMC-R in both directions", kernels, d)
	}

	// The first network is no RNIC's: the kernel has SMC-R by the interface that a connection leaves by.
	s.verdictOf(first.node, first, firstOfAgents, noDevice)
	e, err := s.explain(first, firstOfAgents)
	s.must(err)
	if !strings.Contains(e.Verdict, "it is by eth0") {
		s.Errorf("explain says %q, want the interface that the connection is by", e.Verdict)
	}
	near := s.start(ns, "near", s.plain)
	s.agents(near, noDevice)
	s.must(s.once(near, first))

	s.hostPodsIfAvailable(ns)
	s.endPods(ns)
	s.noPolicy(ns)
	again()
}

// hostPodsIfAvailable are pods in the network of each node, with the policy of the namespace.
func (s *suite) hostPodsIfAvailable(ns string) {
	s.Helper()
	kernels := s.inNodesNet(ns, "on-"+s.hw[0].Name, s.hw[0].Node)
	s.status(kernels, v1alpha1.PodStatusKernel)
	shares := s.start(ns, "shares", s.hw[1].Node) // the node's devices, by the agent
	s.agents(shares, agentapi.CodeOK)
	s.verdictOf(shares.node, shares, kernels, agentapi.CodeOK)
	for _, n := range []*lab.Node{s.hw[1].Node, s.plain} {
		p := s.inNodesNet(ns, "on-"+n.Name, n)
		s.status(p, v1alpha1.PodStatusPending+": "+string(agentapi.CodePodFailed))
		s.must(s.once(p, kernels))
		e, err := s.explain(p, kernels)
		s.must(err)
		if e.Code != agentapi.CodePodFailed || !strings.Contains(e.Verdict, "only its kernel") {
			s.Errorf("explain of %s says %s: %s", p, e.Code, e.Verdict)
		}
		s.eventSays(p.name, "SMCRFallback", "as its kernel does not carry them")
	}
}

// inNodesNet makes a pod in the network of a node, which is opted in.
func (s *suite) inNodesNet(ns, name string, n *lab.Node) pod {
	s.Helper()
	o := podObject(ns, name)
	o.Spec.NodeName, o.Spec.HostNetwork = n.Name, true
	o.Annotations = map[string]string{v1alpha1.AnnotationEnabled: "true"}
	return s.run(o, n)
}

// kernelVFsBoth: pods with VFs are on their kernels' SMC-R by the RDMA devices of these. Agents that are deleted under load cost them
// nothing, a changed policy ends what it no longer allows, and nothing is left of a pod that is opted out, or ended.
func kernelVFsBoth(s *suite) {
	s.givesSMC()
	s.namespace(kernelNS)
	defer s.endNamespaces(kernelNS)
	again := s.unchanged()
	s.kernelPolicy(v1alpha1.DatapathKernel)
	object := func(n *guest.Node, name string, args ...string) *corev1.Pod {
		return on(asking(kernelNS, name, deviceplugin.ResourceVF, 1, args...), n)
	}
	_, server := s.withFunction(object(s.hw[0], "server"), s.hw[0], v1alpha1.PodStatusKernel)
	client := object(s.hw[1], "client", load, server.address(), "--interval=100ms", "--bytes=16384", "--workers=1")
	holding := object(s.hw[1], "holder", hold, server.address(), "--interval=50ms", "--bytes=16384")
	s.must(s.p.Client.Create(s.Context(), holding.DeepCopy())) // the two start at the same time
	_, loader := s.withFunction(client, s.hw[1], v1alpha1.PodStatusKernel)
	holder := s.holdsOnKernel(holding, s.hw[1])
	s.onKernel(holder, server)
	for i, p := range []pod{server, holder} {
		s.linkOfVF(s.hw[i], p)
	}

	loaded, held := s.grows(loader, sum{}, 20), s.grows(holder, sum{}, 20)
	had := s.kernelConns(s.hw[0], server)
	s.deleteAgents()
	loaded = s.grows(loader, loaded, 20)
	held = s.grows(holder, held, 20)
	if n := s.kernelConns(s.hw[0], server) - had; n < 20 {
		s.Errorf("while agents were deleted the kernel took %d connections on SMC-R", n)
	}
	s.onKernel(holder, server)
	s.optOut(loader)
	after := s.goesOn(loader, loaded)
	if after.Failed > loaded.Failed+1 { // the one that was open then
		s.Errorf("%s has %+v when it was opted out, and had %+v", loader, after, loaded)
	}
	had = s.kernelConns(s.hw[0], server)
	s.grows(loader, after, 20)
	if n := s.kernelConns(s.hw[0], server) - had; n > 1 { // one may have been under way
		s.Errorf("of %d connections of a pod that is opted out %d are on SMC-R", 20, n)
	}
	s.grows(holder, held, 1)
	s.revokes(holder, server)
	s.endPods(kernelNS)
	s.noPolicy(kernelNS)
	again()
	for _, n := range s.hw {
		s.nothingOfKernel(n)
	}
}

// holdsOnKernel makes a pod that holds a connection, until that is on SMC-R of its kernel: on a busy machine the first rendezvous of
// two VFs may take longer than it may.
func (s *suite) holdsOnKernel(o *corev1.Pod, n *guest.Node) (p pod) {
	s.Helper()
	s.eventually("a connection of "+o.Name+" on SMC-R", func() error {
		_, p = s.withFunction(o.DeepCopy(), n, v1alpha1.PodStatusKernel)
		conns, _ := s.connsOf(p)
		if len(conns) == 1 && conns[0].Mode == "TCP" {
			s.delete(p)
		}
		if len(conns) != 1 || conns[0].Mode != "SMC-R" {
			return fmt.Errorf("there are %+v", conns)
		}
		return nil
	})
	return p
}

// linkOfVF waits for an active SMCRLink of a node's kernel that is on the VF of a pod, and says so.
func (s *suite) linkOfVF(n *guest.Node, p pod) {
	s.Helper()
	vf := s.nics(n, p)[0].ParentDev
	s.eventually(fmt.Sprintf("an SMCRLink of the kernel of %s on %s", n.Name, vf), func() error {
		var list v1alpha1.SMCRLinkList
		if err := s.p.Client.List(s.Context(), &list); err != nil {
			return err
		}
		for _, l := range list.Items {
			if l.Status.Node == n.Name && l.Status.Datapath == string(v1alpha1.DatapathKernel) && l.Status.State == v1alpha1.LinkActive && l.Status.PCIAddresses == vf {
				return nil
			}
		}
		return fmt.Errorf("there are %+v", list.Items)
	})
}

// goesOn waits until a pod that makes connections has made 20 more, whichever failed.
func (s *suite) goesOn(p pod, before sum) (now sum) {
	s.Helper()
	s.eventually("20 more of "+p.String(), func() (err error) {
		if now, err = s.last(p); err == nil && now.OK < before.OK+20 {
			err = fmt.Errorf("it has %+v", now)
		}
		return err
	})
	return now
}

// optOut takes a pod its annotation, and waits until nothing of the kernel's datapath is left there.
func (s *suite) optOut(p pod) {
	s.Helper()
	o := &corev1.Pod{}
	s.must(s.get(p.ns, p.name, o))
	was := o.DeepCopy()
	if o.Annotations == nil {
		o.Annotations = map[string]string{}
	}
	o.Annotations[v1alpha1.AnnotationEnabled] = "false"
	s.must(s.p.Client.Patch(s.Context(), o, client.MergeFrom(was)))
	s.eventually("an idle attachment of "+p.String(), func() error {
		var all agentapi.Attachments
		if err := s.p.Ask(s.Context(), p.node, &all, "attachments"); err != nil {
			return err
		}
		found := false
		for _, a := range all.Attachments {
			if a.Pod != p.String() {
				continue
			}
			if found = true; a.State != agentapi.StateIdle || a.Datapath != "" || a.Detail != config.ReasonOptedOut.String() {
				return fmt.Errorf("there is %+v", a)
			}
		}
		if !found {
			return errors.New("there is none")
		}
		return nil
	})
}

// nothingOfKernel waits until a node has no program of the kernel's datapath.
func (s *suite) nothingOfKernel(n *guest.Node) {
	s.Helper()
	s.eventually("no program of the kernel's datapath on "+n.Name, func() error {
		out, err := n.Guest.Shell(s.Context(), "ls -d /sys/fs/bpf/kube-smcr 2>/dev/null || true")
		if err == nil && strings.TrimSpace(out) != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
}
