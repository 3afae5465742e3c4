// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft/softtest"
)

// between is what the conformance suite needs.
func between(a, b *soft.Device) rdmatest.Net { return rdmatest.Net{A: a, B: b} }

func TestProvider_loopback4(t *testing.T) {
	rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net { return between(loopback(t)) })
}

func TestProvider_loopback4NoSegmentation(t *testing.T) {
	rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
		return between(openUDP(t, soft.Config{Addr: loopA, Port: testPort, NoSegmentation: true}),
			openUDP(t, soft.Config{Addr: loopB, Port: testPort, NoSegmentation: true}))
	})
}

// fabricAddrs are IPv6, whose ICRC has no unknown.
var fabricAddrs = [2]netip.Addr{netip.MustParseAddr("fd00::a"), netip.MustParseAddr("fd00::b")}

func TestProvider_fabric(t *testing.T) {
	for _, f := range []struct {
		name   string
		faults softtest.Faults
	}{
		{"perfect", softtest.Faults{}},
		{"delay", softtest.Faults{Delay: 50 * time.Microsecond, Jitter: 50 * time.Microsecond}},
		{"loss", softtest.Faults{Loss: 0.01, Delay: 10 * time.Microsecond}},
		{"duplication", softtest.Faults{Duplicate: 0.2, Delay: 10 * time.Microsecond}},
		{"reordering", softtest.Faults{Reorder: 0.02, ReorderBy: 50 * time.Microsecond, Delay: 10 * time.Microsecond}},
		{"corruption", softtest.Faults{Corrupt: 0.01}},
		{"everything", softtest.Faults{
			Loss: 0.003, Duplicate: 0.01, Reorder: 0.003, Corrupt: 0.003,
			Delay: 10 * time.Microsecond, Jitter: 20 * time.Microsecond,
		}},
	} {
		for _, c := range rdmatest.Cases() {
			t.Run(f.name+"/"+c.Name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					fabric := softtest.NewFabric(t, 42)
					f.faults.KeepFatalNAKs = true
					fabric.SetFaults(f.faults)
					a := fabric.Open(t, soft.Config{Name: "a", Addr: fabricAddrs[0]})
					b := fabric.Open(t, soft.Config{Name: "b", Addr: fabricAddrs[1]})
					c.Run(t, between(a, b))
				})
			})
		}
	}
}

// TestProvider_loopback6 has one device at both ends: a machine has only one
// IPv6 loopback address.
func TestProvider_loopback6(t *testing.T) {
	rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
		d := openUDP(t, soft.Config{Addr: netip.IPv6Loopback(), Port: testPort})
		return between(d, d)
	})
}

func TestProvider_veth(t *testing.T) {
	for _, mtu := range []int{1500, 9000} {
		v := newVethPair(t, mtu)
		for name, at := range map[string][2]netip.Addr{"IPv4": {v.a4, v.b4}, "IPv6": {v.a6, v.b6}} {
			t.Run(fmt.Sprint(name, " ", mtu), func(t *testing.T) {
				rdmatest.TestProvider(t, func(t *testing.T) rdmatest.Net {
					return between(active(t, v.a, soft.Config{Addr: at[0]}), active(t, v.b, soft.Config{Addr: at[1]}))
				})
			})
		}
	}
}
