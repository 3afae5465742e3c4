// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// update: helm upgrade to another image replaces the agents while they use the RDMA devices, the new one beside
// the old. No new connection fails, and one that does not end has drainTimeout, as people are told. Pods on their
// kernels' SMC-R do not notice.
func update(s *suite) {
	server, client := s.pair(load)
	_, holder := s.pair(hold)
	s.grows(holder, sum{}, 1)
	s.must(product.TagNextOn(s.Context(), s.plain))
	for _, n := range s.hw {
		s.must(product.TagNextOn(s.Context(), n))
	}
	kernelServer, kernelLoader, kernelHolder := s.kernelPods()
	s.onKernel(kernelHolder, kernelServer)
	kernelLoaded, kernelHeld := s.grows(kernelLoader, sum{}, 20), s.grows(kernelHolder, sum{}, 20)
	before := s.grows(client, s.soFar(client), 1)
	drains := s.untilDrain(holder)
	began := time.Now()
	s.must(s.p.Install(s.Context(), product.TagNext, installed...))
	s.must(s.rolledOut(product.TagNext))
	took := time.Since(began)
	after := s.grows(client, before, 20)
	s.Logf("agents updated in %v; %d connections meanwhile, the longest took %d ms", took.Round(time.Second), after.OK-before.OK, after.WorstMillis)
	kernelLoaded, kernelHeld = s.grows(kernelLoader, kernelLoaded, 20), s.grows(kernelHolder, kernelHeld, 20)
	s.Logf("on the kernels' SMC-R %d connections, the longest took %d ms, and the longest of %d exchanges %d ms",
		kernelLoaded.OK, kernelLoaded.WorstMillis, kernelHeld.OK, kernelHeld.WorstMillis)
	s.onKernel(kernelHolder, kernelServer)
	s.verdict(client, server, agentapi.CodeOK)
	s.link(client, v1alpha1.RedundancySymmetric)
	held, err := drains()
	s.must(err)
	now, err := s.last(holder)
	s.must(err)
	if !now.Ended || now.OK <= held.OK {
		s.Errorf("the connection that does not end has %+v, had %+v: want it to go on with the old agent, and to end with that", now, held)
	}
	s.delete(holder) // its connection is at its end
	for _, n := range s.hw {
		s.carries(n, "rxe0", "rxe1")
	}
	s.must(s.p.Install(s.Context(), image.ProductTag, installed...))
	s.must(s.rolledOut(image.ProductTag))
	s.grows(client, after, 20)
}

// untilDrain waits until an agent of a node with RDMA devices drains beside its successor, the first of them: each is at one end of
// the pod's connection. The result ends that, and is what the pod had done until then.
func (s *suite) untilDrain(p pod) (result func() (sum, error)) {
	ctx, cancel := context.WithCancel(s.Context())
	var had sum
	seen := make(chan error, 1)
	go func() {
		seen <- product.EventuallyEvery(ctx, lookEvery, "an agent that drains", 2*soon, func() error {
			for _, n := range s.hw {
				pods, err := s.p.AgentPods(ctx, n.Name)
				if err != nil {
					return err
				}
				if len(pods) == 2 && pods[0].DeletionTimestamp != nil {
					had, err = s.last(p)
					return err
				}
			}
			return errors.New("there is none")
		})
	}()
	return func() (sum, error) {
		cancel()
		return had, <-seen
	}
}

// rolledOut waits until each node has one agent, of that image, which accelerates where there is a device.
func (s *suite) rolledOut(tag string) error {
	for _, n := range s.c.Nodes {
		err := product.EventuallyEvery(s.Context(), lookEvery, "one agent of "+n.Name, soon, func() error {
			pods, err := s.p.AgentPods(s.Context(), n.Name)
			if err != nil {
				return err
			}
			if len(pods) != 1 || !strings.HasSuffix(pods[0].Spec.Containers[0].Image, ":"+tag) {
				return fmt.Errorf("there are %d", len(pods))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return s.accelerate(s.Context())
}

// mixed: the node without RDMA devices gets one in software by a changed value. Its pods and those on RDMA
// devices are on SMC-R with each other then, unless a policy allows one kind of device only.
func mixed(s *suite) {
	far, client := s.pair(load)
	near := s.start(far.ns, "near", s.plain)
	defer s.delete(near)
	before := s.grows(client, s.soFar(client), 1)
	s.must(s.p.Install(s.Context(), image.ProductTag, append(slices.Clone(installed), "agent.devicesOfNode.n1[0].soft.address=node")...))
	defer func() {
		s.must(s.p.Install(s.Context(), image.ProductTag, installed...))
		s.must(s.rolledOut(image.ProductTag))
	}()
	s.must(s.rolledOut(image.ProductTag))
	s.grows(client, before, 20) // a changed value is an update, too
	s.status(near, v1alpha1.PodStatusEnabled)
	for _, way := range [][2]pod{{near, far}, {far, near}} {
		s.verdict(way[0], way[1], agentapi.CodeOK)
		if l := s.activeLink(way[0], way[1].node); l.Status.Version != 2 {
			s.Errorf("SMCRLink %s is of version %d", l.Name, l.Status.Version)
		}
	}
	var o v1alpha1.SMCRNode
	s.must(s.get("", s.plain.Name, &o))
	if got := fmt.Sprint(o.Status.Transport, " ", o.Status.DeviceSummary); got != "SoftwareRoCE 1/1" {
		s.Errorf("SMCRNode %s: %s, want SoftwareRoCE 1/1", s.plain.Name, got)
	}
	for _, tt := range []struct {
		transport    v1alpha1.Transport
		soft, rdma   string
		near, client agentapi.Code
	}{
		{v1alpha1.TransportHardware, fallbackTransport, v1alpha1.PodStatusEnabled, agentapi.CodeTransport, agentapi.CodeOK},
		{v1alpha1.TransportSoftwareRoCE, v1alpha1.PodStatusEnabled, fallbackTransport, "", agentapi.CodeTransport},
	} {
		s.policy(far.ns, fmt.Sprintf("{transports: [%s], peers: {cidrs: [10.0.0.0/8]}}", tt.transport))
		s.status(near, tt.soft)
		s.status(far, tt.rdma)
		s.status(client, tt.rdma)
		s.verdict(client, far, tt.client)
		if tt.near != "" {
			s.verdict(near, far, tt.near)
		}
		s.must(s.once(near, far))
		s.must(s.once(far, near))
	}
	s.noPolicy(far.ns)
	s.verdict(near, far, agentapi.CodeOK)
}

const fallbackTransport = v1alpha1.PodStatusFallback + ": " + string(agentapi.CodeTransport)

// activeLink waits for an active SMCRLink of a pod with another node, and returns it.
func (s *suite) activeLink(p pod, peer string) (found v1alpha1.SMCRLink) {
	s.Helper()
	s.eventually(fmt.Sprintf("an active SMCRLink of %s with %s", p, peer), func() error {
		var list v1alpha1.SMCRLinkList
		if err := s.p.Client.List(s.Context(), &list); err != nil {
			return err
		}
		for _, l := range list.Items {
			if l.Status.Pod == p.String() && l.Status.Peer == peer && l.Status.State == v1alpha1.LinkActive {
				found = l
				return nil
			}
		}
		text, _ := json.Marshal(list.Items)
		return fmt.Errorf("there are %s", text)
	})
	return found
}
