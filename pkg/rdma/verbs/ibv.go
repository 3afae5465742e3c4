// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

// Everything that is C is in this file and in shim.h. The functions here are
// those of libibverbs in Go types; they check nothing.

/*
#cgo LDFLAGS: -libverbs
#cgo nocallback kv_post_send
#cgo nocallback kv_post_recv
#cgo nocallback kv_poll
#cgo nocallback kv_arm
#cgo nocallback kv_again
#cgo noescape kv_comp_event
#cgo nocallback kv_comp_event
#include "shim.h"
*/
import "C"

import (
	"syscall"
	"unsafe"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Built says that this build has libibverbs.
const Built = true

// Handles of libibverbs.
type (
	ibvContext = *C.struct_ibv_context
	ibvPD      = *C.struct_ibv_pd
	ibvMR      = *C.struct_ibv_mr
)

// ibvCQ is a completion queue with its channel and the memory of one poll.
type ibvCQ struct {
	c   *C.struct_kv_cq
	wcs []C.struct_kv_wc
}

// ibvQP is a queue pair with the memory of one post.
type ibvQP struct {
	c      *C.struct_kv_qp
	wrs    []C.struct_kv_wr
	sges   []C.struct_ibv_sge
	inline []byte
	num    rdma.QPN

	wantsSGE bool // it takes no receive without a piece, and one of no bytes
}

// The handles of the data path go to C as numbers: cgo asks of a pointer each time
// whether it is one of Go's.
func (q *ibvCQ) handle() C.uintptr_t { return C.uintptr_t(uintptr(unsafe.Pointer(q.c))) }
func (q *ibvQP) handle() C.uintptr_t { return C.uintptr_t(uintptr(unsafe.Pointer(q.c))) }

// errnoOf is an error that a call returns by value.
func errnoOf(rc C.int) error {
	switch {
	case rc == 0:
		return nil
	case rc < 0:
		rc = -rc
	}
	return syscall.Errno(rc)
}

// orErrno is the error of a call that returned no handle.
func orErrno(err error) error {
	if err == nil {
		return syscall.EIO
	}
	return err
}

// ibvOpen opens the device of a node, as in "uverbs0".
func ibvOpen(node string) (ibvContext, error) {
	s := C.CString(node)
	defer C.free(unsafe.Pointer(s))
	c, err := C.kv_open(s)
	if c == nil {
		return nil, orErrno(err)
	}
	return c, nil
}

func ibvClose(c ibvContext) error { return errnoOf(C.ibv_close_device(c)) }

func ibvAsyncFD(c ibvContext) int { return int(c.async_fd) }

// ibvNode returns the name of the device's node, as in "uverbs0".
func ibvNode(c ibvContext) string { return C.GoString(&c.device.dev_name[0]) }

// ibvIsRNIC reports whether the device speaks iWARP.
func ibvIsRNIC(c ibvContext) bool { return c.device.node_type == C.IBV_NODE_RNIC }

// deviceLimits are what ibv_query_device says.
type deviceLimits struct {
	qps, cqs, mrs, pds        int
	cqe, wrs, sge             int
	mrBytes                   uint64
	readsServed, readsStarted int
	ports                     int
}

func ibvQueryDevice(c ibvContext) (deviceLimits, error) {
	var a C.struct_ibv_device_attr
	if err := errnoOf(C.ibv_query_device(c, &a)); err != nil {
		return deviceLimits{}, err
	}
	return deviceLimits{
		qps: int(a.max_qp), cqs: int(a.max_cq), mrs: int(a.max_mr), pds: int(a.max_pd),
		cqe: int(a.max_cqe), wrs: int(a.max_qp_wr), sge: int(a.max_sge), mrBytes: uint64(a.max_mr_size),
		readsServed: int(a.max_qp_rd_atom), readsStarted: int(a.max_qp_init_rd_atom), ports: int(a.phys_port_cnt),
	}, nil
}

// portInfo is what ibv_query_port says.
type portInfo struct {
	attr     rdma.PortAttr
	ethernet bool
	gids     int // rows of the GID table
}

func ibvQueryPort(c ibvContext, port uint8) (portInfo, error) {
	var a C.struct_ibv_port_attr
	if err := errnoOf(C.kv_query_port(c, C.uint8_t(port), &a)); err != nil {
		return portInfo{}, err
	}
	p := portInfo{
		attr:     rdma.PortAttr{State: rdma.PortDown, MaxMTU: rdma.MTU(a.max_mtu), ActiveMTU: rdma.MTU(a.active_mtu)},
		ethernet: a.link_layer == C.IBV_LINK_LAYER_ETHERNET,
		gids:     int(a.gid_tbl_len),
	}
	if a.state == C.IBV_PORT_ACTIVE {
		p.attr.State = rdma.PortActive
	}
	return p, nil
}

// ibvQueryGIDs returns the used rows of a port's GID table, and the indexes of
// their network interfaces.
func ibvQueryGIDs(c ibvContext, port uint8, rows int) (out []rdma.GIDEntry, interfaces []int, _ error) {
	table := make([]C.struct_ibv_gid_entry, max(rows, 1))
	n, err := C.kv_query_gids(c, &table[0], C.size_t(len(table)))
	if n < 0 {
		return nil, nil, syscall.Errno(-n)
	}
	_ = err // set by what was tried first on kernels that lack the call
	for _, r := range table[:n] {
		if uint8(r.port_num) != port || r.gid_index > maxGIDIndex {
			continue
		}
		e := rdma.GIDEntry{Index: int(r.gid_index), GID: rdma.GID(r.gid)}
		switch r.gid_type {
		case C.IBV_GID_TYPE_ROCE_V2:
			e.Type = rdma.GIDTypeRoCEv2
		case C.IBV_GID_TYPE_ROCE_V1:
			e.Type = rdma.GIDTypeRoCEv1
		}
		out, interfaces = append(out, e), append(interfaces, int(r.ndev_ifindex))
	}
	return out, interfaces, nil
}

func ibvAllocPD(c ibvContext) (ibvPD, error) {
	p, err := C.ibv_alloc_pd(c)
	if p == nil {
		return nil, orErrno(err)
	}
	return p, nil
}

func ibvDeallocPD(p ibvPD) error { return errnoOf(C.ibv_dealloc_pd(p)) }

// ibvAccess are libibverbs' names of rights.
func ibvAccess(a rdma.Access) C.int {
	var f C.int
	if a&rdma.LocalWrite != 0 {
		f |= C.IBV_ACCESS_LOCAL_WRITE
	}
	if a&rdma.RemoteWrite != 0 {
		f |= C.IBV_ACCESS_REMOTE_WRITE
	}
	if a&rdma.RemoteRead != 0 {
		f |= C.IBV_ACCESS_REMOTE_READ
	}
	return f
}

// ibvRegMR registers the n bytes at addr, which the device knows by the address iova.
func ibvRegMR(p ibvPD, addr uint64, n int, iova uint64, a rdma.Access) (_ ibvMR, l rdma.LKey, r rdma.RKey, err error) {
	m, err := C.kv_reg_mr(p, C.uint64_t(addr), C.size_t(n), C.uint64_t(iova), ibvAccess(a))
	if m == nil {
		return nil, 0, 0, orErrno(err)
	}
	return m, rdma.LKey(m.lkey), rdma.RKey(m.rkey), nil
}

func ibvDeregMR(m ibvMR) error { return errnoOf(C.ibv_dereg_mr(m)) }

// ibvVectors returns how many interrupts the device has for completions.
func ibvVectors(c ibvContext) int { return int(c.num_comp_vectors) }

// ibvCreateCQ makes a completion queue with a channel of its own. Events name
// it by id, and come with one of the device's interrupts.
func ibvCreateCQ(c ibvContext, depth int, id uint64, vector int) (*ibvCQ, error) {
	q := &ibvCQ{c: C.kv_cq_new(batch)}
	if q.c == nil {
		return nil, syscall.ENOMEM
	}
	q.wcs = unsafe.Slice(q.c.wc, batch)
	var err error
	if q.c.channel, err = C.ibv_create_comp_channel(c); q.c.channel == nil {
		_ = q.free()
		return nil, orErrno(err)
	}
	if q.c.cq, err = C.kv_create_cq(c, C.int(depth), C.uint64_t(id), q.c.channel, C.int(vector)); q.c.cq == nil {
		_ = q.free()
		return nil, orErrno(err)
	}
	return q, nil
}

// free destroys what there is; the handle is gone whatever it returns.
func (q *ibvCQ) free() error {
	var err error
	if q.c.cq != nil {
		err = errnoOf(C.ibv_destroy_cq(q.c.cq))
	}
	if q.c.channel != nil {
		if e := errnoOf(C.ibv_destroy_comp_channel(q.c.channel)); err == nil {
			err = e
		}
	}
	C.kv_cq_free(q.c)
	q.c, q.wcs = nil, nil
	return err
}

// resize gives the queue room for so many completions.
func (q *ibvCQ) resize(depth int) error { return errnoOf(C.ibv_resize_cq(q.c.cq, C.int(depth))) }

func (q *ibvCQ) fd() int { return int(q.c.channel.fd) }

// poll takes up to n completions to wcs; a negative number is an error.
func (q *ibvCQ) poll(n int) int { return int(C.kv_poll(q.handle(), C.int(n))) }

func (q *ibvCQ) arm(solicited bool) error {
	var s C.int
	if solicited {
		s = 1
	}
	return errnoOf(C.kv_arm(q.handle(), s))
}

// event takes one event of the channel, and acknowledges it.
func (q *ibvCQ) event() error { return errnoOf(C.kv_comp_event(q.c)) }

// again takes the event, if there may be one, and up to n completions to wcs; if
// there are none it arms the queue.
func (q *ibvCQ) again(event, solicited bool, n int) (got int, armed bool, err error) {
	var e, s C.int
	if event {
		e = 1
	}
	if solicited {
		s = 1
	}
	if got = int(C.kv_again(q.handle(), e, s, C.int(n))); got < 0 {
		return 0, false, syscall.Errno(-got)
	}
	return got, q.c.armed != 0, nil
}

// wc is the completion i of the last poll.
func (q *ibvCQ) wc(i int) rdma.WC {
	w := &q.wcs[i]
	out := rdma.WC{
		ID: uint64(w.id), Status: statusOf(uint32(w.status)), Bytes: uint32(w.bytes),
		QPN: rdma.QPN(w.qpn), SrcQP: rdma.QPN(w.src_qp), Vendor: uint32(w.vendor),
	}
	switch w.op {
	case C.IBV_WC_SEND:
		out.Op = rdma.OpSend
	case C.IBV_WC_RDMA_WRITE:
		out.Op = rdma.OpWrite
	case C.IBV_WC_RDMA_READ:
		out.Op = rdma.OpRead
	case C.IBV_WC_RECV:
		out.Op = rdma.OpRecv
	case C.IBV_WC_RECV_RDMA_WITH_IMM:
		out.Op = rdma.OpRecvWriteImm
	}
	if w.op&C.IBV_WC_RECV != 0 && w.flags&C.IBV_WC_WITH_IMM != 0 {
		out.Imm, out.HasImm = uint32(w.imm), true
	}
	return out
}

// statusOf maps the statuses of libibverbs to ours.
func statusOf(s uint32) rdma.Status {
	switch s {
	case C.IBV_WC_SUCCESS:
		return rdma.StatusSuccess
	case C.IBV_WC_LOC_LEN_ERR:
		return rdma.StatusLocalLength
	case C.IBV_WC_LOC_PROT_ERR, C.IBV_WC_LOC_ACCESS_ERR, C.IBV_WC_MW_BIND_ERR:
		return rdma.StatusLocalProtect
	case C.IBV_WC_WR_FLUSH_ERR:
		return rdma.StatusFlushed
	case C.IBV_WC_REM_INV_REQ_ERR, C.IBV_WC_REM_INV_RD_REQ_ERR:
		return rdma.StatusRemoteInvalid
	case C.IBV_WC_REM_ACCESS_ERR:
		return rdma.StatusRemoteAccess
	case C.IBV_WC_REM_OP_ERR, C.IBV_WC_REM_ABORT_ERR:
		return rdma.StatusRemoteOp
	case C.IBV_WC_RETRY_EXC_ERR, C.IBV_WC_RESP_TIMEOUT_ERR:
		return rdma.StatusRetryExceeded
	case C.IBV_WC_RNR_RETRY_EXC_ERR:
		return rdma.StatusRNRRetryExceeded
	}
	return rdma.StatusLocalQP
}

func ibvCreateQP(p ibvPD, send, recv *ibvCQ, cfg rdma.QPConfig, maxInline int) (*ibvQP, error) {
	n := min(batch, max(cfg.MaxSendWR, cfg.MaxRecvWR))
	sge := max(cfg.MaxSGE, recvSGE)
	q := &ibvQP{c: C.kv_qp_new(C.size_t(n), C.size_t(sge), C.size_t(maxInline))}
	if q.c == nil {
		return nil, syscall.ENOMEM
	}
	q.wrs = unsafe.Slice(q.c.wr, n)
	q.sges = unsafe.Slice(q.c.sge, n*sge)
	q.inline = unsafe.Slice((*byte)(q.c.in), n*maxInline)
	c := C.struct_ibv_qp_cap{
		max_send_wr: C.uint32_t(cfg.MaxSendWR), max_recv_wr: C.uint32_t(cfg.MaxRecvWR),
		max_send_sge: C.uint32_t(cfg.MaxSGE), max_recv_sge: recvSGE, max_inline_data: C.uint32_t(maxInline),
	}
	var err error
	if q.c.qp, err = C.kv_create_qp(p, send.c.cq, recv.c.cq, &c); q.c.qp == nil {
		C.kv_qp_free(q.c)
		return nil, orErrno(err)
	}
	q.num = rdma.QPN(q.c.qp.qp_num)
	return q, nil
}

// destroy ends the queue pair, when nobody posts.
func (q *ibvQP) destroy() error {
	err := errnoOf(C.ibv_destroy_qp(q.c.qp))
	C.kv_qp_free(q.c)
	q.c, q.wrs, q.sges, q.inline = nil, nil, nil, nil
	return err
}

func (q *ibvQP) toState(s rdma.QPState) error {
	to := C.int(C.IBV_QPS_RESET)
	if s == rdma.QPError {
		to = C.IBV_QPS_ERR
	}
	return errnoOf(C.kv_to_state(q.c.qp, to))
}

func (q *ibvQP) toInit(port uint8, a rdma.Access) error {
	return errnoOf(C.kv_to_init(q.c.qp, C.uint8_t(port), ibvAccess(a)))
}

func ibvPath(port uint8, to *rdma.Path) C.struct_kv_path {
	p := C.struct_kv_path{
		flow_label: C.uint32_t(to.FlowLabel), sgid_index: C.uint8_t(to.SGIDIndex),
		hop_limit: C.uint8_t(to.HopLimit), traffic_class: C.uint8_t(to.TrafficClass), port: C.uint8_t(port),
	}
	for i, b := range to.DGID {
		p.dgid[i] = C.uint8_t(b)
	}
	return p
}

// ibvResolve waits until the kernel knows the MAC address of a path's next hop.
func ibvResolve(c ibvContext, port uint8, to *rdma.Path) error {
	p := ibvPath(port, to)
	return errnoOf(C.kv_resolve(c, &p))
}

func (q *ibvQP) toRTR(port uint8, a *rdma.QPAttr, reads int) error {
	p := ibvPath(port, &a.Path)
	return errnoOf(C.kv_to_rtr(q.c.qp, &p, C.uint32_t(a.DestQPN), C.uint32_t(a.RQPSN), C.int(a.MTU),
		C.uint8_t(a.MinRNRTimer), C.uint8_t(reads)))
}

func (q *ibvQP) toRTS(a *rdma.QPAttr, reads int) error {
	return errnoOf(C.kv_to_rts(q.c.qp, C.uint32_t(a.SQPSN), C.uint8_t(a.Timeout), C.uint8_t(a.RetryCount),
		C.uint8_t(a.RNRRetry), C.uint8_t(reads)))
}

// failed reports whether the device has the queue pair in an error state.
func (q *ibvQP) failed() bool {
	s := C.kv_query_state(q.c.qp)
	return s == C.IBV_QPS_ERR || s == C.IBV_QPS_SQE
}

// expects is the PSN of the peer's next request.
func (q *ibvQP) expects() (rdma.PSN, error) {
	n := C.kv_query_rq_psn(q.c.qp)
	if n < 0 {
		return 0, errnoOf(C.int(n))
	}
	return rdma.PSN(n) & rdma.PSNMask, nil
}

// stageSend puts a work request at place i of the batch, with its pieces from
// the place sge on, and returns the place behind them. Pieces of length 0 are
// left out: to some devices 0 means 2 GiB.
func (q *ibvQP) stageSend(i, sge int, w *rdma.SendWR, maxInline int) int {
	to := &q.wrs[i]
	to.id, to.remote_addr, to.rkey, to.imm = C.uint64_t(w.ID), C.uint64_t(w.RemoteAddr), C.uint32_t(w.RKey), C.uint32_t(w.Imm)
	switch w.Op {
	case rdma.OpSend:
		to.op = C.IBV_WR_SEND
	case rdma.OpWrite:
		to.op = C.IBV_WR_RDMA_WRITE
	case rdma.OpWriteImm:
		to.op = C.IBV_WR_RDMA_WRITE_WITH_IMM
	case rdma.OpRead:
		to.op = C.IBV_WR_RDMA_READ
	case rdma.OpRecv, rdma.OpRecvWriteImm: // of completions only
	}
	var f C.uint32_t
	if w.Flags&rdma.SendSignaled != 0 {
		f |= C.IBV_SEND_SIGNALED
	}
	if w.Flags&rdma.SendSolicited != 0 {
		f |= C.IBV_SEND_SOLICITED
	}
	first := sge
	if w.Flags&rdma.SendInline != 0 {
		f |= C.IBV_SEND_INLINE
		if len(w.Inline) > 0 {
			n := copy(q.inline[i*maxInline:(i+1)*maxInline], w.Inline)
			at := &q.inline[i*maxInline]
			q.sges[sge] = C.struct_ibv_sge{addr: C.uint64_t(uintptr(unsafe.Pointer(at))), length: C.uint32_t(n)}
			sge++
		}
	}
	to.flags = f
	for _, s := range w.SGL {
		if s.Length > 0 {
			q.sges[sge] = C.struct_ibv_sge{addr: C.uint64_t(s.Addr), length: C.uint32_t(s.Length), lkey: C.uint32_t(s.LKey)}
			sge++
		}
	}
	to.nsge = C.uint32_t(sge - first)
	return sge
}

// stageRecv is stageSend for a receive buffer.
func (q *ibvQP) stageRecv(i, sge int, w *rdma.RecvWR) int {
	first := sge
	for _, s := range [recvSGE]rdma.SGE{w.SGE, w.Spill} {
		if s.Length > 0 {
			q.sges[sge] = C.struct_ibv_sge{addr: C.uint64_t(s.Addr), length: C.uint32_t(s.Length), lkey: C.uint32_t(s.LKey)}
			sge++
		}
	}
	if q.wantsSGE && sge == first {
		q.sges[sge] = C.struct_ibv_sge{addr: C.uint64_t(w.SGE.Addr), lkey: C.uint32_t(w.SGE.LKey)}
		sge++
	}
	q.wrs[i].id, q.wrs[i].nsge = C.uint64_t(w.ID), C.uint32_t(sge-first)
	return sge
}

// postSend posts the first n of the batch and returns how many were taken.
func (q *ibvQP) postSend(n int) (int, syscall.Errno) {
	r := C.kv_post_send(q.handle(), C.uint32_t(n))
	return int(r >> 32), syscall.Errno(uint32(r))
}

func (q *ibvQP) postRecv(n int) (int, syscall.Errno) {
	r := C.kv_post_recv(q.handle(), C.uint32_t(n))
	return int(r >> 32), syscall.Errno(uint32(r))
}

// asyncKind is what an asynchronous event of libibverbs is about.
type asyncKind uint8

const (
	asyncOther  asyncKind = iota
	asyncQP               // the queue pair is in ERR
	asyncAccess           // it is because the peer asked for memory that it may not use
	asyncCQ               // the completion queue overran
	asyncPort             // the port's state or GID table is another
	asyncGone             // the device is
)

// asyncEvent is an asynchronous event.
type asyncEvent struct {
	kind asyncKind
	qpn  rdma.QPN
	cq   uint64
	port uint8
	name string
}

// ibvAsync takes one asynchronous event, and acknowledges it.
func ibvAsync(c ibvContext) (asyncEvent, error) {
	var ev C.struct_kv_async
	if err := errnoOf(C.kv_async_event(c, &ev)); err != nil {
		return asyncEvent{}, err
	}
	out := asyncEvent{
		qpn: rdma.QPN(ev.qpn), cq: uint64(ev.cq), port: uint8(ev.port),
		name: C.GoString(C.ibv_event_type_str(C.enum_ibv_event_type(ev._type))),
	}
	switch ev._type {
	case C.IBV_EVENT_QP_FATAL, C.IBV_EVENT_QP_REQ_ERR:
		out.kind = asyncQP
	case C.IBV_EVENT_QP_ACCESS_ERR:
		out.kind = asyncAccess
	case C.IBV_EVENT_CQ_ERR:
		out.kind = asyncCQ
	case C.IBV_EVENT_PORT_ACTIVE, C.IBV_EVENT_PORT_ERR, C.IBV_EVENT_GID_CHANGE,
		C.IBV_EVENT_LID_CHANGE, C.IBV_EVENT_CLIENT_REREGISTER:
		out.kind = asyncPort
	case C.IBV_EVENT_DEVICE_FATAL:
		out.kind = asyncGone
	}
	return out, nil
}
