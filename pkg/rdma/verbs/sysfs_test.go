// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// files makes a file system of lines "path: text" and "path -> link".
func files(lines string) fstest.MapFS {
	m := fstest.MapFS{}
	for line := range strings.Lines(lines) {
		line = strings.TrimSpace(line)
		if name, to, ok := strings.Cut(line, " -> "); ok {
			m[name] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte(to)}
		} else if name, text, ok := strings.Cut(line, ": "); ok {
			m[name] = &fstest.MapFile{Data: []byte(text + "\n")}
		}
	}
	return m
}

func TestDevices_none(t *testing.T) {
	got, err := sysfs{root: files("")}.devices()
	if len(got) > 0 || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestDevices_soft is sysfs of a guest with soft RoCE and of one with siw.
func TestDevices_soft(t *testing.T) {
	const port = "class/infiniband/rxe0/ports/1/"
	got, err := sysfs{root: files(`
		class/infiniband/rxe0/node_type: 1: CA
		class/infiniband/rxe0/node_guid: 5054:00ff:fe00:0001
		class/infiniband/rxe0/parent: eth0
		` + port + `state: 4: ACTIVE
		` + port + `phys_state: 5: LinkUp
		` + port + `link_layer: Ethernet
		` + port + `rate: 2.5 Gb/sec (1X SDR)
		` + port + `gids/0: fe80:0000:0000:0000:5054:00ff:fe00:0001
		` + port + `gid_attrs/types/0: RoCE v2
		` + port + `gid_attrs/ndevs/0: eth0
		` + port + `gids/1: 0000:0000:0000:0000:0000:0000:0000:0000
		` + port + `gids/2: 0000:0000:0000:0000:0000:ffff:0a00:0001
		` + port + `gid_attrs/types/2: RoCE v2
		` + port + `gid_attrs/ndevs/2: eth0
		` + port + `gids/99: 0000:0000:0000:0000:0000:ffff:0a00:0009
		class/net/eth0/mtu: 9000
		class/net/eth0/device/numa_node: 0
		class/infiniband/siw0/node_type: 4: RNIC
		class/infiniband/siw0/ports/1/state: 1: DOWN
	`), net: func(name string) Interface {
		return Interface{Name: name, MAC: rdma.MAC{2, 1}, Addrs: []netip.Prefix{
			netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("fe80::5054:ff:fe00:1/64"), netip.MustParsePrefix("10.1.1.1/32"),
		}}
	}}.devices()
	if err != nil {
		t.Fatal(err)
	}
	want := []Info{{
		Name: "rxe0", Driver: "rxe", NodeType: "ca", NodeGUID: "5054:00ff:fe00:0001", NUMANode: 0,
		Ports: []PortInfo{{
			Num: 1, State: "ACTIVE", PhysState: "LinkUp", LinkLayer: "Ethernet", RateGbps: 2.5,
			NetDev: "eth0", NetDevMTU: 9000, MTU: rdma.MTU4096,
			GIDs: []rdma.GIDEntry{
				{Index: 0, GID: rdma.GIDFromAddr(netip.MustParseAddr("fe80::5054:ff:fe00:1")), Type: rdma.GIDTypeRoCEv2, MAC: rdma.MAC{2, 1}, NetDev: "eth0", PrefixBits: 64},
				{Index: 2, GID: rdma.GIDFromAddr(netip.MustParseAddr("10.0.0.1")), Type: rdma.GIDTypeRoCEv2, MAC: rdma.MAC{2, 1}, NetDev: "eth0", PrefixBits: 24},
			},
		}},
	}, {
		Name: "siw0", Driver: "siw", NodeType: "rnic", NUMANode: -1,
		Ports: []PortInfo{{Num: 1, State: "DOWN"}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

func TestSysfs_node(t *testing.T) {
	s := sysfs{root: files(`
		class/infiniband_verbs/abi_version: 6
		class/infiniband_verbs/uverbs0/ibdev: rocep1s0f0
		class/infiniband_verbs/uverbs1/ibdev: mlx5_0
	`)}
	for device, want := range map[string]string{"mlx5_0": "uverbs1", "rocep1s0f0": "uverbs0", "rocep1s0": "", "6": ""} {
		if got, err := s.node(device); got != want || err != nil {
			t.Errorf("node of %s is %q, %v, want %q", device, got, err, want)
		}
	}
	if got, err := (sysfs{root: files("")}).node("mlx5_0"); got != "" || err != nil {
		t.Errorf("node %q without RDMA, %v", got, err)
	}
}

// shortFS is sysfs for a process that has no descriptor for some files.
type shortFS struct {
	fs.FS
	short string // the end of their names
}

func (f shortFS) Open(name string) (fs.File, error) {
	if strings.HasSuffix(name, f.short) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EMFILE}
	}
	return f.FS.Open(name)
}

// A device whose node could not be looked for, for want of descriptors, is not one that is not there.
func TestSysfs_nodeUnread(t *testing.T) {
	root := files(`
		class/infiniband_verbs/uverbs0/ibdev: rxe0
		class/infiniband_verbs/uverbs1/ibdev: mlx5_0
	`)
	for short, want := range map[string]string{classVerbs: "", "uverbs1/ibdev": "", "uverbs0/ibdev": "uverbs1"} {
		got, err := sysfs{root: shortFS{root, short}}.node("mlx5_0")
		if got != want || errors.Is(err, syscall.EMFILE) != (want == "") {
			t.Errorf("without a descriptor for %s: node %q, %v", short, got, err)
		}
	}
}

// TestPortInfo_ChooseGID has a pod's child of an interface that has only a link-local address. The kernel
// tells the name that the child's interface has in the pod, which may be that of another one here.
func TestPortInfo_ChooseGID(t *testing.T) {
	for _, child := range []string{"net1", "eth1"} {
		const port = "class/infiniband/mlx5_0/ports/1/"
		all, err := sysfs{root: files(`
			` + port + `gids/0: fe80:0000:0000:0000:0000:0000:0000:0001
			` + port + `gid_attrs/types/0: RoCE v2
			` + port + `gid_attrs/ndevs/0: ens1
			` + port + `gids/1: 0000:0000:0000:0000:0000:ffff:0a09:0005
			` + port + `gid_attrs/types/1: RoCE v2
			` + port + `gid_attrs/ndevs/1: ` + child + `
		`), net: func(name string) Interface {
			return map[string]Interface{"ens1": {Name: "ens1"}, "eth1": {Name: "eth1", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}}[name]
		}}.devices()
		if err != nil {
			t.Fatal(err)
		}
		p := all[0].Ports[0]
		if g, why, err := p.ChooseGID(GIDWish{}); err != nil || g.Index != 0 {
			t.Errorf("child %s: GID %d, %q, %v, want 0", child, g.Index, why, err)
		}
		if p.GIDs[1].NetDev != child {
			t.Errorf("listed as of %q, want %q", p.GIDs[1].NetDev, child)
		}
	}
}

// TestDevices_hardware is sysfs of an adapter on PCI with two ports and both
// types of GIDs.
func TestDevices_hardware(t *testing.T) {
	const dev = "class/infiniband/mlx5_0/"
	text := `
		class/infiniband/mlx5_0/device -> ../../../devices/pci/0000:3b:00.1
		devices/pci/0000:3b:00.1/driver -> ../../../bus/pci/drivers/mlx5_core
		devices/pci/0000:3b:00.1/numa_node: 1
		class/infiniband/mlx5_0/node_type: 1: CA
		class/infiniband/mlx5_0/fw_ver: 22.41.1000
		class/infiniband/mlx5_0/ports/2/link_layer: InfiniBand
		class/infiniband/mlx5_0/ports/1/link_layer: Ethernet
		class/infiniband/mlx5_0/ports/1/rate: 100 Gb/sec (4X EDR)
	`
	for i, typ := range []string{"IB/RoCE v1", "RoCE v2"} {
		text += fmt.Sprintf("%sports/1/gids/%d: 0000:0000:0000:0000:0000:ffff:0a00:0001\n%sports/1/gid_attrs/types/%d: %s\n", dev, i, dev, i, typ)
	}
	got, err := sysfs{root: files(text), net: func(string) Interface { return Interface{} }}.devices()
	if err != nil {
		t.Fatal(err)
	}
	gid := rdma.GIDFromAddr(netip.MustParseAddr("10.0.0.1"))
	want := []Info{{
		Name: "mlx5_0", Driver: "mlx5_core", NodeType: "ca", Firmware: "22.41.1000", PCI: "0000:3b:00.1", NUMANode: 1,
		Ports: []PortInfo{
			{Num: 1, LinkLayer: "Ethernet", RateGbps: 100, GIDs: []rdma.GIDEntry{
				{Index: 0, GID: gid, Type: rdma.GIDTypeRoCEv1}, {Index: 1, GID: gid, Type: rdma.GIDTypeRoCEv2},
			}},
			{Num: 2, LinkLayer: "InfiniBand"},
		},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

func TestPathMTU(t *testing.T) {
	for bytes, want := range map[int]rdma.MTU{
		68: rdma.MTU256, 1280: rdma.MTU1024, 1500: rdma.MTU1024, 4200: rdma.MTU4096, 4191: rdma.MTU2048, 9000: rdma.MTU4096,
	} {
		if got := pathMTU(bytes); got != want {
			t.Errorf("interface MTU %d: path MTU %v, want %v", bytes, got, want)
		}
	}
}
