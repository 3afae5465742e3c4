// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// reboot: a node is reset while a pod of the other one has a connection there. That ends, and does
// not hang, and the link group says so; the node's pods come back, and are on SMC-R.
func reboot(s *suite) {
	server, holder := s.pair(hold)
	n := s.hw[0]
	ns := server.ns
	s.Cleanup(func() { s.endNamespaces(ns, "test-"+load) }) // addresses of its pods are others after the reboot
	before := s.grows(holder, sum{}, 20)
	l := s.link(holder, v1alpha1.RedundancySymmetric)
	began := time.Now()
	back := make(chan error, 1)
	go func() { back <- n.Reset(s.Context()) }()
	s.eventually("the end of the connection to "+n.Name, func() error {
		now, err := s.last(holder)
		if err == nil && !now.Ended {
			err = fmt.Errorf("it goes on: %+v, had %+v", now, before)
		}
		return err
	})
	s.Logf("the connection to the node was at its end %v after its reset, or less", time.Since(began).Round(time.Second))
	s.event(l.Name, "LinkDown")
	s.delete(holder)
	s.must(<-back)
	s.Logf("the node is ready again %v after its reset", time.Since(began).Round(time.Second))
	s.must(s.accelerate(s.Context()))
	server = s.renewed(server)
	s.status(server, v1alpha1.PodStatusEnabled)
	_, holder = s.pair(hold)
	s.grows(holder, sum{}, 20)
	s.link(holder, v1alpha1.RedundancySymmetric)
	s.carries(n, "rxe0", "rxe1")
}

// renewed waits until a pod runs anew, with another address.
func (s *suite) renewed(p pod) pod {
	s.Helper()
	old := p.ip
	s.eventually("another start of "+p.String(), func() error {
		if p = s.running(p); p.ip == old {
			return fmt.Errorf("it has %s still", old)
		}
		return nil
	})
	return p
}
