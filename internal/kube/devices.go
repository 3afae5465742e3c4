// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/smcr-io/kube-smcr/internal/agent"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
)

// pluginLock is the name of the device plugin's lock in the data directory.
const pluginLock = "device-plugin.lock"

// ownRail is the first rail number for devices whose rail is not known: each of them gets a rail
// of its own.
const ownRail = 1 << 16

// shareDevices makes what gives the node's devices to pods: the inventory, the device
// plugin, the DRA driver.
func (c *cluster) shareDevices(base *config.Node) error {
	c.inventory = inventory.New(inventory.Config{
		Host: vf.Host{DataDir: base.DataDir}, Log: c.cfg.Log,
		Configured: func() []config.Device { return base.Devices },
	})
	if p := &base.DevicePlugin; p.Enabled {
		metrics := deviceplugin.NewMetrics()
		changed, _ := c.inventory.Subscribe() // for as long as the process
		var err error
		c.devicePlugin, err = deviceplugin.New(deviceplugin.Config{
			Dir: p.Dir, Lock: filepath.Join(base.DataDir, pluginLock), InfoDir: p.InfoDir, Slots: p.Slots, VFs: p.VFs,
			Devices: func() ([]deviceplugin.Device, error) { return offered(c.inventory.Devices()), nil }, Changed: changed,
			Metrics: metrics, Log: c.cfg.Log,
		})
		if err != nil {
			return fmt.Errorf("offer devices to kubelet: %w", err)
		}
		c.cfg.Agent.Collectors = append(c.cfg.Agent.Collectors, metrics)
	}
	if p := &base.DevicePlugin; p.Asks() {
		c.assigned = append(c.assigned, deviceplugin.NewAssignments(base.DataDir, p.PodResources, p.OtherResources, c.cfg.Log))
	}
	if c.claimed != nil {
		if err := c.newDriver(base); err != nil {
			return err
		}
		c.assigned = append(c.assigned, c.claimed)
	}
	if len(c.assigned) > 0 {
		c.cfg.Agent.Assigned = c.assigned
	}
	return nil
}

// assigned asks several sources which devices a pod has.
type assigned []agent.Assigned

// Devices implements agent.Assigned: a pod has the devices of all sources together.
func (as assigned) Devices(pod config.PodName) []string {
	var ids []string
	for _, a := range as {
		ids = append(ids, a.Devices(pod)...)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// offerDevices offers the devices to kubelet until ctx ends.
func (c *cluster) offerDevices(ctx context.Context) {
	looked, stop := c.inventory.Subscribe()
	defer stop()
	select {
	case <-looked: // the inventory is complete; kubelet must not be told of a node without devices
		c.devicePlugin.Run(ctx)
	case <-ctx.Done():
	}
}

// offered are the devices that pods can ask kubelet for. A PCI device that is not a VF is left out:
// the RNIC is the node's.
func offered(all []inventory.Device) []deviceplugin.Device {
	var out []deviceplugin.Device
	for i := range all {
		d := &all[i]
		if d.Kind == inventory.KindRDMA && d.PCI != "" {
			continue
		}
		x := deviceplugin.Device{ID: d.ID, VF: d.Kind == inventory.KindVF, NUMANode: d.NUMANode, Rail: d.Rail, PF: d.PFPCI}
		if len(d.RDMA) > 0 {
			x.RDMA = d.RDMA[0]
		}
		if x.Rail < 0 { // not known
			x.Rail = ownRail + i
		}
		x.Why = unfit(d)
		out = append(out, x)
	}
	return out
}

// unfit is why a device cannot be given to a pod; "" if it can. A VF that a pod has
// stays fit: kubelet knows that the VF is taken.
func unfit(d *inventory.Device) string {
	switch {
	case !d.Up && d.Kind == inventory.KindVF:
		return fmt.Sprintf("it is %s, or the port of its PF %s is down", d.State, d.PF)
	case !d.Up:
		return "its port is down"
	case d.Kind == inventory.KindVF && len(d.RDMA) == 0 && d.State != vf.StatePod: // in a pod it may be out of sight
		return "it has no RDMA device: RDMA of its driver is not loaded, or is not enabled for VFs"
	case d.Shared() && d.Owner != nil:
		return fmt.Sprintf("pod %s/%s has it for itself", d.Owner.Pod.Namespace, d.Owner.Pod.Name)
	}
	return ""
}
