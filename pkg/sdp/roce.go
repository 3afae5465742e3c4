// SPDX-License-Identifier: Apache-2.0

package sdp

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/sdp/bsdh"
	"github.com/smcr-io/kube-smcr/pkg/sdp/socket"
)

// roceLink is our profile for RoCE v2, which the draft does not have: it demands iWARP. The connection of TCP stays open
// beside the queue pairs, and stands for what the draft calls the LLP: its FIN ends both streams in
// order, its reset ends them at once.
//
//	connecting peer                                    accepting peer
//	           ---- record, Hello -----------------------> queue pair to RTS
//	           <--- record -------------------------------
//	queue pair to RTS
//	           ---- one byte, 0 ------------------------->
//	           <=== HelloAck, the first SEND =============
type roceLink struct {
	dev   rdma.Device
	ctx   rdma.Context
	tcp   *net.TCPConn
	reads socket.Config // IRD and ORD
	gone  func(error)   // told of the end of the connection of TCP

	row  rdma.GIDEntry
	psn  rdma.PSN
	peer record
	over chan struct{} // closed when the connection of TCP has ended
	wg   sync.WaitGroup
}

// record is what either peer says of its queue pair, in network byte order:
//
//	 0                   1                   2                   3
//	|                       "SDPR"                                  |
//	|    version    |      MTU      |              0                |
//	|       0       |                     QPN                       |
//	|       0       |                     PSN                       |
//	|                                                               |
//	|                       GID (16 bytes)                          |
//	|                       MAC (6 bytes)           |       0       |
//	|                       0 (8 bytes)                             |
type record struct {
	mtu rdma.MTU
	qpn rdma.QPN
	psn rdma.PSN
	gid rdma.GID
	mac rdma.MAC
}

const (
	recordLen     = 48
	recordMagic   = "SDPR"
	recordVersion = 1
)

func (r *record) append(b []byte) []byte {
	b = append(b, recordMagic...)
	b = append(b, recordVersion, byte(r.mtu), 0, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(r.qpn))
	b = binary.BigEndian.AppendUint32(b, uint32(r.psn))
	b = append(b, r.gid[:]...)
	b = append(b, r.mac[:]...)
	return append(b, make([]byte, recordLen-38)...)
}

// errRecord says that a peer speaks something else.
var errRecord = errors.New("sdp: peer does not speak SDP over RoCE")

func parseRecord(b []byte) (record, error) {
	if len(b) != recordLen || string(b[:4]) != recordMagic {
		return record{}, fmt.Errorf("%w: begins with %x", errRecord, b[:min(len(b), 4)])
	}
	if b[4] != recordVersion {
		return record{}, fmt.Errorf("%w: version %d, want %d", errRecord, b[4], recordVersion)
	}
	r := record{
		mtu: rdma.MTU(b[5]), qpn: rdma.QPN(binary.BigEndian.Uint32(b[8:])), psn: rdma.PSN(binary.BigEndian.Uint32(b[12:])),
		gid: rdma.GID(b[16:32]), mac: rdma.MAC(b[32:38]),
	}
	if !r.mtu.Valid() || r.qpn > rdma.MaxQPN || r.psn > rdma.PSNMask || r.gid.IsZero() {
		return record{}, fmt.Errorf("%w: queue pair %v, PSN %#x, MTU %d, GID %v", errRecord, r.qpn, uint32(r.psn), uint8(r.mtu), r.gid)
	}
	return r, nil
}

// Attributes of queue pairs: those that SMC-R has, too.
const (
	ackTimeoutCode  = 15 // 134 ms
	minRNRTimerCode = 5  // 0.06 ms
	retries         = 7
	hopLimitDirect  = 1 // in our subnet: no router may let it out
	hopLimitRouted  = 64
)

func (*roceLink) name() string { return "RoCE" }

// record makes ours.
func (l *roceLink) record(e *endpoint) (record, error) {
	table := l.dev.GIDs()
	i := slices.IndexFunc(table, func(g rdma.GIDEntry) bool { return g.Type == rdma.GIDTypeRoCEv2 })
	if i < 0 {
		return record{}, fmt.Errorf("device %q has no RoCE v2 GID: give its network interface an IP address", l.dev.Name())
	}
	l.row = table[i]
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	l.psn = rdma.PSN(binary.BigEndian.Uint32(b[:])) & rdma.PSNMask
	return record{mtu: l.dev.Port().ActiveMTU, qpn: e.qp.Num(), psn: l.psn, gid: l.row.GID, mac: l.row.MAC}, nil
}

// toRTS connects the queue pair with the peer's.
func (l *roceLink) toRTS(e *endpoint) error {
	path := rdma.Path{SGIDIndex: l.row.Index, DGID: l.peer.gid, DMAC: l.peer.mac, HopLimit: hopLimitRouted}
	if l.row.OnLink(l.peer.gid) {
		path.HopLimit = hopLimitDirect
	}
	if r, ok := l.ctx.(rdma.PathResolver); ok {
		if err := r.ResolvePath(path); err != nil {
			return fmt.Errorf("find %v: %w", l.peer.gid, err)
		}
	}
	mtu := min(l.peer.mtu, l.dev.Port().ActiveMTU)
	if err := e.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTR, Path: path, DestQPN: l.peer.qpn, RQPSN: l.peer.psn, MTU: mtu, MinRNRTimer: minRNRTimerCode, ReadsServed: uint8(l.reads.IRD),
	}); err != nil {
		return err
	}
	return e.qp.Modify(rdma.QPAttr{
		State: rdma.QPRTS, SQPSN: l.psn, Timeout: ackTimeoutCode, RetryCount: retries, RNRRetry: retries, ReadsAsked: uint8(l.reads.ORD),
	})
}

func (l *roceLink) readHello(ctx context.Context) ([]byte, error) {
	b, err := readExactly(ctx, l.tcp, recordLen+bsdh.HelloLen)
	if err != nil {
		return nil, err
	}
	l.peer, err = parseRecord(b[:recordLen])
	return b[recordLen:], err
}

func (l *roceLink) connect(ctx context.Context, e *endpoint, hello []byte) error {
	return l.begin(ctx, func() error {
		own, err := l.record(e)
		if err != nil {
			return err
		}
		if _, err := l.tcp.Write(append(own.append(nil), hello...)); err != nil {
			return err
		}
		b, err := readFull(l.tcp, recordLen)
		if err != nil {
			return err
		}
		if l.peer, err = parseRecord(b); err != nil {
			return err
		}
		if err := l.toRTS(e); err != nil {
			return err
		}
		_, err = l.tcp.Write([]byte{0})
		return err
	})
}

func (l *roceLink) accept(ctx context.Context, e *endpoint) error {
	return l.begin(ctx, func() error {
		own, err := l.record(e)
		if err != nil {
			return err
		}
		if err := l.toRTS(e); err != nil {
			return err
		}
		if _, err := l.tcp.Write(own.append(nil)); err != nil {
			return err
		}
		_, err = readFull(l.tcp, 1)
		return err
	})
}

// begin connects, and then watches the connection of TCP.
func (l *roceLink) begin(ctx context.Context, f func() error) error {
	stop := whileWaiting(ctx, l.tcp)
	if err := stop(f()); err != nil {
		_ = l.tcp.Close()
		return err
	}
	l.wg.Go(l.watch)
	return nil
}

// watch waits for the end of the connection of TCP. What the peer sent before its FIN by RDMA is there before.
func (l *roceLink) watch() {
	n, err := l.tcp.Read(make([]byte, 1))
	switch {
	case n > 0:
		err = fmt.Errorf("%w: bytes on TCP beside the queue pair", errRecord)
	case errors.Is(err, io.EOF):
		err = nil
	}
	close(l.over)
	l.gone(err)
}

func (l *roceLink) close(ctx context.Context, _ *endpoint) {
	_ = l.tcp.CloseWrite() // it may have ended
	select {
	case <-l.over:
	case <-ctx.Done():
	}
}

func (l *roceLink) reset(e *endpoint) {
	if e.qp != nil {
		_ = e.qp.Modify(rdma.QPAttr{State: rdma.QPError}) // allowed from everywhere
	}
	_ = l.tcp.SetLinger(0)
	_ = l.tcp.Close()
}

func (l *roceLink) release() {
	_ = l.tcp.Close()
	l.wg.Wait()
}
