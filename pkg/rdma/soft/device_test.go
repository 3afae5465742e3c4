// SPDX-License-Identifier: Apache-2.0

package soft

import (
	"math/rand/v2"
	"testing"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

func TestPathMTU(t *testing.T) {
	for bytes, want := range map[int]rdma.MTU{
		0: rdma.MTU256, 1280: rdma.MTU1024, 1500: rdma.MTU1024, 2200: rdma.MTU2048, 4200: rdma.MTU4096, 9000: rdma.MTU4096, 65536: rdma.MTU4096,
	} {
		if got := pathMTU(bytes); got != want {
			t.Errorf("interface MTU %d: path MTU %v, want %v", bytes, got, want)
		}
	}
}

// The path MTU is what is configured, unless its packets do not fit the interface.
func TestDevice_Port_mtu(t *testing.T) {
	for _, c := range []struct {
		name      string
		cfg       rdma.MTU
		linkBytes int
		maxBytes  int
		want      rdma.MTU
	}{
		{"none", 0, 1500, 0, rdma.MTU1024},
		{"smaller", rdma.MTU512, 1500, 0, rdma.MTU512},
		{"too large", rdma.MTU4096, 1500, 0, rdma.MTU1024},
		{"large", rdma.MTU4096, 9000, 0, rdma.MTU4096},
		{"none, several interfaces", 0, 1500, 9000, rdma.MTU1024},
		{"smaller, several interfaces", rdma.MTU512, 1500, 9000, rdma.MTU512},
		{"large for one of several interfaces", rdma.MTU4096, 1500, 9000, rdma.MTU4096},
		{"too large for all of several interfaces", rdma.MTU4096, 1280, 1500, rdma.MTU1024},
	} {
		d := &Device{cfg: Config{MTU: c.cfg}}
		d.link.Store(&LinkState{Up: true, MTUBytes: c.linkBytes, MaxMTUBytes: c.maxBytes})
		if got := d.Port().ActiveMTU; got != c.want {
			t.Errorf("%s: path MTU %v, want %v", c.name, got, c.want)
		}
	}
}

// A queue pair may have what fits one of the interfaces by which packets may leave, whatever the port's MTU has become since.
func TestDevice_maxMTU(t *testing.T) {
	for _, c := range []struct {
		cfg             rdma.MTU
		bytes, maxBytes int
		want            rdma.MTU
	}{
		{0, 1500, 0, rdma.MTU1024},
		{0, 1500, 9000, rdma.MTU4096},
		{rdma.MTU2048, 1500, 9000, rdma.MTU2048},
		{rdma.MTU4096, 1500, 0, rdma.MTU1024},
	} {
		d := &Device{cfg: Config{MTU: c.cfg}}
		d.link.Store(&LinkState{Up: true, MTUBytes: c.bytes, MaxMTUBytes: c.maxBytes})
		if got := d.maxMTU(); got != c.want {
			t.Errorf("soft.mtu %v, interfaces of %d to %d bytes: %v, want %v", c.cfg, c.bytes, c.maxBytes, got, c.want)
		}
	}
}

// Queue pair numbers tell two devices that share an address apart; the other bits are random.
func TestDevice_drawQPN(t *testing.T) {
	for _, c := range []struct {
		name  string
		share *share
		want  rdma.QPN // the bits that all numbers have
		never rdma.QPN // and those that none has
	}{
		{"alone", nil, 0, 0},
		{"generation 0", &share{generation: 0}, 0, generationBit},
		{"generation 1", &share{generation: 1}, generationBit, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := &Device{share: c.share}
			r := rand.New(rand.NewPCG(1, 2))
			all, some := rdma.MaxQPN, rdma.QPN(0)
			for range 1000 {
				n := d.drawQPN(r)
				all, some = all&n, some|n
			}
			if all != c.want || some != rdma.MaxQPN&^c.never {
				t.Errorf("all numbers have the bits %06x, none has %06x", uint32(all), uint32(rdma.MaxQPN&^some))
			}
		})
	}
}
