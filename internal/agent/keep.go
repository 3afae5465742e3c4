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

// equip gives the stacks the devices that came while they ran.
func (m *manager) equip() {
	_, came := m.a.devices.usable(nil)
	if came == m.equipped {
		return
	}
	var errs []error
	m.a.eachStack(func(u stackUse) {
		open, _ := m.a.devices.usable(u.set)
		for _, d := range open {
			if err := u.stack.AddDevice(d); err != nil {
				errs = append(errs, fmt.Errorf("pod %s: %w", u.pod, err))
			}
		}
	})
	err := errors.Join(errs...)
	if err == nil {
		m.equipped, m.equipErr = came, ""
		m.forgetBypasses()
		return
	}
	if text := err.Error(); text != m.equipErr { // it is tried again every second
		m.equipErr = text
		m.a.cfg.Log.Warn("RDMA device not used by all pods yet", "err", err)
	}
}

// forgetBypasses lets destinations be tried that were left alone for want of a
// device.
func (m *manager) forgetBypasses() {
	for _, p := range m.snapshot() {
		if p.run == nil {
			continue
		}
		if err := p.run.redirect.Forget(); err != nil {
			p.run.log.Debug("negative cache not emptied; its entries end by themselves", "err", err)
			continue
		}
		m.a.bypasses.forget(podOf(p.atts[0]).String())
	}
}
