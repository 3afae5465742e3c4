// SPDX-License-Identifier: Apache-2.0

package tcpqp_test

import (
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/softdev"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/tcpqp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/iwarp"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/vitcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	_ tcpqp.Stream = (*iwarp.QP)(nil)
	_ tcpqp.Stream = (*vitcp.QP)(nil)

	_ tcpqp.Aborter = (*vitcp.QP)(nil)
)

// device is a device whose queue pairs are VIs, without connection establishment: both sides know
// what the other would say.
type device struct {
	base *softdev.Device
	host *tcpqp.Host
}

// vi is a queue pair of the device.
type vi struct {
	tcpqp.QP
	m *vitcp.QP
}

// PostRecv tells the peer of its new receives.
func (q *vi) PostRecv(wrs []rdma.RecvWR) (int, error) {
	n, err := q.QP.PostRecv(wrs)
	q.AskStep()
	return n, err
}

func (q *vi) CheckModify(rdma.QPAttr) error { return nil }

func openDevice(t *testing.T) *device {
	d := &device{}
	d.base = softdev.New(softdev.Config{Device: d, NewQP: d.newQP})
	d.host = tcpqp.NewHost(d.base)
	t.Cleanup(func() {
		d.base.Close()
		d.host.Close()
	})
	return d
}

func (d *device) newQP(c softdev.QPConfig) (softdev.Carrier, error) {
	m, err := vitcp.NewQP(vitcp.QPConfig{
		Num: c.Num, MaxSendWR: c.MaxSendWR, MaxRecvWR: c.MaxRecvWR, MaxSGE: c.MaxSGE, MaxInline: softdev.MaxInline, Memory: c.Memory,
	})
	if err != nil {
		return nil, err
	}
	q := &vi{m: m}
	q.Init(d.host, m)
	return q, nil
}

func (d *device) Name() string { return "vi" }

// gidTypes is here so that Attr does not make it each time.
var gidTypes = []rdma.GIDType{rdma.GIDTypeUnknown}

func (d *device) Attr() rdma.DeviceAttr {
	return rdma.DeviceAttr{
		Provider: "vi", MaxQP: softdev.MaxQP, MaxCQE: softdev.MaxCQE, MaxMRBytes: softdev.MaxMRBytes, MaxSGE: vitcp.MaxSGE,
		MaxSendWR: vitcp.MaxRecvWR, MaxRecvWR: vitcp.MaxRecvWR, MaxInline: softdev.MaxInline,
		WriteWithImm: true, RDMARead: true, SendWithImm: true, MaxReadsServed: vitcp.MaxReadWindow, MaxReadsAsked: vitcp.MaxReadWindow,
		GIDTypes: gidTypes, Stream: true, PeerCompletes: true, PartialWrites: true,
		LocalErrors: true, ResponderEvents: true, SolicitedErrors: true, RefusalsTold: true,
	}
}

func (d *device) Port() rdma.PortAttr { return rdma.PortAttr{State: rdma.PortActive} }

func (d *device) GIDs() []rdma.GIDEntry {
	return []rdma.GIDEntry{{GID: rdma.GIDFromAddr(netip.MustParseAddr("127.0.0.1"))}}
}

func (d *device) Open() (rdma.Context, error) { return d.base.Open() }

// tcpPair is a connection within this machine.
func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if a, err = net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr)); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// posted is the number of receives that the peer is told of.
func (q *vi) posted() uint16 {
	q.Lock()
	defer q.Unlock()
	return q.m.Posted()
}

// connect starts two VIs on a connection.
func connect(t testing.TB, x, y *rdmatest.End) {
	t.Helper()
	x.Init(t)
	y.Init(t)
	a, b := tcpPair(t)
	qx, qy := x.QP.(*vi), y.QP.(*vi)
	postedX, postedY := qx.posted(), qy.posted()
	start := func(q *vi, c *net.TCPConn, posted, peerPosted uint16) {
		t.Helper()
		q.Lock()
		defer q.Unlock()
		terms := vitcp.Terms{Attr: vitcp.Attr{
			Reliable: true, RDMAWrite: true, RDMARead: true, FlowControl: true,
			MaxTransfer: vitcp.DefaultMaxTransfer, ReadWindow: vitcp.DefaultReadWindow,
		}, Posted: posted, PeerPosted: peerPosted}
		if err := q.m.Start(time.Now(), terms); err != nil {
			t.Fatal(err)
		}
		if err := q.Attach(c); err != nil {
			t.Fatal(err)
		}
		q.Step(time.Now())
	}
	start(qx, a, postedX, postedY)
	start(qy, b, postedY, postedX)
}

// TestDrop_resets: a connection that its protocol gives up ends by a reset, and not as if all were said.
func TestDrop_resets(t *testing.T) {
	x := rdmatest.NewEnd(t, openDevice(t), rdmatest.Options{})
	x.Init(t)
	a, b := tcpPair(t)
	defer func() { _ = b.Close() }()
	q := x.QP.(*vi)
	q.Lock()
	terms := vitcp.Terms{Attr: vitcp.Attr{Reliable: true, MaxTransfer: vitcp.DefaultMaxTransfer}}
	if err := errors.Join(q.m.Start(time.Now(), terms), q.Attach(a)); err != nil {
		t.Fatal(err)
	}
	q.Unlock()
	if _, err := b.Write([]byte("this is not VI/TCP: 24 bytes")); err != nil {
		t.Fatal(err)
	}
	rdmatest.AwaitEvent(t, x.Ctx, rdma.EventQPFatal)
	_ = b.SetReadDeadline(time.Now().Add(30 * time.Second))
	if n, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer reads %d bytes, %v, want a reset", n, err)
	}
}

// TestReceive_doesNotWait: who has the same connection may make it block. Neither the owner of the queue pair nor
// the garbage collector waits in a system call then.
func TestReceive_doesNotWait(t *testing.T) {
	x := rdmatest.NewEnd(t, openDevice(t), rdmatest.Options{})
	x.Init(t)
	a, b := tcpPair(t)
	defer func() { _ = b.Close() }()
	if err := tcpqp.OnDescriptor(a, func(fd int) error { return syscall.SetNonblock(fd, false) }); err != nil {
		t.Fatal(err)
	}
	q := x.QP.(*vi)
	q.Lock()
	terms := vitcp.Terms{Attr: vitcp.Attr{Reliable: true, MaxTransfer: vitcp.DefaultMaxTransfer}}
	if err := errors.Join(q.m.Start(time.Now(), terms), q.Attach(a)); err != nil {
		t.Fatal(err)
	}
	q.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 100 { // the reader has looked before that ends
			q.Lock()
			q.Unlock() //nolint:staticcheck // to get it was all
			runtime.GC()
		}
	}()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		_ = b.Close() // ends the call
		t.Error("the queue pair, or all of the program, waits in a system call")
		<-done
	}
}

// TestProvider_vitcp: another protocol moves bytes on the same shell, and its connections end. The cases are
// those that ask for nothing that VI/TCP lacks, as solicited events.
func TestProvider_vitcp(t *testing.T) {
	names := []string{
		"Attributes", "States", "ResetAndReconnect", "Destruction", "Operations1024", "WrongKeys", "Permissions",
		"FlushOnError", "RegionClosedUnderWrites", "ClosedDuringTraffic", "QPFatalEvent",
	}
	ran := 0
	for _, c := range rdmatest.Cases() {
		if slices.Contains(names, c.Name) {
			ran++
			t.Run(c.Name, func(t *testing.T) {
				c.Run(t, rdmatest.Net{A: openDevice(t), B: openDevice(t), Connect: connect})
			})
		}
	}
	if ran != len(names) {
		t.Errorf("%d cases ran, want %d", ran, len(names))
	}
}
