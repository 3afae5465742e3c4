// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"bytes"
	"net/netip"
	"testing"

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

// testPort is not 4791, so that the tests do not meet a device of the machine.
const testPort = 14791

var (
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
