// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
)

// kernelPeer: a program of a node, outside of pods, whose sockets are those of the kernel's SMC, is a peer of
// pods of the other node, as client and as server, on any address of the node.
func kernelPeer(s *suite) {
	server, _ := s.pair(load)
	n := s.hw[1] // has the programs; the server is on hw[0]
	s.others(n)
	s.kernelClient(n, server)
	for _, address := range []netip.Addr{n.Address(), n.Guest.Addr(0)} {
		s.kernelServer(n, address, server)
	}
}

// others waits until the other nodes can learn that a node's interface has a second address: the kernel's SMC
// sends from either.
func (s *suite) others(n *guest.Node) {
	s.Helper()
	s.eventually("the other addresses of "+n.Name, func() error {
		var o v1alpha1.SMCRNode
		if err := s.get("", n.Name, &o); err != nil {
			return err
		}
		for _, d := range o.Status.Devices {
			all := append(slices.Clone(d.OtherAddresses), d.Address)
			if slices.Contains(all, n.Address().String()) && slices.Contains(all, n.Guest.Addr(0).String()) {
				return nil
			}
		}
		return fmt.Errorf("its devices are %+v", o.Status.Devices)
	})
}

// kernelClient lets a program of a node hold a connection to a pod, and looks at it from both sides.
func (s *suite) kernelClient(n *guest.Node, server pod) {
	s.Helper()
	before := s.counters(n)
	c := s.program(n, "hold", server.address(), "--bytes=16384", "--interval=50ms")
	now := c.grows(s, sum{}, 20)
	if d := s.counters(n).Sub(before); d.ClientV2 != 1 || d.ClientFallbacks+d.ClientErrors != 0 {
		s.Errorf("the kernel of %s counts %+v, want one connection on SMC-R as client, and nothing else", n.Name, d)
	}
	s.agentHas(server, agentapi.Inbound, func(c agentapi.Conn) bool { return c.Source.Addr() == n.Address() })
	c.grows(s, now, 20)
	c.stop(s)
}

// kernelServer lets a pod hold a connection to a program of a node.
func (s *suite) kernelServer(n *guest.Node, address netip.Addr, from pod) {
	s.Helper()
	at := netip.AddrPortFrom(address, hostPort)
	before := s.counters(n)
	p := s.program(n, "serve", at.String())
	var caller pod
	s.eventually(fmt.Sprintf("a client of %s on SMC-R", at), func() error { // if the first rendezvous took too long, once more
		caller = s.start(from.ns, "caller", s.hw[0].Node, "hold", at.String(), "--bytes=16384", "--interval=200ms")
		e, err := s.explainOn(caller.node, caller.String(), at.String())
		if err == nil && !slices.ContainsFunc(e.Live, func(c agentapi.Conn) bool { return c.Mode == "SMC-R" }) {
			err = fmt.Errorf("%s: %s: %+v", e.Code, e.Verdict, e.Recent)
			s.delete(caller)
		}
		return err
	})
	s.grows(caller, sum{}, 20)
	s.agentHas(caller, agentapi.Outbound, func(c agentapi.Conn) bool { return c.Dest == at })
	if d := s.counters(n).Sub(before); d.ServerV2 == 0 {
		s.Errorf("%s: the kernel of %s has no connection on SMC-R as server: %+v", at, n.Name, d)
	}
	s.delete(caller)
	p.stop(s)
}

// agentHas waits until the agent of a pod's node shows a connection of the pod on SMC-R.
func (s *suite) agentHas(p pod, d agentapi.Direction, is func(agentapi.Conn) bool) {
	s.Helper()
	s.eventually("a connection of "+p.String()+" on SMC-R", func() error {
		var all agentapi.Conns
		if err := s.p.Ask(s.Context(), p.node, &all, "conns"); err != nil {
			return err
		}
		if !slices.ContainsFunc(all.Conns, func(c agentapi.Conn) bool {
			return c.Pod == p.String() && c.Direction == d && c.Mode == "SMC-R" && is(c)
		}) {
			return fmt.Errorf("there are %+v", all.Conns)
		}
		return nil
	})
}
