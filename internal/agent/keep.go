// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// keepDevices looks after the devices until ctx ends. What the agent lacked at
// its start is awaitAble's.
func (a *agent) keepDevices(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	if a.unable.code == "" {
		for _, d := range a.devices.node {
			wg.Go(func() { a.keepDevice(ctx, d) })
		}
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// keepDevice closes a device at once when it is gone, which its driver may be
// waiting for, and opens it again when it is back. The manager then gives it to
// the stacks.
func (a *agent) keepDevice(ctx context.Context, d *device) {
	pause := a.cfg.deviceEvery
	for ctx.Err() == nil {
		if dev := a.devices.get(d); dev != nil {
			if d.cfg.Soft() {
				return // software is never gone
			}
			err := a.watchDevice(ctx, d, dev)
			if ctx.Err() != nil {
				return
			}
			a.metrics.deviceChanges.WithLabelValues(d.name, changeGone).Inc()
			a.cfg.Log.Warn("RDMA device is gone; its links end, and connections without another one are reset", "device", d.name, "err", err)
			if err := a.devices.drop(d, fmt.Errorf("RDMA device %s is gone: %w: it is used again when it is back", d.name, err)); err != nil {
				a.cfg.Log.Warn("device that is gone not closed in order", "device", d.name, "err", err)
			}
			pause = a.cfg.deviceEvery
			continue
		}
		if !wait(ctx, pause) {
			return
		}
		if d.own == nil { // pods wait for theirs
			pause = min(2*pause, a.cfg.ableEvery)
		}
		err := a.openDevice(d)
		if err != nil && d.own != nil {
			a.devices.mu.Lock()
			d.err = d.unusable(err)
			a.devices.mu.Unlock()
		}
		if err == nil {
			a.devices.note()
			a.metrics.deviceChanges.WithLabelValues(d.name, changeBack).Inc()
			a.cfg.Log.Info("RDMA device is there", "device", d.name)
		}
	}
}

// watchDevice tells of what happens to a device, until it is gone.
func (a *agent) watchDevice(ctx context.Context, d *device, dev rdma.Device) error {
	c, err := dev.Open()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // nothing was made of it
	for {
		select {
		case <-ctx.Done():
			return nil
		case ev, ok := <-c.Events():
			switch {
			case !ok:
				return rdma.ErrClosed
			case ev.Kind == rdma.EventDeviceFatal && ev.Err != nil:
				return ev.Err
			case ev.Kind == rdma.EventDeviceFatal:
				return rdma.ErrClosed
			}
			a.noteDevice(d, dev, ev.Kind)
		}
	}
}

// noteDevice records an event that the device survives.
func (a *agent) noteDevice(d *device, dev rdma.Device, kind rdma.EventKind) {
	count := func(change string) { a.metrics.deviceChanges.WithLabelValues(d.name, change).Inc() }
	switch kind {
	case rdma.EventPortActive:
		count(changeUp)
		a.cfg.Log.Info("port of RDMA device is active", "device", d.name)
	case rdma.EventPortDown:
		count(changeDown)
		a.cfg.Log.Warn("port of RDMA device is down; its connections move to another link if there is one", "device", d.name)
	case rdma.EventGIDChange:
		count(changeGID)
		a.cfg.Log.Info("GID table of RDMA device changed", "device", d.name, "address", deviceAddress(dev))
	case rdma.EventQPFatal, rdma.EventPathDown, rdma.EventDeviceFatal: // the stacks'
	}
}

// What happens to a device, as a label of the metric.
const (
	changeGone = "gone"
	changeBack = "back"
	changeUp   = "port_active"
	changeDown = "port_down"
	changeGID  = "gid_table"
)

// deviceAddress is the address that links of version 2 have at a device; ""
// without one.
func deviceAddress(dev rdma.Device) string {
	for _, g := range dev.GIDs() {
		if g.Type == rdma.GIDTypeRoCEv2 {
			return g.GID.Addr().String()
		}
	}
	return ""
}

// equip gives a pod's stack the devices that came while it ran.
func (m *manager) equip(p *pod) {
	open, came := m.a.devices.usable(p.set)
	if came == p.equipped {
		return
	}
	if err := addDevices(p.run.stack, open); err != nil {
		if text := err.Error(); text != p.equipErr { // it is tried again every second
			p.equipErr = text
			p.run.log.Warn("RDMA device not used by the pod yet", "err", err)
		}
		return
	}
	p.equipped, p.equipErr = came, ""
	// Destinations may be tried that were left alone for want of a device.
	if err := p.run.redirect.Forget(); err != nil {
		p.run.log.Debug("negative cache not emptied; its entries end by themselves", "err", err)
		return
	}
	m.a.bypasses.forget(podOf(p.atts[0]).String())
}

func addDevices(s stack, open []rdma.Device) error {
	var errs []error
	for _, d := range open {
		errs = append(errs, s.AddDevice(d))
	}
	return errors.Join(errs...)
}
