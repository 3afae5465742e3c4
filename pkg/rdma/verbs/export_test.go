// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import "github.com/smcr-io/kube-smcr/pkg/rdma"

// Leave puts completions where those are that a closed queue pair left.
func Leave(q rdma.CQ, wcs ...rdma.WC) {
	c, ok := q.(*cq)
	if !ok {
		panic("not a completion queue of this package")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = append(c.waiting, wcs...)
}

// Fail makes f decide which calls of libibverbs that take resources fail; nil:
// none.
func (d *Device) Fail(f func(call string) error) {
	if f == nil {
		d.fault.Store(nil)
		return
	}
	d.fault.Store(&f)
}

// Mistake has the device take its port for one in the state s, as if the port had
// changed since and no event had told of it.
func (d *Device) Mistake(s rdma.PortState) {
	n := *d.now.Load()
	n.attr.State, n.said = s, s
	d.now.Store(&n)
}

// Vector returns a completion queue's interrupt, and how many the device has.
func Vector(q rdma.CQ) (vector, of int) {
	c, ok := q.(*cq)
	if !ok {
		panic("not a completion queue of this package")
	}
	return c.vector, ibvVectors(c.ctx.handle)
}

// Class returns the traffic class of a queue pair's path.
func Class(q rdma.QP) uint8 {
	c, ok := q.(*qp)
	if !ok {
		panic("not a queue pair of this package")
	}
	return c.rtr.Path.TrafficClass
}

// Understate has the device have said that it has so many queue pairs.
func (d *Device) Understate(qps int) { d.qps.Store(int64(qps)) }
