// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// pfSegment is the number of the segment that all PFs are on.
const pfSegment = nicSegment + 1

// firstBus is the number of the PCI bus of NUMA node 0. That of node 1 is twice it.
const firstBus = 0x40

// numaNodes is how many NUMA nodes a guest with Config.NUMA has. Its processor is
// on the first.
const numaNodes = 2

// A VF is a virtual function of a PF.
type VF struct {
	Index  int    // among those of its PF
	PCI    string // its address, as 0000:01:10.0
	NetDev string // its name in the guest, as pf0v1
}

// PF is the guest's name of an igb NIC, from 0. It is up and has no addresses.
func (g *Guest) PF(i int) string { return wire.PFDev(i) }

// SetPFLink cuts the link of a PF, or restores it. The PF sees its carrier go; its
// VFs do not, only nothing comes through: what they see is a PF that is set down.
func (g *Guest) SetPFLink(i int, up bool) error {
	return g.order(context.Background(), "set_link", map[string]any{"name": pfID(i), "up": up})
}

// MakeVFs makes n virtual functions of a PF, instead of those that it has. They
// have their driver, and random MAC addresses; they are down.
func (g *Guest) MakeVFs(ctx context.Context, pf string, n int) ([]VF, error) {
	// The driver of a VF asks the PF for its MAC, and gets none while that is
	// down or before it has carrier. So no VF gets its driver before: not by
	// itself, but by hand.
	const script = `
dev=/sys/class/net/$1/device
modprobe igbvf
ip link set "$1" up
for try in $(seq 600); do
	[ "$(cat /sys/class/net/$1/carrier)" = 0 ] || break
	sleep 0.05
done
[ "$(cat /sys/class/net/$1/carrier)" = 1 ] || { echo "$1 has no carrier" >&2; exit 1; }
echo 0 >$dev/sriov_numvfs
echo 0 >$dev/sriov_drivers_autoprobe
echo "$2" >$dev/sriov_numvfs
echo 1 >$dev/sriov_drivers_autoprobe
for ((i = 0; i < $2; i++)); do
	pci=$(basename $(readlink $dev/virtfn$i))
	echo $pci >/sys/bus/pci/drivers_probe
	ip link set "$(ls $dev/virtfn$i/net)" name "$1v$i"
	echo $i $pci "$1v$i"
done`
	out, err := g.Run(ctx, "bash", "-euc", script, "bash", pf, strconv.Itoa(n))
	if err != nil {
		return nil, fmt.Errorf("make %d VFs of %s: %w", n, pf, err)
	}
	return parseVFs(out)
}

func parseVFs(out string) ([]VF, error) {
	var vfs []VF
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			return nil, fmt.Errorf("make VFs: %q: want number, PCI address and network device", line)
		}
		index, err := strconv.Atoi(fields[0])
		if err != nil {
			return nil, fmt.Errorf("make VFs: %q: %w", line, err)
		}
		vfs = append(vfs, VF{Index: index, PCI: fields[1], NetDev: fields[2]})
	}
	return vfs, nil
}

// pfKernelArguments let devices use memory and interrupts as without an IOMMU: this
// is faster, and with remapped interrupts a busy host makes the kernel believe that
// it has no timer, and panic.
var pfKernelArguments = [...]string{"intel_iommu=on", "iommu=pt", "intremap=off"}

// pfArguments are QEMU's for PFs and NUMA nodes. Each PF is behind a port of its
// own, as a card in a slot is; without, VFs have no room for their bus numbers.
func (g *Guest) pfArguments() []string {
	cfg := g.lab.cfg
	var args []string
	if cfg.PFs > 0 {
		args = append(args, "-device", "intel-iommu") // without, vfio takes no VF
	}
	bus := func(int) string { return "pcie.0" }
	if cfg.NUMA {
		for node := range numaNodes {
			numa := fmt.Sprintf("node,nodeid=%d,memdev=memory%d", node, node)
			if node == 0 {
				numa += ",cpus=0"
			}
			args = append(
				args, "-object", fmt.Sprintf("memory-backend-ram,id=memory%d,size=%dM", node, cfg.MemoryMiB/numaNodes), "-numa", numa,
				"-device", fmt.Sprintf("pxb-pcie,id=numa%d,bus=pcie.0,bus_nr=%d,numa_node=%d", node, firstBus<<node, node),
			)
		}
		bus = func(pf int) string { return fmt.Sprintf("numa%d", pf%numaNodes) }
	}
	if cfg.PFs > 0 {
		args = append(args, g.segment(pfSegment)...)
	}
	for i := range cfg.PFs {
		args = append(
			args, "-device", fmt.Sprintf("pcie-root-port,id=slot%d,bus=%s,chassis=%d,slot=%d", i, bus(i), i+1, i+1),
			"-netdev", fmt.Sprintf("hubport,id=pfnet%d,hubid=%d", i, pfSegment),
			"-device", fmt.Sprintf("igb,id=%s,bus=slot%d,netdev=pfnet%d,mac=%s", pfID(i), i, i, wire.PFMAC(g.index, i)),
		)
	}
	return args
}

func pfID(i int) string { return fmt.Sprintf("pf%d", i) }
