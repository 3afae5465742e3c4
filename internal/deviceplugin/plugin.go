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
	"syscall"
	"time"
)

// Config says how to offer devices.
type Config struct {
	// Dir is kubelet's directory of device plugins, as this process sees it. It
	// may come later. Required, as are Lock, Devices and Log.
	Dir string
	// Lock is a file that plugins of several agents of the node hold in turn.
	Lock string
	// InfoDir is where device information files go; "" for none.
	InfoDir string
	// Slots is how many pods may share a device that is no VF.
	Slots int
	// VFs makes VFs a resource as well.
	VFs bool
	// Devices are those of the node now. It must be quick.
	Devices func() ([]Device, error)
	// Changed, if given, tells when Devices is to be called, besides once a
	// second. It may have room for one.
	Changed <-chan struct{}
	// Metrics, if given, counts.
	Metrics *Metrics
	Log     *slog.Logger
}

// Plugin offers the devices of a node to kubelet.
type Plugin struct {
	cfg       Config
	resources []*resource
	said      string // why the devices were not known last; owned by the loop of Run
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

// Run offers the devices until ctx ends. Only one plugin of the node does so at
// a time: Run waits for an earlier one to end. It may be called again then.
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
		if err := removeInfos(p.cfg.InfoDir, ResourceVF, func(string) bool { return false }); err != nil {
			p.cfg.Log.Warn("device information files are left", "err", err)
		}
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

// update offers what is there now. Devices that are not known stay as they were.
func (p *Plugin) update() {
	all, err := p.cfg.Devices()
	if err != nil {
		if text := err.Error(); text != p.said {
			p.said = text
			p.cfg.Log.Warn("devices not looked at; kubelet keeps what it knows", "err", err)
		}
		return
	}
	p.said = ""
	for _, r := range p.resources {
		o := newOffer(all, r.name == ResourceVF, p.cfg.Slots)
		if r.name == ResourceVF && p.cfg.InfoDir != "" {
			p.writeInfos(r.offered(), o)
		}
		r.publish(o)
	}
}

// writeInfos brings the device information files in line with the VFs.
func (p *Plugin) writeInfos(old, now offer) {
	if old.devices != nil && old.equal(now) {
		return
	}
	var errs []error
	for _, d := range now.devices {
		if !slices.Contains(old.devices, d) {
			errs = append(errs, writeInfo(p.cfg.InfoDir, ResourceVF, d))
		}
	}
	errs = append(errs, removeInfos(p.cfg.InfoDir, ResourceVF, func(id string) bool {
		return slices.ContainsFunc(now.devices, func(d Device) bool { return d.ID == id })
	}))
	if err := errors.Join(errs...); err != nil {
		p.cfg.Log.Warn("device information not written: Multus does not show it at pods", "err", err)
	}
}

// lock waits until no other plugin has the lock: a file that its holder removes.
// The kernel gives it back with the process.
func (p *Plugin) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(p.cfg.Lock), 0o755); err != nil {
		return nil, fmt.Errorf("lock of the device plugin: %w", err)
	}
	for {
		f, err := p.tryLock()
		if f != nil {
			return func() {
				_ = os.Remove(p.cfg.Lock) // before somebody has it who waits, and sees that
				_ = f.Close()
			}, nil
		}
		if err == nil && !wait(ctx, lockPoll) {
			err = ctx.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("lock of the device plugin %s: %w", p.cfg.Lock, err)
		}
	}
}

// tryLock returns the locked file, or nothing if another plugin has it.
func (p *Plugin) tryLock() (*os.File, error) {
	f, err := os.OpenFile(p.cfg.Lock, os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		var held os.FileInfo
		if held, err = f.Stat(); err == nil && stands(held, p.cfg.Lock) {
			return f, nil
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = nil
	}
	return nil, errors.Join(err, f.Close())
}

// wait waits, or returns false when ctx ends.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
