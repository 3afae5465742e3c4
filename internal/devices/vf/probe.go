// SPDX-License-Identifier: Apache-2.0

package vf

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
)

// Capabilities is what the kernel and the hardware of this machine can do.
type Capabilities struct {
	// RDMANetNS is how the RDMA subsystem treats namespaces: "shared",
	// "exclusive", or "" if the kernel has no RDMA.
	RDMANetNS string `json:"rdmaNetNS,omitempty"`
	// SoftRoCE says that the kernel has rxe, SoftRoCEInPods that an rxe device
	// made in a pod carries traffic.
	SoftRoCE       bool `json:"softRoCE"`
	SoftRoCEInPods bool `json:"softRoCEInPods"`
	IPVlan         bool `json:"ipvlan"`
	PFs            int  `json:"pfs"`
	VFs            int  `json:"vfs"`
	// Errors say what could not be found out, and why.
	Errors []string `json:"errors,omitempty"`
}

// Names in the probe's namespace, and of its RDMA device, which the host sees.
const (
	probeName = "smcrprobe0"
	probePeer = "smcrprobe1"
	roceName  = "smcrprobe"
)

// rocePort is the UDP port of RoCEv2, as /proc/net/udp writes it: 4791.
const rocePortHex = ":12B7"

// Probe finds out what this machine can do. It works in a namespace of its own and leaves
// nothing behind. It does not try again what an Attach has found out since the last boot.
func (h Host) Probe() Capabilities {
	c, ok := h.known()
	if ok {
		c.readMode()
	} else {
		c = h.probeKernel()
	}
	pfs, err := h.PFs()
	c.note("list PFs", err)
	c.PFs = len(pfs)
	for _, pf := range pfs {
		c.VFs += pf.VFs
	}
	return c
}

func (c *Capabilities) note(what string, err error) {
	if err != nil {
		c.Errors = append(c.Errors, fmt.Sprintf("%s: %v", what, err))
	}
}

// probeKernel finds out what the kernel can do. That does not change before the next boot,
// unless a module is loaded.
func (h Host) probeKernel() Capabilities {
	var c Capabilities
	c.readMode()
	ns, err := linux.ScratchNetNS()
	if err != nil {
		c.note("namespaces", err)
		return c
	}
	c.note("in a namespace", ns.Do(func() error { return c.probeInNetNS() }))
	c.note("namespaces", ns.Close())
	return c
}

func (c *Capabilities) readMode() {
	c.RDMANetNS = ""
	if mode, err := (netlinkRDMA{}).Mode(); err == nil {
		c.RDMANetNS = mode
	} else if !noRDMA(err) {
		c.note("RDMA", err)
	}
}

// noRDMA tells whether err says that the kernel has no RDMA, or has not loaded its module.
func noRDMA(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT)
}

func (c *Capabilities) probeInNetNS() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: probeName}, PeerName: probePeer}); err != nil {
		return fmt.Errorf("make a veth: %w", err)
	}
	l, err := h.LinkByName(probeName)
	if err != nil {
		return err
	}
	if err := h.LinkSetUp(l); err != nil {
		return err
	}
	c.probeRXE()
	a := netlink.NewLinkAttrs()
	a.Name, a.ParentIndex = "smcrchild", l.Attrs().Index
	err = h.LinkAdd(&netlink.IPVlan{LinkAttrs: a, Mode: netlink.IPVLAN_MODE_L2})
	c.IPVlan = err == nil
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		c.note("make an ipvlan interface", err)
	}
	return nil
}

// probeRXE makes an rxe device in the namespace of the calling thread. The device carries
// traffic there if its sockets are in this namespace and not in the first one. probeRXE
// removes the device before its interface: while an RDMA device is listed whose interface
// is being removed, the kernel refuses to make namespaces.
func (c *Capabilities) probeRXE() {
	if c.RDMANetNS == "" {
		return
	}
	name := fmt.Sprintf("%s%d", roceName, os.Getpid())
	err := netlinkRDMA{}.Add(name, kindRXE, probeName)
	if errors.Is(err, unix.EINVAL) || noRDMA(err) {
		return // the kernel does not know the kind rxe: there is no such module
	}
	if err != nil {
		c.note("rxe", err)
		return
	}
	c.SoftRoCE = true
	c.probeRoCESockets("/proc/thread-self/net")
	c.note("rxe", netlinkRDMA{}.del(name))
}

// probeRoCESockets looks for the sockets of software RoCE in a namespace's tables. Without IPv6 there is no udp6.
func (c *Capabilities) probeRoCESockets(dir string) {
	for _, table := range []string{"udp", "udp6"} {
		b, err := os.ReadFile(filepath.Join(dir, table))
		if !errors.Is(err, fs.ErrNotExist) {
			c.note("rxe", err)
		}
		c.SoftRoCEInPods = c.SoftRoCEInPods || strings.Contains(string(b), rocePortHex+" ")
	}
}

// remembered are capabilities on disk.
type remembered struct {
	Boot         string       `json:"boot"`
	Capabilities Capabilities `json:"capabilities"`
}

// capabilitiesFile and probeLock are in the directory of the journals. probeLock is longer
// than the name of any device.
const (
	capabilitiesFile = "capabilities"
	probeLock        = "capabilities-of-this-kernel"
)

// known returns the capabilities on disk, if they were found out since the last boot.
func (h Host) known() (Capabilities, bool) {
	var r remembered
	boot, err := bootID()
	b, rerr := h.records().Read(capabilitiesFile)
	if err != nil || rerr != nil || json.Unmarshal(b, &r) != nil || r.Boot != boot {
		return Capabilities{}, false
	}
	return r.Capabilities, true
}

// capabilities are found out once after a boot and stored on disk, because each call of
// the plugin is a new process. Capabilities that are missing are looked for again: a module
// may have been loaded since.
func (h Host) capabilities(ctx context.Context) Capabilities {
	if h.hooks.caps != nil {
		return *h.hooks.caps
	}
	if c, ok := h.known(); ok {
		return c
	}
	// The first pods of a node start at the same time: one call probes for all.
	if unlock, err := h.lock(ctx, probeLock); err == nil {
		defer unlock()
		if c, ok := h.known(); ok {
			return c
		}
	}
	c := h.probeKernel()
	boot, err := bootID()
	if err != nil || len(c.Errors) > 0 || !c.SoftRoCEInPods && !c.IPVlan {
		return c
	}
	_ = h.records().Write(capabilitiesFile, remembered{boot, c}) // after an error the next call finds them out again
	return c
}
