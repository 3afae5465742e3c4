// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

func TestProvider_loopback4(t *testing.T) {
	rdmatest.TestProvider(t, func(t *testing.T) (a, b rdma.Device) { return loopback(t) })
}

func TestProvider_loopback4NoSegmentation(t *testing.T) {
	rdmatest.TestProvider(t, func(t *testing.T) (a, b rdma.Device) {
		return openUDP(t, soft.Config{Addr: loopA, Port: testPort, NoSegmentation: true}),
			openUDP(t, soft.Config{Addr: loopB, Port: testPort, NoSegmentation: true})
	})
}

// fabricAddrs are IPv6, whose ICRC has no unknown.
var fabricAddrs = [2]netip.Addr{netip.MustParseAddr("fd00::a"), netip.MustParseAddr("fd00::b")}

func TestProvider_fabric(t *testing.T) {
	for _, f := range []struct {
		name   string
		faults rdmatest.Faults
	}{
		{"perfect", rdmatest.Faults{}},
		{"delay", rdmatest.Faults{Delay: 50 * time.Microsecond, Jitter: 50 * time.Microsecond}},
		{"loss", rdmatest.Faults{Loss: 0.01, Delay: 10 * time.Microsecond}},
		{"duplication", rdmatest.Faults{Duplicate: 0.2, Delay: 10 * time.Microsecond}},
		{"reordering", rdmatest.Faults{Reorder: 0.02, ReorderBy: 50 * time.Microsecond, Delay: 10 * time.Microsecond}},
		{"corruption", rdmatest.Faults{Corrupt: 0.01}},
		{"everything", rdmatest.Faults{
			Loss: 0.003, Duplicate: 0.01, Reorder: 0.003, Corrupt: 0.003,
			Delay: 10 * time.Microsecond, Jitter: 20 * time.Microsecond,
		}},
	} {
		for _, c := range rdmatest.Cases() {
			t.Run(f.name+"/"+c.Name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					fabric := rdmatest.NewFabric(t, 42)
					f.faults.KeepFatalNAKs = true
					fabric.SetFaults(f.faults)
					a := fabric.Open(t, soft.Config{Name: "a", Addr: fabricAddrs[0]})
					b := fabric.Open(t, soft.Config{Name: "b", Addr: fabricAddrs[1]})
					c.Run(t, a, b)
				})
			})
		}
	}
}
