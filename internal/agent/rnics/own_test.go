// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

// TestOwn_rdmaName: an RDMA device that was made again has another name.
func TestOwn_rdmaName(t *testing.T) {
	port := func(netdev string) []verbs.PortInfo { return []verbs.PortInfo{{Num: 1, NetDev: netdev}} }
	all := []verbs.Info{
		{Name: "mlx5_0", PCI: "0000:01:00.0", Ports: port("eth1")},
		{Name: "mlx5_9", PCI: "0000:01:10.2", Ports: port("eth3")},
		{Name: "mlx5_7", PCI: "0000:01:00.1"},
		{Name: "mlx5_8", PCI: "0000:01:00.1"},
		{Name: "rxe7", Ports: port("eth1")},
	}
	for _, tt := range []struct {
		name  string
		own   Own
		inPod bool
		want  string
	}{
		{"by its name", Own{RDMA: []string{"gone", "mlx5_9"}}, false, "mlx5_9"},
		{"renamed function", Own{RDMA: []string{"mlx5_2"}, PCI: "0000:01:10.2", NetDev: "eth3"}, true, "mlx5_9"},
		{"another function has its name", Own{RDMA: []string{"mlx5_0"}, PCI: "0000:01:10.2", NetDev: "eth3"}, true, "mlx5_9"},
		{"only another function has its name", Own{RDMA: []string{"mlx5_0"}, PCI: "0000:01:10.4"}, true, ""},
		{"software of a function", Own{RDMA: []string{"rxe7"}, PCI: "0000:01:10.4"}, true, "rxe7"},
		{"one of two of a function", Own{RDMA: []string{"mlx5_8"}, PCI: "0000:01:00.1"}, false, "mlx5_8"},
		{"renamed software", Own{RDMA: []string{"rxe0"}, NetDev: "eth1"}, false, "rxe7"},
		{"software of another interface of that name", Own{RDMA: []string{"rxe0"}, NetDev: "eth1"}, true, ""},
		{"gone", Own{RDMA: []string{"mlx5_4"}, PCI: "0000:01:10.4", NetDev: "eth5"}, false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.own.rdmaName(all, tt.inPod); got != tt.want {
				t.Errorf("device %q, want %q", got, tt.want)
			}
		})
	}
}

func TestOrderRails(t *testing.T) {
	far := func(numa int) bool { return numa != 1 }
	for _, tt := range []struct {
		name string
		in   []Own
		want string
	}{
		{"by rail", []Own{{ID: "b", Rail: 1}, {ID: "a", Rail: 0}}, "a b"},
		{"rails in turn", []Own{{ID: "a0", Rail: 0}, {ID: "a1", Rail: 0}, {ID: "b0", Rail: 1}, {ID: "b1", Rail: 1}}, "a0 b0 a1 b1"},
		{"the near one first", []Own{{ID: "a", Rail: 0, NUMA: 1}, {ID: "b", Rail: 1, NUMA: 0}}, "b a"},
		{"rails before nearness", []Own{{ID: "b0", Rail: 1}, {ID: "b1", Rail: 1}, {ID: "a0", Rail: 0, NUMA: 1}}, "b0 a0 b1"},
		{"unknown", []Own{{ID: "x", Rail: -1, NUMA: -1}, {ID: "a", Rail: 0}}, "x a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			orderRails(tt.in, far)
			var got []string
			for _, d := range tt.in {
				got = append(got, d.ID)
			}
			if diff := cmp.Diff(tt.want, strings.Join(got, " ")); diff != "" {
				t.Errorf("order (-want +got):\n%s", diff)
			}
		})
	}
}
