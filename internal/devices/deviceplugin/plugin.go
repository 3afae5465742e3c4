// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/devices/deviceinfo"
	"github.com/smcr-io/kube-smcr/internal/files"
)

// Config says how to offer devices.
type Config struct {
	// Dir is kubelet's directory of device plugins, as this process sees it. It may
	// appear later. Required, as are Lock, Devices and Log.
	Dir string
	// Lock is the path of a file. If several agents run on the node, the plugin of only
	// one of them has the lock on it.
	Lock string
	// InfoDir is the directory for device information files; "": none are written.
	InfoDir string
	// Slots is how many pods may share a device that is no VF.
	Slots int
	// VFs makes VFs a resource as well.
	VFs bool
	// Devices returns the devices of the node. It must not block.
	Devices func() ([]Device, error)
	// Changed gets a value when the result of Devices has changed; nil: Devices is called
	// once a second only.
	Changed <-chan struct{}
	// Metrics are the metrics to count in; nil: none.
	Metrics *Metrics
	Log     *slog.Logger
}

// Plugin offers the devices of a node to kubelet.
type Plugin struct {
	cfg       Config
	resources []*resource

	// Owned by the loop of Run.
	said     string    // the error that was logged last
	informed []Device  // the devices that the device information files are about; nil: write all files
	warned   time.Time // when it was last logged that the files are not written; zero: they are written
}

// New makes a plugin.
func New(cfg Config) (*Plugin, error) {
	if cfg.Dir == "" || cfg.Lock == "" || cfg.Devices == nil || cfg.Log == nil {
		return nil, errors.New("device plugin: Dir, Lock, Devices and Log are required")
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics()
	}
	p := &Plugin{cfg: cfg}
	p.resources = append(p.resources, newResource(&p.cfg, ResourceShared, "smcr-roce.sock"))
	if cfg.VFs {
		p.resources = append(p.resources, newResource(&p.cfg, ResourceVF, "smcr-roce-vf.sock"))
	}
	return p, nil
}

// Run offers the devices until ctx ends. Only one plugin of the node does so at a time: Run
// waits until an earlier one has ended. Run may be called again after it returned.
func (p *Plugin) Run(ctx context.Context) {
	unlock, err := p.lock(ctx)
	if err != nil {
		if ctx.Err() == nil {
			p.cfg.Log.Error("devices are not offered to kubelet", "err", err)
		}
		return
	}
	defer unlock()
	p.update()
	var wg sync.WaitGroup
	for _, r := range p.resources {
		wg.Go(func() { r.run(ctx) })
	}
	p.follow(ctx)
	wg.Wait()
	if p.cfg.InfoDir != "" {
		if err := deviceinfo.RemoveOthers(p.cfg.InfoDir, ResourceVF, func(string) bool { return false }); err != nil {
			p.cfg.Log.Warn("device information files not removed", "err", err)
		}
		p.informed = nil
	}
}

// follow keeps the offers in line with the devices.
func (p *Plugin) follow(ctx context.Context) {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.cfg.Changed:
		}
		p.update()
	}
}

// update offers the present devices. If they cannot be found out, the offer stays as it is.
func (p *Plugin) update() {
	all, err := p.cfg.Devices()
	if err != nil {
		if text := err.Error(); text != p.said {
			p.said = text
			p.cfg.Log.Warn("devices not listed; kubelet keeps the last list", "err", err)
		}
		return
	}
	p.said = ""
	for _, r := range p.resources {
		o := newOffer(all, r.name == ResourceVF, p.cfg.Slots)
		if r.name == ResourceVF && p.cfg.InfoDir != "" {
			p.writeInfos(o.devices)
		}
		r.publish(o)
	}
}

// writeInfos brings the device information files in line with the VFs. After an error it writes all
// files at the next call.
func (p *Plugin) writeInfos(now []Device) {
	if p.informed != nil && slices.Equal(p.informed, now) {
		return
	}
	var errs []error
	for _, d := range now {
		if !slices.Contains(p.informed, d) {
			errs = append(errs, deviceinfo.Write(deviceinfo.Path(p.cfg.InfoDir, ResourceVF, d.ID), deviceinfo.PCI{Address: d.ID, PF: d.PF, RDMA: d.RDMA}))
		}
	}
	errs = append(errs, deviceinfo.RemoveOthers(p.cfg.InfoDir, ResourceVF, func(id string) bool {
		return slices.ContainsFunc(now, func(d Device) bool { return d.ID == id })
	}))
	if err := errors.Join(errs...); err != nil {
		p.informed = nil
		if time.Since(p.warned) >= complainEvery {
			p.warned = time.Now()
			p.cfg.Log.Warn("device information not written, tried again; Multus does not show the devices in the pods' network status", "err", err)
		}
		return
	}
	p.informed, p.warned = append([]Device{}, now...), time.Time{}
}

// lock waits until no other plugin has the lock. The kernel releases the lock when the
// process ends; unlock also removes its file.
func (p *Plugin) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(p.cfg.Lock), 0o755); err != nil {
		return nil, fmt.Errorf("lock of the device plugin: %w", err)
	}
	l, err := files.LockWithin(ctx, p.cfg.Lock)
	if err != nil {
		return nil, fmt.Errorf("lock of the device plugin %s: %w", p.cfg.Lock, err)
	}
	return func() { _ = l.Remove() }, nil // after an error the lock ends with the process
}
