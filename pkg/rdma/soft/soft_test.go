// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"bytes"
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// openUDP opens a device on a free port-and-address pair of loopback.
func openUDP(t testing.TB, cfg soft.Config) *soft.Device {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "soft-" + cfg.Addr.String()
	}
	d, err := soft.Open(cfg)
	if err != nil {
		t.Fatalf("open device: %v", err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("close device: %v", err)
		}
	})
	return d
}

var (
	// testPort is not 4791, so that the tests do not meet a device of the machine, and of no other run of them.
	testPort = testenv.UDPPort()

	loopA = netip.MustParseAddr("127.91.0.1")
	loopB = netip.MustParseAddr("127.91.0.2")
)

func loopback(t testing.TB) (a, b *soft.Device) {
	t.Helper()
	return openUDP(t, soft.Config{Addr: loopA, Port: testPort}), openUDP(t, soft.Config{Addr: loopB, Port: testPort})
}

func TestDevice_movesSendAndWrite(t *testing.T) {
	a, b := loopback(t)
	x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
	for i := range x.MR.Bytes() {
		x.MR.Bytes()[i] = byte(i * 7)
	}
	const n = 300_000
	y.Recv(t, 9, 900_000, 100)
	x.Send(t, x.Write(1, y, 100, n))
	x.Send(t, rdma.SendWR{ID: 2, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(7, 44)}})
	w := rdmatest.AwaitOne(t, y.RecvCQ, 9, rdma.StatusSuccess)
	if w.Bytes != 44 || w.Op != rdma.OpRecv {
		t.Errorf("receive completion %+v", w)
	}
	if !bytes.Equal(y.MR.Bytes()[100:100+n], x.MR.Bytes()[100:100+n]) {
		t.Error("written bytes differ")
	}
	if !bytes.Equal(y.MR.Bytes()[900_000:900_044], x.MR.Bytes()[7:51]) {
		t.Error("sent bytes differ")
	}
	for id := uint64(1); id <= 2; id++ {
		rdmatest.AwaitOne(t, x.SendCQ, id, rdma.StatusSuccess)
	}
	t.Logf("a %+v\nb %+v", a.Stats(), b.Stats())
}

func TestDevice_doesNotAllocate(t *testing.T) {
	a, b := loopback(t)
	x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
	wcs := make([]rdma.WC, 8)
	recv := []rdma.RecvWR{{SGE: y.SGE(0, 64)}}
	send := []rdma.SendWR{
		{Op: rdma.OpWrite, SGL: []rdma.SGE{x.SGE(0, 20_000)}, RemoteAddr: y.MR.Addr() + 4096, RKey: y.MR.RKey()},
		{Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{x.SGE(0, 44)}},
	}
	round := func() {
		if _, err := y.QP.PostRecv(recv); err != nil {
			t.Fatal(err)
		}
		if _, err := x.QP.PostSend(send); err != nil {
			t.Fatal(err)
		}
		awaitSome(t, y.RecvCQ, wcs)
		awaitSome(t, x.SendCQ, wcs)
	}
	for range 100 {
		round() // batches, ARP, stacks
	}
	// Other goroutines count too, the runtime's as well.
	if n := testing.AllocsPerRun(1000, round); n > 0.5 {
		t.Errorf("%v allocations for a WRITE and a SEND", n)
	}
}

func TestOpen_refusesBadConfig(t *testing.T) {
	for name, cfg := range map[string]soft.Config{
		"no name":         {Addr: loopA},
		"no address":      {Name: "x"},
		"unspecified":     {Name: "x", Addr: netip.IPv4Unspecified()},
		"mapped":          {Name: "x", Addr: netip.MustParseAddr("::ffff:127.0.0.1")},
		"no zone":         {Name: "x", Addr: netip.MustParseAddr("fe80::1")},
		"unknown zone":    {Name: "x", Addr: netip.MustParseAddr("fe80::1%nosuchlink")},
		"path MTU":        {Name: "x", Addr: loopA, MTU: 6},
		"window":          {Name: "x", Addr: loopA, WindowPackets: 1 << 20},
		"foreign address": {Name: "x", Addr: netip.MustParseAddr("192.0.2.1"), Port: testPort},
	} {
		if d, err := soft.Open(cfg); err == nil {
			_ = d.Close()
			t.Errorf("%s: opened", name)
		}
	}
}

func TestOpen_portInUse(t *testing.T) {
	a := openUDP(t, soft.Config{Addr: loopA, Port: testPort})
	if d, err := soft.Open(soft.Config{Name: "second", Addr: loopA, Port: testPort}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("second device: %v, want EADDRINUSE", err)
		if err == nil {
			_ = d.Close()
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	openUDP(t, soft.Config{Addr: loopA, Port: testPort})
}

func TestDevice_closeEndsContexts(t *testing.T) {
	a, b := loopback(t)
	x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
	for i := range uint64(4) {
		x.Send(t, x.Write(i, y, 0, 500_000))
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	rdmatest.AwaitEvent(t, x.Ctx, rdma.EventDeviceFatal)
	if _, open := <-x.Ctx.Events(); open {
		t.Error("events go on after the device is closed")
	}
	if _, err := x.QP.PostSend([]rdma.SendWR{x.Write(1, y, 0, 1)}); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("post: %v, want ErrClosed", err)
	}
	if _, err := a.Open(); !errors.Is(err, rdma.ErrClosed) {
		t.Errorf("open: %v, want ErrClosed", err)
	}
}
