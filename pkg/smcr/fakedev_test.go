// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"net/netip"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// fakeFabric joins fake devices: a perfect RDMA network without packets, so
// that the tests of this package fail for reasons of this package only.
type fakeFabric struct {
	mu      sync.Mutex // guards everything below, and all objects
	nextKey uint32
	nextQPN rdma.QPN
	mrs     map[rdma.RKey]*fakeMR
	qps     map[rdma.QPN]*fakeQP
	nextVA  uint64
	// drops reports whether a queue pair's peer loses a message after it has
	// acknowledged the message; nil: no peer does.
	drops func(from rdma.QPN, msg []byte) bool
}

func newFakeFabric() *fakeFabric {
	return &fakeFabric{mrs: map[rdma.RKey]*fakeMR{}, qps: map[rdma.QPN]*fakeQP{}, nextVA: 1 << 32, nextQPN: 16}
}

type fakeDevice struct {
	f    *fakeFabric
	name string
	gid  rdma.GIDEntry
}

func (f *fakeFabric) device(name string, last byte) rdma.Device {
	return &fakeDevice{f: f, name: name, gid: rdma.GIDEntry{
		GID: rdma.GIDFromAddr(netip.AddrFrom4([4]byte{192, 0, 2, last})), Type: rdma.GIDTypeRoCEv2, MAC: rdma.MAC{2, 0, 0, 0, 0, last},
	}}
}

func (d *fakeDevice) Name() string { return d.name }
func (d *fakeDevice) Attr() rdma.DeviceAttr {
	return rdma.DeviceAttr{Provider: "fake", MaxCQE: 1 << 16, PeerCompletes: true}
}

func (d *fakeDevice) Port() rdma.PortAttr {
	return rdma.PortAttr{State: rdma.PortActive, MaxMTU: rdma.MTU4096, ActiveMTU: rdma.MTU1024}
}
func (d *fakeDevice) GIDs() []rdma.GIDEntry { return []rdma.GIDEntry{d.gid} }
func (d *fakeDevice) Open() (rdma.Context, error) {
	return &fakeContext{d: d, events: make(chan rdma.AsyncEvent, 1)}, nil
}

type fakeContext struct {
	d      *fakeDevice
	events chan rdma.AsyncEvent
}

func (c *fakeContext) Device() rdma.Device            { return c.d }
func (c *fakeContext) AllocPD() (rdma.PD, error)      { return &fakePD{f: c.d.f}, nil }
func (c *fakeContext) Events() <-chan rdma.AsyncEvent { return c.events }
func (c *fakeContext) Close() error                   { close(c.events); return nil }
func (c *fakeContext) CreateCQ(int) (rdma.CQ, error) {
	return &fakeCQ{f: c.d.f, notify: make(chan struct{}, 1)}, nil
}

type fakePD struct{ f *fakeFabric }

func (p *fakePD) Close() error { return nil }

func (p *fakePD) AllocMR(size int, _ rdma.Access) (rdma.MR, error) {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	p.f.nextKey++
	m := &fakeMR{f: p.f, mem: make([]byte, size), addr: p.f.nextVA, key: p.f.nextKey}
	p.f.nextVA += uint64(size) + 1<<20
	p.f.mrs[rdma.RKey(m.key)] = m
	return m, nil
}

// RegMR gives the region another key; the test's memory is the garbage
// collector's.
func (p *fakePD) RegMR(of rdma.MR, _, _ int, _ rdma.Access) (rdma.MR, error) {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	p.f.nextKey++
	m := &fakeMR{f: p.f, mem: of.Bytes(), addr: of.Addr(), key: p.f.nextKey}
	p.f.mrs[rdma.RKey(m.key)] = m
	return m, nil
}

func (p *fakePD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	p.f.nextQPN++
	q := &fakeQP{f: p.f, num: p.f.nextQPN}
	q.scq, _ = cfg.SendCQ.(*fakeCQ)
	q.rcq, _ = cfg.RecvCQ.(*fakeCQ)
	p.f.qps[q.num] = q
	return q, nil
}

type fakeMR struct {
	f    *fakeFabric
	mem  []byte
	addr uint64
	key  uint32
}

func (m *fakeMR) Bytes() []byte   { return m.mem }
func (m *fakeMR) Addr() uint64    { return m.addr }
func (m *fakeMR) LKey() rdma.LKey { return rdma.LKey(m.key) }
func (m *fakeMR) RKey() rdma.RKey { return rdma.RKey(m.key) }
func (m *fakeMR) Close() error {
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	delete(m.f.mrs, rdma.RKey(m.key))
	return nil
}

type fakeCQ struct {
	f      *fakeFabric
	wcs    []rdma.WC
	armed  bool
	call   func()
	notify chan struct{}
}

func (q *fakeCQ) push(wc rdma.WC) {
	q.wcs = append(q.wcs, wc)
	if q.armed {
		q.armed = false
		if q.call != nil {
			go q.call()
			return
		}
		select {
		case q.notify <- struct{}{}:
		default:
		}
	}
}

func (q *fakeCQ) Poll(dst []rdma.WC) (int, error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	n := copy(dst, q.wcs)
	q.wcs = append(q.wcs[:0], q.wcs[n:]...)
	return n, nil
}

func (q *fakeCQ) Arm(bool) error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.armed = true
	return nil
}

func (q *fakeCQ) OnNotify(f func())       { q.call = f }
func (q *fakeCQ) Notify() <-chan struct{} { return q.notify }
func (q *fakeCQ) Resize(int) error        { return nil }
func (q *fakeCQ) Close() error            { return nil }

type fakeQP struct {
	f        *fakeFabric
	num      rdma.QPN
	state    rdma.QPState
	dest     rdma.QPN
	path     rdma.Path
	scq, rcq *fakeCQ
	recvs    []rdma.RecvWR
	waiting  []fakeSend // no receive buffer at the peer
	mute     bool       // the cable is cut, or all is kept on its way
}

type fakeSend struct {
	wr   rdma.SendWR
	data []byte
}

func (q *fakeQP) Num() rdma.QPN { return q.num }

func (q *fakeQP) State() rdma.QPState { return q.state }

func (q *fakeQP) Modify(a rdma.QPAttr) error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.state = a.State
	if a.State == rdma.QPRTR {
		q.dest = a.DestQPN
		q.path = a.Path
	}
	return nil
}

func (q *fakeQP) Close() error {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	delete(q.f.qps, q.num)
	return nil
}

func (q *fakeQP) PostRecv(wrs []rdma.RecvWR) (int, error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	q.recvs = append(q.recvs, wrs...)
	if p := q.f.qps[q.dest]; p != nil {
		p.deliver()
	}
	return len(wrs), nil
}

func (q *fakeQP) PostSend(wrs []rdma.SendWR) (int, error) {
	q.f.mu.Lock()
	defer q.f.mu.Unlock()
	if q.state != rdma.QPRTS {
		return 0, rdma.ErrState
	}
	for _, wr := range wrs {
		s := fakeSend{wr: wr}
		for _, g := range wr.SGL {
			m := q.f.mrs[rdma.RKey(g.LKey)]
			s.data = append(s.data, m.mem[g.Addr-m.addr:][:g.Length]...)
		}
		q.waiting = append(q.waiting, s)
	}
	q.deliver()
	return len(wrs), nil
}

// deliver carries out what waits, in order, as far as the peer can take it.
func (q *fakeQP) deliver() {
	for len(q.waiting) > 0 && !q.mute {
		s := q.waiting[0]
		p := q.f.qps[q.dest]
		if p == nil || p.mute || p.state < rdma.QPRTR {
			return
		}
		switch s.wr.Op {
		case rdma.OpWrite:
			m := q.f.mrs[s.wr.RKey]
			if m == nil || s.wr.RemoteAddr < m.addr || s.wr.RemoteAddr+uint64(len(s.data)) > m.addr+uint64(len(m.mem)) {
				q.state = rdma.QPError
				q.scq.push(rdma.WC{ID: s.wr.ID, Op: s.wr.Op, Status: rdma.StatusRemoteAccess, QPN: q.num})
				return
			}
			copy(m.mem[s.wr.RemoteAddr-m.addr:], s.data)
		case rdma.OpSend:
			if len(p.recvs) == 0 {
				return
			}
			if q.f.drops != nil && q.f.drops(q.num, s.data) {
				break
			}
			r := p.recvs[0]
			p.recvs = p.recvs[1:]
			rest := s.data
			for _, e := range []rdma.SGE{r.SGE, r.Spill} {
				n := min(int(e.Length), len(rest))
				if m := q.f.mrs[rdma.RKey(e.LKey)]; n > 0 {
					copy(m.mem[e.Addr-m.addr:], rest[:n])
				}
				rest = rest[n:]
			}
			if len(rest) > 0 {
				q.state = rdma.QPError
				q.scq.push(rdma.WC{ID: s.wr.ID, Op: s.wr.Op, Status: rdma.StatusRemoteInvalid, QPN: q.num})
				return
			}
			p.rcq.push(rdma.WC{ID: r.ID, Op: rdma.OpRecv, Bytes: uint32(len(s.data)), QPN: p.num, SrcQP: q.num})
		}
		if s.wr.Flags&rdma.SendSignaled != 0 {
			q.scq.push(rdma.WC{ID: s.wr.ID, Op: s.wr.Op, QPN: q.num})
		}
		q.waiting = q.waiting[1:]
	}
}

// hold keeps all that is sent on its way until it is called with false.
func (f *fakeFabric) hold(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.qps {
		q.mute = on
	}
	for _, q := range f.qps {
		q.deliver()
	}
}

// cut takes the cable out: nothing arrives any more, and after its retries
// the sender sees an error.
func (f *fakeFabric) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.qps {
		if q.state == rdma.QPRTS {
			q.mute = true
			q.state = rdma.QPError
			q.scq.push(rdma.WC{Op: rdma.OpSend, Status: rdma.StatusRetryExceeded, QPN: q.num})
		}
	}
}
