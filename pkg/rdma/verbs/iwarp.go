// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/cm"
)

// IWARP is an RDMA device of the kernel that speaks iWARP: an RNIC, or Linux' siw. Its queue pairs are connected by the kernel's
// rdma_cm, with connections of TCP that the device makes itself.
//
// SMC-R cannot use it: a SEND that completes says nothing of the peer (DeviceAttr.PeerCompletes), and a link has no address that
// CLC could tell.
type IWARP struct {
	*Device
	addr netip.Addr
	m    *manager
}

var _ cm.Device = (*IWARP)(nil)

// OpenIWARP opens a device.
func OpenIWARP(cfg IWARPConfig) (*IWARP, error) {
	wrap := func(err error) error { return fmt.Errorf("open iWARP device %q: %w", cfg.Name, err) }
	if err := cfg.Validate(); err != nil {
		return nil, wrap(fmt.Errorf("%w: %w", rdma.ErrInvalid, err))
	}
	d := &Device{name: cfg.Name, lookUp: InterfacesByIndex, contexts: make(map[*deviceContext]struct{})}
	w := &IWARP{Device: d, addr: cfg.Addr}
	d.is = w
	var err error
	if d.handle, err = openNamed(cfg.Name); err != nil {
		return nil, wrap(openError(err))
	}
	if err = w.setUp(); err == nil {
		w.m, err = newManager(d)
	}
	if err != nil {
		if d.async != nil {
			_ = d.async.close()
		}
		_ = ibvClose(d.handle)
		return nil, wrap(err)
	}
	d.wg.Go(d.watch)
	return w, nil
}

// setUp learns what the device is and can do.
func (w *IWARP) setUp() error {
	d := w.Device
	if !ibvIsRNIC(d.handle) {
		return fmt.Errorf("it does not speak iWARP; Open is for RoCE: %w", rdma.ErrNotSupported)
	}
	var err error
	if d.limits, err = ibvQueryDevice(d.handle); err != nil {
		return fmt.Errorf("query device: %w", verbError(err))
	}
	if err := d.limits.enough(); err != nil {
		return err
	}
	d.port, d.siw = 1, d.driver() == "siw"
	d.gid = rdma.GIDEntry{GID: rdma.GIDFromAddr(w.addr), Type: rdma.GIDTypeIWARP}
	n, err := d.query()
	if err != nil {
		return err
	}
	d.store(n)
	d.qps.Store(int64(d.limits.qps))
	d.attr = rdma.DeviceAttr{
		Provider: "verbs", MaxQP: d.limits.qps, MaxCQE: d.limits.cqe, MaxMRBytes: d.limits.mrBytes, MaxSGE: min(d.limits.sge, maxSGE),
		MaxSendWR: d.limits.wrs, MaxRecvWR: d.limits.wrs, GIDTypes: []rdma.GIDType{rdma.GIDTypeIWARP},
		RDMARead: d.limits.readsServed > 0 && d.limits.readsStarted > 0, MaxReadsServed: d.limits.readsServed, MaxReadsAsked: d.limits.readsStarted,
		Stream: true, PartialWrites: true, ReadSinkWrite: true,
	}
	return d.setUpWatch()
}

// Close ends the device with all its contexts, connections and listeners, and waits for its goroutines. An attempt to connect that the
// kernel does not give up yet it waits for.
func (w *IWARP) Close() error { return errors.Join(w.Device.Close(), w.m.close()) }

// ready takes a queue pair to be connected with an ID.
func (w *IWARP) ready(r rdma.QP, i *cmID) (*qp, error) {
	q, ok := r.(*qp)
	if !ok || q.pd.ctx.dev != w.Device {
		return nil, fmt.Errorf("queue pair %v of another device: %w", r.Num(), rdma.ErrInvalid)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.ibv == nil || q.closing:
		return nil, fmt.Errorf("queue pair %v: %w", q.num, rdma.ErrClosed)
	case q.known() != rdma.QPInit:
		return nil, fmt.Errorf("queue pair %v is in %v, want %v: %w", q.num, q.known(), rdma.QPInit, rdma.ErrState)
	case q.cm != nil:
		return nil, fmt.Errorf("queue pair %v is being connected, or was: %w", q.num, rdma.ErrState)
	}
	q.cm = i
	i.qp.Store(q)
	return q, nil
}

// established says that the kernel has connected a queue pair, which may have failed since.
func (q *qp) established() { q.state.CompareAndSwap(uint32(rdma.QPInit), uint32(rdma.QPRTS)) }

// unconnected gives a queue pair back that was not connected.
func (q *qp) unconnected() {
	q.mu.Lock()
	q.cm = nil
	q.mu.Unlock()
}

// What the user of a queue pair has been told of the end of its connection. rdma_cm says that it has ended, and an event of the
// device, which may come later, that something was wrong.
const (
	toldNothing uint32 = iota
	toldEnd            // EventDisconnected
	toldWhy            // another event; or it was the user who ended it
)

// disconnected says that the connection is over.
func (q *qp) disconnected() {
	q.mark()
	if q.told.CompareAndSwap(toldNothing, toldEnd) {
		q.tell(rdma.EventDisconnected, errEnded)
	}
}

// errEnded is the error of a connection that has ended, by the peer or with the path.
var errEnded = errors.New("connection of TCP has ended")

// Dial implements [cm.Device]. The kernel may go on trying when the context has ended; then the queue pair's Close waits for it.
func (w *IWARP) Dial(ctx context.Context, r rdma.QP, to netip.AddrPort, o cm.Options) (cm.Conn, error) {
	wrap := func(err error) error { return fmt.Errorf("dial %v with %s: %w", to, w.name, err) }
	i, err := w.m.create()
	if err != nil {
		return cm.Conn{}, wrap(err)
	}
	q, err := w.ready(r, i)
	if err != nil {
		i.close()
		return cm.Conn{}, wrap(err)
	}
	type result struct {
		c   cm.Conn
		err error
	}
	given, gone := make(chan result), make(chan struct{})
	w.m.wg.Go(func() {
		c, err := i.connect(ctx, w.addr, q, to, &o)
		if err != nil {
			i.close()
			q.unconnected()
		}
		select {
		case given <- result{c, err}:
		case <-gone:
			q.mark()
			i.close()
		}
	})
	select {
	case x := <-given:
		if x.err != nil {
			return cm.Conn{}, wrap(x.err)
		}
		return x.c, nil
	case <-ctx.Done():
		close(gone)
		return cm.Conn{}, wrap(context.Cause(ctx))
	}
}

// connect connects a queue pair, one step after the other.
func (i *cmID) connect(ctx context.Context, from netip.Addr, q *qp, to netip.AddrPort, o *cm.Options) (c cm.Conn, err error) {
	param, err := connParam(q, o)
	if err != nil {
		return c, err
	}
	resolve, err := appendSockaddr(nil, netip.AddrPortFrom(from, 0))
	if err == nil {
		resolve, err = appendSockaddr(resolve, to)
	}
	if err != nil {
		return c, err
	}
	wait := uint32(resolveTimeout.Milliseconds())
	if err = i.step(ctx, cmResolveAddr, append(resolve, words(i.id, wait)...), eventAddrResolved); err != nil {
		return c, err
	}
	if _, _, err = i.addrs(); err != nil {
		return c, err
	}
	if err = i.step(ctx, cmResolveRoute, words(i.id, wait), eventRouteResolved); err != nil {
		return c, err
	}
	if err = i.command(cmConnect, append(param, words(i.id, 0, 0, 0)...)); err != nil {
		return c, err
	}
	e, err := i.await(ctx, eventEstablished)
	if err != nil {
		return c, err
	}
	q.established()
	c.PrivateData = e.data
	c.Local, c.Remote, err = i.addrs()
	return c, err
}

// step has the kernel do something, and waits for the event that says that it is done.
func (i *cmID) step(ctx context.Context, cmd uint32, in []byte, want eventKind) error {
	if err := i.command(cmd, in); err != nil {
		return fmt.Errorf("before %v: %w", want, err)
	}
	_, err := i.await(ctx, want)
	return err
}

// connection returns the ID that a queue pair is connected by.
func (w *IWARP) connection(r rdma.QP) (*qp, *cmID, error) {
	q, ok := r.(*qp)
	if !ok || q.pd.ctx.dev != w.Device {
		return nil, nil, fmt.Errorf("queue pair %v of another device: %w", r.Num(), rdma.ErrInvalid)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.ibv == nil:
		return nil, nil, fmt.Errorf("queue pair %v: %w", q.num, rdma.ErrClosed)
	case q.cm == nil || q.known() == rdma.QPInit:
		return nil, nil, fmt.Errorf("queue pair %v is not connected: %w", q.num, rdma.ErrState)
	}
	return q, q.cm, nil
}

// Disconnect implements [cm.Device].
func (w *IWARP) Disconnect(r rdma.QP) error {
	q, i, err := w.connection(r)
	if err != nil {
		return fmt.Errorf("disconnect: %w", err)
	}
	q.told.Store(toldWhy)
	q.mark()
	if err := i.command(cmDisconnect, words(i.id, 0)); err != nil && !isOver(i) {
		return fmt.Errorf("disconnect queue pair %v: %w", q.num, err)
	}
	return nil
}

// isOver reports whether the connection of an ID has ended.
func isOver(i *cmID) bool {
	select {
	case <-i.ended:
		return true
	default:
		return false
	}
}

// AwaitEnd implements [cm.Device].
func (w *IWARP) AwaitEnd(ctx context.Context, r rdma.QP) error {
	q, i, err := w.connection(r)
	if err != nil {
		return fmt.Errorf("await end: %w", err)
	}
	select {
	case <-i.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("await end of queue pair %v: %w", q.num, context.Cause(ctx))
	}
}

// listener is a [cm.Listener].
type listener struct {
	w    *IWARP
	id   *cmID
	addr netip.AddrPort
	once sync.Once
}

// Listen implements [cm.Device].
func (w *IWARP) Listen(at netip.AddrPort) (cm.Listener, error) {
	wrap := func(err error) error { return fmt.Errorf("listen on %v with %s: %w", at, w.name, err) }
	i, err := w.m.create()
	if err != nil {
		return nil, wrap(err)
	}
	i.requests = make(chan *request, backlog)
	w.m.mu.Lock()
	w.m.parents[i.name] = i
	w.m.mu.Unlock()
	bind, err := appendSockaddr(w.m.answer(answerAt), at) // nothing is answered
	if err == nil {
		err = i.command(cmBind, append(bind, words(i.id)...))
	}
	l := &listener{w: w, id: i}
	if err == nil {
		l.addr, _, err = i.addrs()
	}
	if err == nil {
		err = i.command(cmListen, words(i.id, backlog))
	}
	if err != nil {
		i.close()
		return nil, wrap(err)
	}
	return l, nil
}

// Addr implements [cm.Listener].
func (l *listener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.addr) }

// Accept implements [cm.Listener].
func (l *listener) Accept(ctx context.Context) (cm.Request, error) {
	select {
	case r := <-l.id.requests:
		r.w = l.w
		return r, nil
	case <-l.id.ended:
		return nil, fmt.Errorf("accept on %v: %w", l.addr, net.ErrClosed)
	case <-ctx.Done():
		return nil, fmt.Errorf("accept on %v: %w", l.addr, context.Cause(ctx))
	}
}

// Close implements [cm.Listener].
func (l *listener) Close() error {
	l.once.Do(func() {
		l.id.close() // nothing is delivered any more
		for {
			select {
			case r := <-l.id.requests:
				r.id.close()
			default:
				return
			}
		}
	})
	return nil
}

// request is a [cm.Request].
type request struct {
	w             *IWARP
	id            *cmID
	data          []byte
	local, remote netip.AddrPort
}

// PrivateData implements [cm.Request].
func (r *request) PrivateData() []byte { return r.data }

// LocalAddr implements [cm.Request].
func (r *request) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(r.local) }

// RemoteAddr implements [cm.Request].
func (r *request) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(r.remote) }

// Accept implements [cm.Request].
func (r *request) Accept(ctx context.Context, to rdma.QP, o cm.Options) error {
	q, err := r.w.ready(to, r.id)
	if err != nil {
		r.id.close()
		return fmt.Errorf("accept %v: %w", r.remote, err)
	}
	param, err := connParam(q, &o)
	if err == nil {
		// The kernel tells nothing of one without a name.
		b := append(binary.NativeEndian.AppendUint64(nil, r.w.m.name()), param...)
		err = r.id.command(cmAccept, append(b, words(r.id.id, 0, 0, 0)...))
	}
	if err == nil {
		_, err = r.id.await(ctx, eventEstablished)
	}
	if err != nil {
		r.id.close()
		q.unconnected()
		return fmt.Errorf("accept %v: %w", r.remote, err)
	}
	q.established()
	return nil
}

// Reject implements [cm.Request].
func (r *request) Reject(privateData []byte) error {
	defer r.id.close()
	if len(privateData) > cm.MaxPrivateData {
		return fmt.Errorf("reject with %d bytes of private data, want at most %d: %w", len(privateData), cm.MaxPrivateData, rdma.ErrInvalid)
	}
	b := make([]byte, rejectBytes)
	copy(b, words(r.id.id))
	b[rejectDataLen] = byte(copy(b[rejectData:], privateData))
	if err := r.id.command(cmReject, b); err != nil {
		return fmt.Errorf("reject %v: %w", r.remote, err)
	}
	return nil
}
