// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && smcrsiw

package verbs

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"unsafe"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// SIW is Linux' software iWARP, which [Open] refuses: its queue pairs are connected through
// rdma_cm, which is the user's business (test/vm/rdmacm). It knows memory by the address that it has
// in the process only. It is in builds with the tag smcrsiw alone, for what is tried in guests.
type SIW struct{ *Device }

// OpenSIW opens a device.
func OpenSIW(name string, addr netip.Addr) (*SIW, error) {
	d := &Device{name: name, port: 1, lookUp: InterfaceByIndex, contexts: make(map[*deviceContext]struct{})}
	var err error
	if d.handle, err = ibvOpen(name); err != nil {
		return nil, openError(err)
	}
	if d.limits, err = ibvQueryDevice(d.handle); err == nil {
		d.node, err = os.Stat(nodePath(d.handle))
	}
	if err == nil {
		d.async, err = newWaiter(ibvAsyncFD(d.handle), d.name)
	}
	if err != nil {
		_ = ibvClose(d.handle)
		return nil, fmt.Errorf("open %s: %w", name, err)
	}
	d.gid = rdma.GIDEntry{GID: rdma.GIDFromAddr(addr), Type: rdma.GIDTypeIWARP}
	d.store(&portNow{attr: rdma.PortAttr{State: rdma.PortActive}, gids: []rdma.GIDEntry{d.gid}})
	d.attr = rdma.DeviceAttr{
		Provider: "verbs", MaxQP: d.limits.qps, MaxCQE: d.limits.cqe, MaxMRBytes: d.limits.mrBytes, MaxSGE: min(d.limits.sge, maxSGE),
		MaxSendWR: d.limits.wrs, MaxRecvWR: d.limits.wrs, RDMARead: true, GIDTypes: []rdma.GIDType{rdma.GIDTypeIWARP},
		MaxReadsServed: d.limits.readsServed, MaxReadsAsked: d.limits.readsStarted, Stream: true,
	}
	d.wg.Go(d.watch)
	return &SIW{d}, nil
}

// Connected says that rdma_cm has connected a queue pair in INIT.
func Connected(r rdma.QP) {
	r.(siwQP).QP.(*qp).state.CompareAndSwap(uint32(rdma.QPInit), uint32(rdma.QPRTS))
}

// Open implements [rdma.Device].
func (d *SIW) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	if err != nil {
		return nil, err
	}
	return siwContext{c, d}, nil
}

type siwContext struct {
	rdma.Context
	dev *SIW
}

func (c siwContext) Device() rdma.Device { return c.dev }

func (c siwContext) AllocPD() (rdma.PD, error) {
	p, err := c.Context.AllocPD()
	return siwPD{p}, err
}

type siwPD struct{ rdma.PD }

func (p siwPD) AllocMR(sizeBytes int, access rdma.Access) (rdma.MR, error) {
	m, err := p.PD.AllocMR(sizeBytes, access)
	return siwMR{m}, err
}

func (p siwPD) RegMR(of rdma.MR, off, length int, access rdma.Access) (rdma.MR, error) {
	m, err := p.PD.RegMR(of.(siwMR).MR, off, length, access)
	return siwMR{m}, err
}

func (p siwPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := p.PD.CreateQP(cfg)
	return siwQP{q}, err
}

// siwQP gives siw, which takes no receive of no bytes, one of one.
type siwQP struct{ rdma.QP }

func (q siwQP) PostRecv(wrs []rdma.RecvWR) (int, error) {
	wrs = slices.Clone(wrs)
	for i := range wrs {
		wrs[i].SGE.Length = max(wrs[i].SGE.Length, 1)
	}
	return q.QP.PostRecv(wrs)
}

type siwMR struct{ rdma.MR }

func (m siwMR) Addr() uint64 { return uint64(uintptr(unsafe.Pointer(&m.Bytes()[0]))) }
