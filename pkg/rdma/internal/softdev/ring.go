// SPDX-License-Identifier: Apache-2.0

package softdev

import (
	"sync/atomic"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/wq"
)

// sendRing holds sends that were posted while somebody else had the queue
// pair. One poster pushes, the queue pair's owner pops. The ring owns what the
// requests point to.
type sendRing struct {
	slots  []rdma.SendWR
	sges   []rdma.SGE
	inline []byte
	most   wq.Limits     // of each request
	head   atomic.Uint32 // next to pop
	tail   atomic.Uint32 // next to push
}

// ringSize returns the power of two that holds n.
func ringSize(n int) int { return wq.RingSize(max(n, 2)) }

func (r *sendRing) init(n int, most wq.Limits) {
	n = ringSize(n)
	r.slots = make([]rdma.SendWR, n)
	r.sges = make([]rdma.SGE, n*most.SGEs)
	r.inline = make([]byte, n*most.Inline)
	r.most = most
}

func (r *sendRing) empty() bool { return r.head.Load() == r.tail.Load() }

// push copies as many requests as fit. They are within the limits.
func (r *sendRing) push(wrs []rdma.SendWR) int {
	sges, inline := r.most.SGEs, r.most.Inline
	tail := r.tail.Load()
	free := len(r.slots) - int(tail-r.head.Load())
	n := min(free, len(wrs))
	for k := range n {
		i := int(tail+uint32(k)) & (len(r.slots) - 1)
		s := &r.slots[i]
		*s = wrs[k]
		s.SGL = append(r.sges[i*sges:i*sges:(i+1)*sges], wrs[k].SGL...)
		s.Inline = append(r.inline[i*inline:i*inline:(i+1)*inline], wrs[k].Inline...)
	}
	r.tail.Add(uint32(n))
	return n
}

// front returns the oldest requests that lie together.
func (r *sendRing) front() []rdma.SendWR {
	head := r.head.Load()
	n := int(r.tail.Load() - head)
	i := int(head) & (len(r.slots) - 1)
	return r.slots[i:min(i+n, len(r.slots))]
}

func (r *sendRing) pop(n int) { r.head.Add(uint32(n)) }

// recvRing is sendRing for receives.
type recvRing struct {
	slots []rdma.RecvWR
	head  atomic.Uint32
	tail  atomic.Uint32
}

func (r *recvRing) init(n int) { r.slots = make([]rdma.RecvWR, ringSize(n)) }

func (r *recvRing) empty() bool { return r.head.Load() == r.tail.Load() }

func (r *recvRing) push(wrs []rdma.RecvWR) int {
	tail := r.tail.Load()
	n := min(len(r.slots)-int(tail-r.head.Load()), len(wrs))
	for k := range n {
		r.slots[int(tail+uint32(k))&(len(r.slots)-1)] = wrs[k]
	}
	r.tail.Add(uint32(n))
	return n
}

func (r *recvRing) front() []rdma.RecvWR {
	head := r.head.Load()
	n := int(r.tail.Load() - head)
	i := int(head) & (len(r.slots) - 1)
	return r.slots[i:min(i+n, len(r.slots))]
}

func (r *recvRing) pop(n int) { r.head.Add(uint32(n)) }
