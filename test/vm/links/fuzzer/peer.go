// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/llc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

const (
	rmbBytes  = 16 << 10
	slotBytes = 8 << 10 // longer than any message of either protocol
	recvSlots = 32
	sendSlots = 64
	meetTime  = 10 * time.Second // for the rendezvous
	quietTime = 50 * time.Millisecond
	// settleLimit is for the completions of a round, which a busy host delays.
	settleLimit = 20 * time.Second
	// slotTime is how long a request waits for one before it to complete: for all retries.
	slotTime   = 10 * time.Second
	alertToken = 0x12345678
)

// peer is one end of a link, by hand.
type peer struct {
	d   rdma.Device
	rnd *rand.Rand

	tcp  *net.TCPConn
	ctx  rdma.Context
	pd   rdma.PD
	cq   rdma.CQ
	qp   rdma.QP
	rmb  rdma.MR
	bufs rdma.MR // slots: those that receive first
	next int     // slot to send from

	accept              clc.Accept
	sent, done, refused int
	deaf                bool  // receive buffers are not given back
	victim              *peer // another one on the same device of the server, which does nothing wrong
}

// join makes a link group with the server, of one link and one connection.
func (p *peer) join(o *synopt.Option, eid clc.EID, to string) error {
	if err := p.open(); err != nil {
		return err
	}
	return p.meet(o, eid, to)
}

func (p *peer) open() (err error) {
	if p.ctx, err = p.d.Open(); err != nil {
		return err
	}
	if p.pd, err = p.ctx.AllocPD(); err != nil {
		return err
	}
	if p.cq, err = p.ctx.CreateCQ(4 * (recvSlots + sendSlots)); err != nil {
		return err
	}
	if p.rmb, err = p.pd.AllocMR(rmbBytes, rdma.LocalWrite|rdma.RemoteWrite); err != nil {
		return err
	}
	if p.bufs, err = p.pd.AllocMR((recvSlots+sendSlots)*slotBytes, rdma.LocalWrite); err != nil {
		return err
	}
	p.qp, err = p.pd.CreateQP(rdma.QPConfig{SendCQ: p.cq, RecvCQ: p.cq, MaxSendWR: sendSlots, MaxRecvWR: recvSlots, MaxSGE: 1})
	if err != nil {
		return err
	}
	return p.qp.Modify(rdma.QPAttr{State: rdma.QPInit, Access: rdma.RemoteWrite})
}

// close says nothing to the peer; all errors are about what is gone anyway. The queue pair goes first: one that still
// acknowledges what the server says about the reset has it wait for an answer until its link group ends.
func (p *peer) close() {
	if p.ctx != nil {
		_ = p.ctx.Close()
	}
	if p.tcp != nil {
		_ = p.tcp.SetLinger(0)
		_ = p.tcp.Close()
	}
}

// meet makes the rendezvous and answers until the peer has nothing to ask.
func (p *peer) meet(o *synopt.Option, eid clc.EID, to string) error {
	dialer := net.Dialer{Timeout: meetTime, Control: func(network, address string, c syscall.RawConn) error {
		return o.ControlDial(network, address, c)
	}}
	c, err := dialer.Dial("tcp", to)
	if err != nil {
		return err
	}
	p.tcp = c.(*net.TCPConn)
	if err := p.tcp.SetDeadline(time.Now().Add(meetTime)); err != nil {
		return err
	}
	if ok, err := o.PeerOffered(p.tcp); err != nil || !ok {
		return errors.Join(fmt.Errorf("the server offers no SMC-R: %t", ok), err)
	}
	gid := p.d.GIDs()[0]
	var id clc.PeerID
	binary.BigEndian.PutUint64(id[:], p.rnd.Uint64())
	proposal := clc.Proposal{
		Version: clc.V2, V1: clc.ModeNone, V2: clc.ModeR, PeerID: id,
		Ext: clc.V2Extension{EIDs: clc.ListOf(eid), Release: clc.Release1, GID: gid.GID, MaxConns: 255, MaxLinks: 2},
	}
	if _, err := p.tcp.Write(proposal.Append(nil)); err != nil {
		return err
	}
	if err := p.readAccept(); err != nil {
		return err
	}
	psn := rdma.PSN(p.rnd.Uint32()) & rdma.PSNMask
	if err := p.connect(gid, psn); err != nil {
		return err
	}
	confirm := clc.Confirm{Endpoint: clc.Endpoint{
		Version: clc.V2, FirstContact: true, PeerID: id, GID: gid.GID, MAC: gid.MAC, QPN: p.qp.Num(), RKey: p.rmb.RKey(),
		RMBEIndex: 1, AlertToken: alertToken, RMBESize: clc.MinRMBESize, MTU: p.mtu(), RMBAddr: p.rmb.Addr(), PSN: psn, EID: eid,
		Ext: clc.FirstContactExtension{Direct: true, OS: clc.OSLinux, Release: clc.Release1, MaxConns: p.accept.Ext.MaxConns, MaxLinks: p.accept.Ext.MaxLinks},
	}, GIDs: clc.ListOf(gid.GID)}
	if _, err := p.tcp.Write(confirm.Append(nil)); err != nil {
		return err
	}
	return p.formLink()
}

func (p *peer) mtu() rdma.MTU { return min(p.d.Port().ActiveMTU, p.accept.MTU) }

func (p *peer) readAccept() error {
	var head [clc.HeaderLen]byte
	if _, err := io.ReadFull(p.tcp, head[:]); err != nil {
		return err
	}
	h, err := clc.ParseHeader(head)
	if err != nil {
		return err
	}
	msg := append(head[:], make([]byte, h.Length-clc.HeaderLen)...)
	if _, err := io.ReadFull(p.tcp, msg[clc.HeaderLen:]); err != nil {
		return err
	}
	if p.accept, err = clc.ParseAccept(msg); err != nil {
		return fmt.Errorf("the answer is no Accept: %w", err)
	}
	if !p.accept.FirstContact {
		return errors.New("the server offers a link group that it has")
	}
	return nil
}

func (p *peer) connect(gid rdma.GIDEntry, psn rdma.PSN) error {
	if err := p.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTR, Path: rdma.Path{SGIDIndex: gid.Index, DGID: p.accept.GID, DMAC: p.accept.MAC, HopLimit: 1},
		DestQPN: p.accept.QPN, RQPSN: p.accept.PSN, MTU: p.mtu(), MinRNRTimer: 5,
	}); err != nil {
		return err
	}
	for i := range recvSlots {
		if err := p.listen(i); err != nil {
			return err
		}
	}
	// Few retries: what the peer does not take for four seconds, which a busy host may take from it, ends the attack.
	return p.qp.Modify(rdma.QPAttr{State: rdma.QPRTS, SQPSN: psn, Timeout: 18, RetryCount: 3, RNRRetry: 3})
}

func (p *peer) slot(i int) rdma.SGE {
	return rdma.SGE{Addr: p.bufs.Addr() + uint64(i*slotBytes), Length: slotBytes, LKey: p.bufs.LKey()}
}

func (p *peer) listen(i int) error {
	_, err := p.qp.PostRecv([]rdma.RecvWR{{ID: uint64(i), SGE: p.slot(i)}})
	return err
}

// send posts a SEND of any bytes; false when the link takes none any more.
func (p *peer) send(b []byte) bool {
	i := recvSlots + p.next
	sge := p.slot(i)
	sge.Length = uint32(copy(p.bufs.Bytes()[i*slotBytes:][:slotBytes], b))
	return p.post(rdma.SendWR{Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendSolicited, SGL: []rdma.SGE{sge}})
}

// write posts an RDMA WRITE of n bytes to anywhere.
func (p *peer) write(addr uint64, key rdma.RKey, n int) {
	sge := p.slot(recvSlots + p.next)
	sge.Length = uint32(n)
	p.post(rdma.SendWR{Op: rdma.OpWrite, Flags: rdma.SendSignaled, SGL: []rdma.SGE{sge}, RemoteAddr: addr, RKey: key})
}

func (p *peer) post(wr rdma.SendWR) bool {
	for end := time.Now().Add(slotTime); p.sent-p.done-p.refused >= sendSlots; {
		if p.poll() == 0 && time.Now().After(end) {
			return false
		}
	}
	p.next = (p.next + 1) % sendSlots
	wr.ID = 1 << 32 // no receive slot
	if _, err := p.qp.PostSend([]rdma.SendWR{wr}); err != nil {
		return false
	}
	p.sent++
	return true
}

// poll takes completions and answers what the peer asks. It returns how many
// there were.
func (p *peer) poll() int {
	var wcs [16]rdma.WC
	n, err := p.cq.Poll(wcs[:])
	if err != nil {
		return 0
	}
	for _, wc := range wcs[:n] {
		switch {
		case wc.Op != rdma.OpRecv && wc.ID < recvSlots: // a flushed receive, by another name
		case wc.Status == rdma.StatusSuccess && wc.Op == rdma.OpRecv:
			i := int(wc.ID)
			p.answer(append([]byte(nil), p.bufs.Bytes()[i*slotBytes:][:wc.Bytes]...))
			if !p.deaf {
				_ = p.listen(i) // of a queue pair that failed nothing comes any more
			}
		case wc.Op == rdma.OpRecv:
		case wc.Status == rdma.StatusSuccess:
			p.done++
		default:
			p.refused++
		}
	}
	return n
}

// answer says what an honest peer with one link says.
func (p *peer) answer(b []byte) {
	m, err := llc.Parse(llc.DialectLinux, llc.Version2, b)
	if err != nil {
		return // CDC
	}
	switch m := m.(type) {
	case llc.ConfirmLink:
		if !m.Response {
			gid := p.d.GIDs()[0]
			m.Response, m.MAC, m.GID, m.QPN = true, gid.MAC, gid.GID, p.qp.Num()
			p.send(m.Append(nil))
		}
	case llc.AddLink:
		if !m.Response {
			m.Response, m.Reject = true, true
			p.send(m.Append(nil))
		}
	case llc.ConfirmRKey:
		if !m.Response {
			m.Response = true
			p.send(m.Append(nil))
		}
	case llc.TestLink:
		if !m.Response {
			m.Response = true
			p.send(m.Append(nil))
		}
	}
}

// formLink answers until the peer is silent, and forgets what was sent for that.
func (p *peer) formLink() error {
	for end := time.Now().Add(meetTime); p.done == 0; {
		if p.poll() == 0 {
			time.Sleep(time.Millisecond) // polls the completion queue
		}
		if time.Now().After(end) || p.refused > 0 {
			return errors.New("the link was not confirmed")
		}
	}
	p.quiesce(quietTime)
	p.sent, p.done, p.refused = 0, 0, 0
	return nil
}

// quiesce answers until all that was sent has completed and nothing has come for so
// long, or much too long.
func (p *peer) quiesce(quiet time.Duration) {
	last := time.Now()
	for limit := last.Add(settleLimit); time.Now().Before(limit); {
		switch {
		case p.poll() > 0:
			last = time.Now()
		case p.sent == p.done+p.refused && time.Since(last) >= quiet:
			return
		default:
			time.Sleep(time.Millisecond) // polls the completion queue
		}
	}
}
