// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

// pluginShared: pods ask kubelet for a share of a device that is no VF. They have a further interface of its NIC, on a
// network of their own, and several of a node have one device; their links are on it and on no other.
func pluginShared(s *suite) {
	ns := s.namespace("test-shared")
	defer s.endNamespaces(ns)
	again := s.unchanged()
	object := func(name string, args ...string) *corev1.Pod {
		return asking(ns, name, deviceplugin.ResourceShared, 1, args...)
	}
	server := s.sharing(s.hw[0], object("server"))
	dial := func(name string) *corev1.Pod {
		return object(name, hold, server.address(), "--interval="+interval[hold], "--bytes=16384", "--workers=1")
	}
	// The device with the most shares left is the next pod's; rails do not reach each other.
	for _, o := range []struct {
		pod    *corev1.Pod
		device string
	}{{dial("one"), "rxe0"}, {object("two"), "rxe1"}, {dial("three"), "rxe0"}} {
		p := s.sharing(s.hw[1], o.pod)
		s.attached(p, "eth"+strings.TrimPrefix(o.device, "rxe"))
		if o.device == "rxe1" {
			continue
		}
		if l := s.link(p, v1alpha1.RedundancySingle); l.Status.Devices != o.device {
			s.Errorf("SMCRLink %s is on %s, want %s", l.Name, l.Status.Devices, o.device)
		}
		s.grows(p, sum{}, 5)
	}
	s.endPods(ns)
	again()
}

// sharing runs a pod on a node, and returns it with the address of its interface of the second network.
func (s *suite) sharing(n *guest.Node, o *corev1.Pod) pod {
	s.Helper()
	p := s.run(on(o, n), n.Node)
	s.status(p, v1alpha1.PodStatusEnabled)
	p.ip = s.secondAddress(n, p)
	return p
}

// secondAddress returns the address of a pod's interface net1, as the kernel of its node says.
func (s *suite) secondAddress(n *guest.Node, p pod) string {
	s.Helper()
	for _, i := range s.interfaces(n, p) {
		if i.IfName == "net1" && i.ip() != "" {
			return i.ip()
		}
	}
	s.Fatalf("pod %s has no net1 with an address", p)
	return ""
}

// twoRails: pods with a VF of each PF, by a claim and by the device plugin. Their link groups are on both rails.
func twoRails(s *suite) {
	ns := s.namespace("test-rails")
	defer s.endNamespaces(ns)
	s.vfTemplate(ns, "both", 0, 1)
	again := s.unchanged()
	for _, way := range []struct {
		name   string
		object func(name string, args ...string) *corev1.Pod
	}{
		{"claim", func(name string, args ...string) *corev1.Pod { return claiming(ns, name, "both", args...) }},
		{"device plugin", func(name string, args ...string) *corev1.Pod {
			return asking(ns, name, deviceplugin.ResourceVF, 2, args...)
		}},
	} {
		s.Logf("by %s:", way.name)
		server, client, of := s.pairOfVFs(2, way.object)
		for i, p := range []pod{server, client} {
			s.onlyOn(p, v1alpha1.RedundancySymmetric, of[i])
			if pfs := s.pfsOf(s.hw[i], of[i]); len(pfs) != 2 {
				s.Errorf("the VFs of %s are of %q, want two PFs", p, pfs)
			}
		}
		s.grows(client, sum{}, 20)
		s.endPods(ns)
		again()
	}
}

// pfsOf are the PFs that VFs are of, by the node's kernel.
func (s *suite) pfsOf(n *guest.Node, vfs []nic) []string {
	s.Helper()
	var pfs []string
	for _, v := range vfs {
		out, err := n.Guest.Run(s.Context(), "ls", "/sys/bus/pci/devices/"+v.ParentDev+"/physfn/net")
		s.must(err)
		pfs = append(pfs, strings.Fields(out)...)
	}
	slices.Sort(pfs)
	return slices.Compact(pfs)
}

// holdFile keeps the second network from making pods.
const holdFile = "/run/secondnet/hold"

// restartedBetween: kubelet is restarted after it gave a pod a VF and before the pod's network is made. The pod has that VF
// then, and nobody else does.
func restartedBetween(s *suite) {
	ns := s.namespace("test-between")
	defer s.endNamespaces(ns)
	s.vfTemplate(ns, "vf", 0)
	again := s.unchanged()
	n := s.hw[0]
	for _, way := range []struct {
		name   string
		object *corev1.Pod
		record string // what the product says of the device before there is a network
	}{
		{"plugin", asking(ns, "by-plugin", deviceplugin.ResourceVF, 1), ""},
		{"claim", claiming(ns, "by-claim", "vf"), "ls /run/kube-smcr/claims/*.json"},
	} {
		_, err := n.Guest.Shell(s.Context(), "mkdir -p /run/secondnet; touch "+holdFile)
		s.must(err)
		defer func() { _, _ = n.Guest.Shell(s.Context(), "rm -f "+holdFile) }()
		s.must(s.p.Client.Create(s.Context(), on(way.object, n).DeepCopy()))
		s.heldAt(ns, way.object.Name)
		if way.record != "" {
			if _, err := n.Guest.Shell(s.Context(), way.record); err != nil {
				s.Errorf("no claim is prepared: %v", err)
			}
		}
		s.must(n.StopKubelet(s.Context()))
		s.must(n.StartKubelet(s.Context()))
		_, err = n.Guest.Run(s.Context(), "rm", holdFile)
		s.must(err)
		p := pod{ns: ns, name: way.object.Name, node: n.Name}
		if way.name == "plugin" && s.refused(p) { // pods with claims are not
			s.endPods(ns)
			s.must(s.p.Client.Create(s.Context(), way.object))
		}
		s.withVF(n, s.running(p), 1)
		s.endPods(ns)
		again()
	}
}

// refused waits until kubelet takes a pod that it had not started when it ended itself, and reports whether it refuses the pod
// instead. It does, for good, if it hears of the pod before the resource's plugin has registered again; whoever owns such pods
// makes others.
func (s *suite) refused(p pod) (refused bool) {
	s.Helper()
	s.eventually("what becomes of "+p.String(), func() error {
		var o corev1.Pod
		if err := s.get(p.ns, p.name, &o); err != nil {
			return err
		}
		refused = o.Status.Reason == "UnexpectedAdmissionError"
		if !refused && o.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("it is %s: %s %s", o.Status.Phase, o.Status.Reason, o.Status.Message)
		}
		return nil
	})
	if refused {
		s.Logf("kubelet refused %s when it came back", p)
	}
	return refused
}

// heldAt waits until a pod's network could not be made because of holdFile.
func (s *suite) heldAt(ns, name string) {
	s.Helper()
	s.eventually("the pod "+name+" without a network", func() error {
		var list corev1.EventList
		if err := s.p.Client.List(s.Context(), &list, client.InNamespace(ns)); err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Name == name && strings.Contains(e.Message, holdFile) {
				return nil
			}
		}
		return errors.New("no event says so")
	})
}
