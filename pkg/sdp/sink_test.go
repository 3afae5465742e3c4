// SPDX-License-Identifier: Apache-2.0

package sdp_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
	"github.com/smcr-io/kube-smcr/pkg/rdma/softiwarp"
	"github.com/smcr-io/kube-smcr/pkg/sdp"
)

// strictDevice is an adapter that enforces RFC 5040 §5.2.1: who READs must let the peer write to what is to be filled. It remembers
// its regions.
type strictDevice struct {
	cm.Device

	mu      sync.Mutex // guards what follows
	regions map[rdma.LKey]*strictMR
	few     bool          // there are no regions to which peers write
	loses   bool          // READs are posted, and never done
	reads   chan struct{} // has a token for each one of those
}

func openStrict(t *testing.T, addr string) *strictDevice {
	t.Helper()
	return &strictDevice{
		Device: sdp.NewSoftAdapter(openIWARP(t, addr).(*softiwarp.Device)), regions: make(map[rdma.LKey]*strictMR), reads: make(chan struct{}, 16),
	}
}

func (d *strictDevice) Attr() rdma.DeviceAttr {
	a := d.Device.Attr()
	a.ReadSinkWrite = true
	return a
}

// open returns the regions to which a peer can write.
func (d *strictDevice) open() (all []*strictMR) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.regions {
		if r.access&rdma.RemoteWrite != 0 {
			all = append(all, r)
		}
	}
	return all
}

func (d *strictDevice) Open() (rdma.Context, error) {
	c, err := d.Device.Open()
	return strictContext{c, d}, err
}

func (d *strictDevice) Dial(ctx context.Context, qp rdma.QP, to netip.AddrPort, o cm.Options) (cm.Conn, error) {
	return d.Device.Dial(ctx, qp.(strictQP).QP, to, o)
}

func (d *strictDevice) Disconnect(qp rdma.QP) error { return d.Device.Disconnect(qp.(strictQP).QP) }

func (d *strictDevice) AwaitEnd(ctx context.Context, qp rdma.QP) error {
	return d.Device.AwaitEnd(ctx, qp.(strictQP).QP)
}

func (d *strictDevice) Listen(at netip.AddrPort) (cm.Listener, error) {
	l, err := d.Device.Listen(at)
	return strictListener{l}, err
}

type strictListener struct{ cm.Listener }

func (l strictListener) Accept(ctx context.Context) (cm.Request, error) {
	r, err := l.Listener.Accept(ctx)
	return strictRequest{r}, err
}

type strictRequest struct{ cm.Request }

func (r strictRequest) Accept(ctx context.Context, qp rdma.QP, o cm.Options) error {
	return r.Request.Accept(ctx, qp.(strictQP).QP, o)
}

type strictContext struct {
	rdma.Context
	d *strictDevice
}

func (c strictContext) AllocPD() (rdma.PD, error) {
	pd, err := c.Context.AllocPD()
	return strictPD{pd, c.d}, err
}

type strictPD struct {
	rdma.PD
	d *strictDevice
}

func (p strictPD) AllocMR(n int, a rdma.Access) (rdma.MR, error) {
	mr, err := p.PD.AllocMR(n, a)
	return p.d.remember(mr, a), err
}

func (p strictPD) RegMR(of rdma.MR, off, n int, a rdma.Access) (rdma.MR, error) {
	p.d.mu.Lock()
	few := p.d.few && a&rdma.RemoteWrite != 0
	p.d.mu.Unlock()
	if few {
		return nil, rdma.ErrNoResources
	}
	mr, err := p.PD.RegMR(of.(*strictMR).MR, off, n, a)
	return p.d.remember(mr, a), err
}

func (p strictPD) CreateQP(cfg rdma.QPConfig) (rdma.QP, error) {
	q, err := p.PD.CreateQP(cfg)
	return strictQP{q, p.d}, err
}

func (d *strictDevice) remember(mr rdma.MR, a rdma.Access) *strictMR {
	r := &strictMR{mr, a, d}
	if mr != nil {
		d.mu.Lock()
		d.regions[mr.LKey()] = r
		d.mu.Unlock()
	}
	return r
}

type strictMR struct {
	rdma.MR
	access rdma.Access
	d      *strictDevice
}

func (r *strictMR) Close() error {
	r.d.mu.Lock()
	delete(r.d.regions, r.LKey())
	r.d.mu.Unlock()
	return r.MR.Close()
}

type strictQP struct {
	rdma.QP
	d *strictDevice
}

func (q strictQP) PostSend(wrs []rdma.SendWR) (int, error) {
	for i := range wrs {
		if wrs[i].Op != rdma.OpRead {
			continue
		}
		q.d.mu.Lock()
		r, loses := q.d.regions[wrs[i].SGL[0].LKey], q.d.loses
		q.d.mu.Unlock()
		if r == nil || r.access != rdma.LocalWrite|rdma.RemoteWrite {
			return i, fmt.Errorf("READ into memory without the right to write: %w", rdma.ErrInvalid)
		}
		if loses {
			q.d.reads <- struct{}{}
			return len(wrs), nil
		}
	}
	return q.QP.PostSend(wrs)
}

// sinkPair is a pair whose server's device is strict, with a Buffer of size bytes on either side.
func sinkPair(t *testing.T, size int) (d *strictDevice, a, b *sdp.Conn, out, in *sdp.Buffer) {
	t.Helper()
	d = openStrict(t, serverAddr)
	p := &pair{client: newStack(t, openAdapter(t, clientAddr)), server: newStack(t, d)}
	p.listenOn(t)
	a, b = p.dial(t)
	return d, a, b, newBuffer(t, p.client, size), newBuffer(t, p.server, size)
}

// What RDMA READs fill is open to the peer where it must be, and nothing beside it is, nor is it afterwards.
func TestBuffer_sinks(t *testing.T) {
	const size, off = 1 << 20, 4096
	d, a, b, out, in := sinkPair(t, size+2*off)
	copy(out.Bytes(), random(15, size))
	for range 3 {
		clear(in.Bytes())
		sent := make(chan error, 1)
		go func() {
			_, err := a.WriteBuffer(out, 0, size)
			sent <- err
		}()
		n, err := b.ReadBuffer(in, off, size, true)
		if open := d.open(); len(open) > 0 {
			t.Errorf("%d regions are open when the program has its Buffer", len(open))
		}
		if err = errors.Join(err, within(t, "the write ends", sent)); err != nil || n != size || !bytes.Equal(in.Bytes()[off:][:size], out.Bytes()[:size]) {
			t.Fatalf("%d bytes arrived, or others: %v", n, err)
		}
	}
	if i := b.Info(); i.BytesRead < size {
		t.Errorf("%d bytes by RDMA READ", i.BytesRead)
	}
	if err := errors.Join(a.Close(), b.Close()); err != nil {
		t.Error(err)
	}
}

// An adapter without regions to which the peer could write gets what it cannot READ as messages.
func TestBuffer_sinksRunOut(t *testing.T) {
	const size = 1 << 20
	d, a, b, out, in := sinkPair(t, size)
	d.mu.Lock()
	d.few = true
	d.mu.Unlock()
	copy(out.Bytes(), random(16, size))
	sent := make(chan error, 1)
	go func() {
		_, err := a.WriteBuffer(out, 0, size)
		sent <- err
	}()
	n, err := b.ReadBuffer(in, 0, size, true)
	if err = errors.Join(err, within(t, "the write ends", sent)); err != nil || n != size || !bytes.Equal(in.Bytes(), out.Bytes()) {
		t.Fatalf("%d bytes arrived, or others: %v", n, err)
	}
	if i := b.Info(); i.BytesRead > 0 {
		t.Errorf("%d bytes by RDMA READ", i.BytesRead)
	}
	if err := errors.Join(a.Close(), b.Close()); err != nil {
		t.Error(err)
	}
}

// A READ that is under way when the connection is reset writes nothing once the program has its Buffer again. Until then its region is open
// for exactly the bytes of the read.
func TestBuffer_sinkOfAReset(t *testing.T) {
	const size, off = 1 << 20, 4096
	d, a, b, out, in := sinkPair(t, size+2*off)
	d.mu.Lock()
	d.loses = true
	d.mu.Unlock()
	sent := make(chan error, 1)
	go func() {
		_, err := a.WriteBuffer(out, 0, size)
		sent <- err
	}()
	x, err := b.StartRead(in, off, size, true)
	if err != nil {
		t.Fatal(err)
	}
	within(t, "a READ is posted", d.reads)
	open := d.open()
	if len(open) != 1 || len(open[0].Bytes()) != size || &open[0].Bytes()[0] != &in.Bytes()[off] {
		t.Errorf("%d regions are open, want one of what is to be filled", len(open))
	}
	if err := a.Abort(); err != nil {
		t.Error(err)
	}
	if n, err := x.Wait(); n >= size || n == 0 && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d bytes: %v", n, err)
	}
	if open := d.open(); len(open) > 0 {
		t.Errorf("%d regions are open when the program has its Buffer", len(open))
	}
	if err := within(t, "the write ends", sent); err == nil {
		t.Error("a write of a connection that was reset has no error")
	}
	_ = b.Close()
}
