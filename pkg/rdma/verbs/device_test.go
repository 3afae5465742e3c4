// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo

package verbs_test

import (
	"errors"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/internal/leaktest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

// The tests called TestDevice need an RDMA device, any one that the environment
// names; test/vm/verbs runs them in a guest.

// name is the device that the tests may use.
func name(t *testing.T) string {
	t.Helper()
	testenv.Need(t, testenv.RDMADevice)
	return os.Getenv(testenv.RDMADeviceEnv)
}

func open(t *testing.T) *verbs.Device {
	t.Helper()
	d, err := verbs.Open(verbs.Config{Name: name(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestDevice_conformance has the device at both ends.
func TestDevice_conformance(t *testing.T) {
	rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
		d := open(t)
		return rdmatest.Net{A: d, B: d}
	})
}

// TestDevice_conformanceUnderLoad has another pair of queue pairs busy
// beside it, of another context.
func TestDevice_conformanceUnderLoad(t *testing.T) {
	l := startLoad(t, open(t))
	rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
		d := open(t)
		return rdmatest.Net{A: d, B: d}
	})
	if n, err := l.end(); err != nil || n == 0 {
		t.Errorf("the load ended after %d writes: %v", n, err)
	}
}

// load is a pair of queue pairs with RDMA WRITEs on their way all the time.
type load struct {
	x, y *rdmatest.End
	stop chan struct{}
	wg   sync.WaitGroup
	n    int
	err  error
}

func startLoad(t *testing.T, d rdma.Device) *load {
	t.Helper()
	l := &load{stop: make(chan struct{})}
	l.x, l.y = rdmatest.Pair(t, d, d, rdmatest.Options{})
	l.wg.Go(l.run)
	t.Cleanup(func() { _, _ = l.end() }) // before the contexts close
	return l
}

func (l *load) run() {
	wcs := make([]rdma.WC, 8)
	for posted := 0; ; {
		for posted-l.n < 2 {
			if _, l.err = l.x.QP.PostSend([]rdma.SendWR{l.x.Write(1, l.y, 0, 8<<10)}); l.err != nil {
				return
			}
			posted++
		}
		if l.err = l.x.SendCQ.Arm(false); l.err != nil {
			return
		}
		n, err := l.x.SendCQ.Poll(wcs)
		for _, w := range wcs[:n] {
			if w.Status != rdma.StatusSuccess {
				l.err = errors.New(w.Status.String())
				return
			}
		}
		if l.n, l.err = l.n+n, err; err != nil {
			return
		}
		select {
		case <-l.stop:
			return
		default:
		}
		if n > 0 {
			continue
		}
		select {
		case <-l.stop:
			return
		case <-l.x.SendCQ.Notify():
		}
	}
}

// end stops the load and returns how many writes were complete, and why it
// ended itself.
func (l *load) end() (int, error) {
	if l.stop != nil {
		close(l.stop)
	}
	l.wg.Wait()
	l.stop = nil
	return l.n, l.err
}

// TestDevice_allocatesNothing is about the data path.
func TestDevice_allocatesNothing(t *testing.T) {
	d := open(t)
	x, y := rdmatest.Pair(t, d, d, rdmatest.Options{})
	sge := x.SGE(0, 1000)
	wrs := make([]rdma.SendWR, 4)
	for i := range wrs {
		wrs[i] = x.Write(uint64(i), y, 0, 1000)
		wrs[i].SGL = []rdma.SGE{sge, sge}
	}
	recv := []rdma.RecvWR{{SGE: y.SGE(0, 64)}}
	send := []rdma.SendWR{{Op: rdma.OpSend, Flags: rdma.SendSignaled | rdma.SendInline, Inline: make([]byte, min(44, d.Attr().MaxInline))}}
	wcs := make([]rdma.WC, 16)
	take := func(q rdma.CQ, n int) {
		for end := time.Now().Add(10 * time.Second); n > 0; {
			if err := q.Arm(false); err != nil {
				t.Fatal(err)
			}
			k, err := q.Poll(wcs)
			if n -= k; err != nil || time.Now().After(end) {
				t.Fatalf("%d completions are missing, %v", n, err)
			}
		}
	}
	if n := testing.AllocsPerRun(50, func() {
		if n, err := y.QP.PostRecv(recv); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		if n, err := x.QP.PostSend(wrs); n != len(wrs) || err != nil {
			t.Fatal(n, err)
		}
		if n, err := x.QP.PostSend(send); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		take(x.SendCQ, len(wrs)+1)
		take(y.RecvCQ, 1)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestDevice_partialPost posts more at once than the queue takes.
func TestDevice_partialPost(t *testing.T) {
	d := open(t)
	x, y := rdmatest.NewEnd(t, d, rdmatest.Options{SendWR: 100, CQDepth: 1000}), rdmatest.NewEnd(t, d, rdmatest.Options{})
	x.Connect(t, y) // the peer does not listen yet, so that nothing completes
	wrs := make([]rdma.SendWR, 500)
	for i := range wrs {
		wrs[i] = x.Write(uint64(i), y, i, 1)
	}
	const bad = 70 // in the second batch
	good := wrs[bad]
	wrs[bad].SGL = make([]rdma.SGE, d.Attr().MaxSGE+1)
	n, err := x.QP.PostSend(wrs)
	if n != bad || !errors.Is(err, rdma.ErrInvalid) {
		t.Fatalf("post with a bad one: %d, %v, want %d, ErrInvalid", n, err, bad)
	}
	wrs[bad] = good
	k, err := x.QP.PostSend(wrs[n:])
	if !errors.Is(err, rdma.ErrQueueFull) {
		t.Fatalf("post %d more: %d, %v, want ErrQueueFull", len(wrs)-n, k, err)
	}
	n += k
	if n < 100 {
		t.Fatalf("a queue of 100 took %d", n)
	}
	y.Connect(t, x)
	for i, w := range rdmatest.Await(t, x.SendCQ, n) {
		if w.ID != uint64(i) || w.Status != rdma.StatusSuccess {
			t.Fatalf("completion %d is %+v", i, w)
		}
	}
}

// TestDevice_closeKeepsWhatArrived closes queue pairs that share a completion
// queue, with completions in it.
func TestDevice_closeKeepsWhatArrived(t *testing.T) {
	d := open(t)
	x, y := rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, d, rdmatest.Options{})
	second, err := y.PD.CreateQP(rdma.QPConfig{SendCQ: y.SendCQ, RecvCQ: y.RecvCQ, MaxSendWR: 8, MaxRecvWR: 8, MaxSGE: 1})
	if err != nil {
		t.Fatal(err)
	}
	x.Connect(t, y)
	y.Connect(t, x)
	if err := second.Modify(rdma.QPAttr{State: rdma.QPInit}); err != nil {
		t.Fatal(err)
	}
	if _, err := second.PostRecv([]rdma.RecvWR{{ID: 50, SGE: y.SGE(0, 8)}}); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		y.Recv(t, uint64(i), 0, 8)
	}
	for i := range uint64(3) {
		x.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 4)}})
		rdmatest.AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess) // so it has arrived
	}
	if err := second.Modify(rdma.QPAttr{State: rdma.QPError}); err != nil {
		t.Fatal(err)
	}
	if err := y.QP.Close(); err != nil {
		t.Fatal(err)
	}
	type seen struct {
		ID     uint64
		QPN    rdma.QPN
		Status rdma.Status
	}
	var got []seen
	for _, w := range rdmatest.Await(t, y.RecvCQ, 4) {
		got = append(got, seen{w.ID, w.QPN, w.Status})
	}
	one, two := y.QP.Num(), second.Num()
	want := []seen{{0, one, 0}, {1, one, 0}, {2, one, 0}, {50, two, rdma.StatusFlushed}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
	if n, err := y.RecvCQ.Poll(make([]rdma.WC, 8)); n != 0 || err != nil {
		t.Errorf("%d more completions, %v: the closed queue pair's flushed receives?", n, err)
	}
}

// TestDevice_trafficClass: paths have the device's traffic class unless they have one.
func TestDevice_trafficClass(t *testing.T) {
	const ofDevice, ofPath = 26<<2 | 2, 46 << 2
	d, err := verbs.Open(verbs.Config{Name: name(t), TrafficClass: ofDevice})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	x, y := rdmatest.NewEnd(t, d, rdmatest.Options{}), rdmatest.NewEnd(t, d, rdmatest.Options{})
	attrs := x.Attrs(y)
	attrs[1].Path.TrafficClass = ofPath
	for _, a := range attrs {
		if err := x.QP.Modify(a); err != nil {
			t.Fatal(err)
		}
	}
	y.Connect(t, x)
	if a, b := verbs.Class(x.QP), verbs.Class(y.QP); a != ofPath || b != ofDevice {
		t.Errorf("traffic classes %d and %d, want %d and %d", a, b, ofPath, ofDevice)
	}
	x.Send(t, x.Write(1, y, 0, 10))
	rdmatest.AwaitOne(t, x.SendCQ, 1, rdma.StatusSuccess)
}

// TestDevice_vectors: contexts have the device's interrupts for completions in turn, and the queues of
// one context have the same. A context without a queue takes none.
func TestDevice_vectors(t *testing.T) {
	d := open(t)
	used := map[int]int{}
	n := 1
	for i := 0; i < 2*n; i++ {
		c, err := d.Open()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		e := rdmatest.NewEnd(t, d, rdmatest.Options{})
		var send, recv int
		send, n = verbs.Vector(e.SendCQ)
		recv, _ = verbs.Vector(e.RecvCQ)
		if send != recv {
			t.Errorf("one context has the interrupts %d and %d", send, recv)
		}
		used[send]++
	}
	t.Logf("%d interrupts", n)
	for v := range n {
		if used[v] != 2 {
			t.Errorf("of %d contexts %d have the interrupt %d of %d: %v", 2*n, used[v], v, n, used)
		}
	}
}

// TestDevice_numberUsedAgain makes a queue pair with the number of one that is
// closed, whose completions nobody has polled.
func TestDevice_numberUsedAgain(t *testing.T) {
	d := open(t)
	e := rdmatest.NewEnd(t, d, rdmatest.Options{})
	const near = 100 // devices give the next number, or one of the last
	left := make([]rdma.WC, 0, 2*near)
	for i := range 2 * near {
		left = append(left, rdma.WC{QPN: (e.QP.Num() + rdma.QPN(i) - near) & rdma.MaxQPN})
	}
	verbs.Leave(e.RecvCQ, left...)
	q, err := e.PD.CreateQP(rdma.QPConfig{SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, MaxSendWR: 1, MaxRecvWR: 1})
	if err != nil {
		t.Fatal(err)
	}
	wcs := make([]rdma.WC, 4*near)
	n, err := e.RecvCQ.Poll(wcs)
	if err != nil || n < 2*near-1 {
		t.Errorf("%d completions, %v, want those of all others", n, err)
	}
	for _, w := range wcs[:n] {
		if w.QPN == q.Num() {
			t.Errorf("queue pair %v has a completion of the one before it", q.Num())
		}
	}
	if n == 2*near {
		t.Logf("the device gave the number %v, far from %v: nothing was tried", q.Num(), e.QP.Num())
	}
}

// TestDevice_closed closes the device before its contexts, under load.
func TestDevice_closed(t *testing.T) {
	d := open(t)
	loads := []*load{startLoad(t, d), startLoad(t, d)}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	for _, l := range loads {
		if _, err := l.end(); err == nil {
			t.Error("a load goes on")
		}
		rdmatest.AwaitEvent(t, l.x.Ctx, rdma.EventDeviceFatal)
		if b := l.x.MR.Bytes(); b[len(b)-1] != 0 { // still mapped
			t.Error("the memory is not what it was")
		}
		if _, err := l.x.PD.AllocMR(1, rdma.LocalWrite); !errors.Is(err, rdma.ErrClosed) {
			t.Errorf("allocate a region: %v, want ErrClosed", err)
		}
	}
	if _, err := d.Open(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("open: %v, want ErrClosed", err)
	}
}

// TestDevice_receiversNotReady has many queue pairs that retry without end; the
// others go on, and all close.
func TestDevice_receiversNotReady(t *testing.T) {
	d := open(t)
	for range 16 {
		x, _ := rdmatest.Pair(t, d, d, rdmatest.Options{})
		for i := range uint64(8) {
			x.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, SGL: []rdma.SGE{x.SGE(0, 44)}})
		}
	}
	x, y := rdmatest.Pair(t, d, d, rdmatest.Options{})
	for i := range uint64(50) {
		y.Recv(t, i, 0, 100)
		x.Send(t, rdma.SendWR{ID: i, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 100)}})
		rdmatest.AwaitOne(t, y.RecvCQ, i, rdma.StatusSuccess)
		rdmatest.AwaitOne(t, x.SendCQ, i, rdma.StatusSuccess)
	}
}

// TestDevice_limits has each call that takes resources refused, as by a
// firmware that has no more.
func TestDevice_limits(t *testing.T) {
	d := open(t)
	for _, c := range []struct {
		call string
		try  func(e *rdmatest.End) error
	}{
		{"open", func(*rdmatest.End) error { _, err := d.Open(); return err }},
		{"alloc_pd", func(e *rdmatest.End) error { _, err := e.Ctx.AllocPD(); return err }},
		{"create_cq", func(e *rdmatest.End) error { _, err := e.Ctx.CreateCQ(10); return err }},
		{"resize_cq", func(e *rdmatest.End) error { return e.SendCQ.Resize(5000) }},
		{"reg_mr", func(e *rdmatest.End) error { _, err := e.PD.AllocMR(4096, rdma.LocalWrite); return err }},
		{"reg_mr", func(e *rdmatest.End) error { _, err := e.PD.RegMR(e.MR, 0, 0, rdma.LocalWrite); return err }},
		{"create_qp", func(e *rdmatest.End) error {
			_, err := e.PD.CreateQP(rdma.QPConfig{SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, MaxSendWR: 1, MaxRecvWR: 1})
			return err
		}},
	} {
		e := rdmatest.NewEnd(t, d, rdmatest.Options{})
		before := [2]int{leaktest.Descriptors(), regions()}
		d.Fail(func(call string) error {
			if call == c.call {
				return syscall.ENOMEM
			}
			return nil
		})
		err := c.try(e)
		d.Fail(nil)
		if !errors.Is(err, rdma.ErrNoResources) || !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("%s: %v, want ErrNoResources", c.call, err)
		}
		if diff := cmp.Diff(before, [2]int{leaktest.Descriptors(), regions()}); diff != "" {
			t.Errorf("%s left descriptors or regions (-before +after):\n%s", c.call, diff)
		}
		if err := c.try(e); err != nil {
			t.Errorf("%s: %v after the limit is gone", c.call, err)
		}
	}
}

// TestDevice_resolvesPaths resolves the path to itself and to somebody who is not
// there, while queue pairs work.
func TestDevice_resolvesPaths(t *testing.T) {
	d := open(t)
	l := startLoad(t, d)
	r, ok := l.x.Ctx.(rdma.PathResolver)
	if !ok {
		t.Fatal("contexts resolve no paths")
	}
	path := l.x.Attrs(l.y)[1].Path
	if err := r.ResolvePath(path); err != nil {
		t.Error(err)
	}
	// The end of the subnet: nobody answers there.
	g := d.GIDs()[0]
	last := g.GID
	for i := 128 - g.GID.Addr().BitLen() + g.PrefixBits; i < 127; i++ {
		last[i/8] |= 1 << (7 - i%8)
	}
	last[15] &^= 1 // not the broadcast address
	path.DGID = last
	began := time.Now()
	if err := r.ResolvePath(path); err == nil || !strings.Contains(err.Error(), "no answer for the MAC address of "+last.Addr().String()) {
		t.Errorf("resolve %v: %v", last.Addr(), err)
	}
	t.Logf("gave %v up after %v", last.Addr(), time.Since(began))
	if n, err := l.end(); n == 0 || err != nil {
		t.Errorf("the load ended after %d writes: %v", n, err)
	}
	if err := l.x.Ctx.Close(); err != nil {
		t.Fatal(err)
	}
	if err := r.ResolvePath(path); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("resolve in a closed context: %v, want ErrClosed", err)
	}
}

// Arguments that no device takes.
func TestDevice_refuses(t *testing.T) {
	d := open(t)
	e := rdmatest.NewEnd(t, d, rdmatest.Options{})
	at := d.Attr()
	path := e.Attrs(e)[1]
	if err := e.QP.Modify(e.Attrs(e)[0]); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		try  func() error
	}{
		{"completion queue too deep", func() error { _, err := e.Ctx.CreateCQ(at.MaxCQE + 1); return err }},
		{"too many sends", func() error {
			_, err := e.PD.CreateQP(rdma.QPConfig{SendCQ: e.SendCQ, RecvCQ: e.RecvCQ, MaxSendWR: at.MaxSendWR + 1, MaxRecvWR: 1})
			return err
		}},
		{"peer may write, we not", func() error { _, err := e.PD.AllocMR(1, rdma.RemoteWrite); return err }},
		{"row of no GID", func() error { a := path; a.Path.SGIDIndex = 200; return e.QP.Modify(a) }},
		{"destination without address", func() error { a := path; a.Path.DGID = rdma.GID{}; return e.QP.Modify(a) }},
		{"PSN of 25 bits", func() error { a := path; a.RQPSN = 1 << 24; return e.QP.Modify(a) }},
	} {
		if err := c.try(); !errors.Is(err, rdma.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", c.name, err)
		}
	}
	for _, c := range []struct {
		cfg  verbs.Config
		want error
	}{
		{verbs.Config{}, rdma.ErrInvalid},
		{verbs.Config{Name: d.Name(), Port: 77}, rdma.ErrInvalid},
		{verbs.Config{Name: d.Name(), Addr: d.GIDs()[0].GID.Addr().Next()}, verbs.ErrNoGID},
		{verbs.Config{Name: "nothere0"}, syscall.ENODEV},
	} {
		if _, err := verbs.Open(c.cfg); !errors.Is(err, c.want) {
			t.Errorf("open %+v: %v, want %v", c.cfg, err, c.want)
		}
	}
}

// TestDevice_isListed compares what sysfs says with what libibverbs does.
func TestDevice_isListed(t *testing.T) {
	d := open(t)
	all, err := verbs.Devices()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		if i.Name != d.Name() {
			continue
		}
		p := i.Ports[d.PortNum()-1]
		g, why, err := p.ChooseGID(verbs.GIDWish{})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(d.GIDs()[0], g); diff != "" {
			t.Errorf("GID (-device +sysfs):\n%s", diff)
		}
		if p.State != d.Port().State.String() || p.MTU != d.Port().ActiveMTU || i.Driver == "" {
			t.Errorf("listed as %+v, the port is %+v", i, d.Port())
		}
		t.Logf("%s: %s", i.Name, why)
		return
	}
	t.Errorf("%s is not in %+v", d.Name(), all)
}
