// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// Change is what happened to a device. It is the label of a metric.
type Change string

// Changes of a device.
const (
	Gone     Change = "gone"
	Back     Change = "back"
	PortUp   Change = "port_active"
	PortDown Change = "port_down"
	GIDTable Change = "gid_table"
)

func (p *Pool) changed(d *device, c Change) {
	if p.cfg.Changed != nil {
		p.cfg.Changed(d.name, c)
	}
}

// Monitor closes devices when they are gone, and opens them when they are back, until stop is
// called. That includes devices that pods get later.
func (p *Pool) Monitor(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	p.mu.Lock()
	p.monitoring = true
	p.mu.Unlock()
	var wg sync.WaitGroup
	for _, d := range p.nodeDevices() {
		wg.Go(func() { p.monitor(ctx, d) })
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

// monitor closes a device at once when it is gone, since its driver may wait for that, and opens it
// again when it is back. It does the same with a device that has to be opened again. The owners of stacks notice by Set.Usable.
func (p *Pool) monitor(ctx context.Context, d *device) {
	pause := p.cfg.LookEvery
	for ctx.Err() == nil {
		if dev := p.get(d); dev != nil {
			if d.cfg.Soft() {
				return // a software device is never gone
			}
			err := p.watch(ctx, d, dev)
			if ctx.Err() != nil {
				return
			}
			p.lose(d, err)
			pause = p.cfg.LookEvery
			continue
		}
		if !sleep(ctx, pause) {
			return
		}
		if d.own == nil { // the pause before a pod's own device does not grow: its pod waits
			pause = min(2*pause, p.cfg.LookMost)
		}
		err := p.openDevice(d)
		if err != nil && d.own != nil {
			p.mu.Lock()
			d.err = d.unusable(err)
			p.mu.Unlock()
		}
		if err == nil {
			p.mu.Lock()
			p.openCount++
			p.mu.Unlock()
			p.changed(d, Back)
			p.cfg.Log.Info("RDMA device is there", "device", d.name)
		}
	}
}

// lose closes a device that is gone, or that has to be opened again.
func (p *Pool) lose(d *device, err error) {
	p.changed(d, Gone)
	why := fmt.Errorf("RDMA device %s: %w", d.name, err)
	if errors.Is(err, errReopen) {
		p.cfg.Log.Warn("RDMA device is opened again; its links end, and connections without another one are reset", "device", d.name, "err", err)
	} else {
		p.cfg.Log.Warn("RDMA device is gone; its links end, and connections without another one are reset", "device", d.name, "err", err)
		why = fmt.Errorf("RDMA device %s is gone: %w: it is used again when it is back", d.name, err)
	}
	if err := p.closeDevice(d, why); err != nil {
		p.cfg.Log.Warn("device that is gone not closed in order", "device", d.name, "err", err)
	}
}

// watch logs the events of a device until it is gone, or has to be opened again. The error says why.
func (p *Pool) watch(ctx context.Context, d *device, dev rdma.Device) error {
	c, err := dev.Open()
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // it has only the events
	var look <-chan time.Time        // no event tells that an interface moved
	if own, _ := p.placeOf(d); own.LookUp {
		t := time.NewTicker(p.cfg.LookEvery)
		defer t.Stop()
		look = t.C
	}
	for {
		if err := p.outdated(d, dev); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-look:
		case ev, ok := <-c.Events():
			switch {
			case !ok:
				return rdma.ErrClosed
			case ev.Kind == rdma.EventDeviceFatal && ev.Err != nil:
				return ev.Err
			case ev.Kind == rdma.EventDeviceFatal:
				return rdma.ErrClosed
			}
			p.logEvent(d, dev, ev.Kind)
		}
	}
}

// logEvent logs and counts an event after which the device still works.
func (p *Pool) logEvent(d *device, dev rdma.Device, kind rdma.EventKind) {
	switch kind {
	case rdma.EventPortActive:
		p.changed(d, PortUp)
		p.cfg.Log.Info("port of RDMA device is active", "device", d.name)
	case rdma.EventPortDown:
		p.changed(d, PortDown)
		p.cfg.Log.Warn("port of RDMA device is down; its connections move to another link if there is one", "device", d.name)
	case rdma.EventGIDChange:
		p.changed(d, GIDTable)
		p.cfg.Log.Info("GID table of RDMA device changed", "device", d.name, "address", address(dev))
	case rdma.EventQPFatal, rdma.EventPathDown, rdma.EventDeviceFatal, rdma.EventDisconnected: // stacks get these, too, and act on them
	}
}

// sleep waits for d and returns true, or returns false when ctx ends.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
