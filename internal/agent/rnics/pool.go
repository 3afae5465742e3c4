// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

// Config is what a pool needs.
type Config struct {
	Log *slog.Logger
	// Open opens a device of the node. It returns soft.ErrShared while two other agents have the
	// device open.
	Open func(name string, cfg config.Device) (rdma.Device, func() error, error)
	// OpenOwn opens a pod's own device; in is nil if the pod's namespace could not be opened.
	OpenOwn func(d *Own, in Namespace) (rdma.Device, func() error, error)
	// Learn completes a device of which only the ID is known.
	Learn func(d Own) (Own, error)
	// InPod reports whether a device's interface is in the pod's namespace. Nil means Own.InPod.
	InPod func(d *Own) bool
	// Changed, if given, is called for each change of a device.
	Changed func(device string, c Change)
	// Stay makes Open go on without devices that are missing.
	Stay bool
	// LookEvery is the pause before a missing device is opened again. For a device of the node the
	// pause doubles up to LookMost. Zero means 1 s and 10 s.
	LookEvery, LookMost time.Duration
}

// Pool has the RNICs of an agent.
type Pool struct {
	cfg  Config
	near func(numaNode int) bool // whether the agent may use a processor of a NUMA node

	mu   sync.Mutex // guards what is below, and fields of device
	node []*device  // in the order of the configuration
	pods []*device  // pods' own devices that are in use
	// openCount is how often a device was opened after the start.
	openCount uint64
	// monitoring: Monitor was called.
	monitoring bool
	// opening has the IDs of the own devices that are being opened. A channel is closed when its
	// device was.
	opening map[string]chan struct{}
}

// NewPool returns a pool without devices.
func NewPool(cfg Config) *Pool {
	if cfg.LookEvery == 0 {
		cfg.LookEvery = lookEvery
	}
	if cfg.LookMost == 0 {
		cfg.LookMost = lookMost
	}
	if cfg.InPod == nil {
		cfg.InPod = (*Own).InPod
	}
	return &Pool{cfg: cfg, near: nearNodes()}
}

// Open opens all of the node's devices, or fails: an agent that started without one of them would
// be redundant on paper only. With Config.Stay, Open goes on without those that are missing, and
// logs them. A device whose port is down can be opened, too.
func (p *Pool) Open(ctx context.Context, all []config.Device) error {
	for i, cfg := range all {
		d := &device{name: config.DeviceName(i, cfg), cfg: cfg, since: time.Now()}
		d.opener = func() (rdma.Device, func() error, error) { return p.cfg.Open(d.name, cfg) }
		err := p.openDevice(d)
		for said := false; errors.Is(err, soft.ErrShared); said = true {
			if !said {
				p.cfg.Log.Info("waiting for the end of one of the two agents before this one", "device", cfg.String())
			}
			if !sleep(ctx, sharePoll) {
				break
			}
			err = p.openDevice(d)
		}
		if err != nil {
			err = fmt.Errorf("open RDMA device node.devices[%d], %v: %w", i, cfg, err)
			if !p.cfg.Stay || ctx.Err() != nil {
				return err
			}
			p.cfg.Log.Warn("device left out", "err", err)
			d.err = err
		}
		p.mu.Lock()
		p.node = append(p.node, d)
		p.mu.Unlock()
	}
	return nil
}

// Close closes the node's devices. Pods' own devices are closed with their sets.
func (p *Pool) Close() error {
	var err error
	for _, d := range p.nodeDevices() {
		err = errors.Join(err, p.closeDevice(d, nil))
	}
	return err
}

// CanOpen reports whether one of the node's devices is open, or can be opened now.
func (p *Pool) CanOpen() bool {
	for _, d := range p.nodeDevices() {
		if p.get(d) != nil {
			return true
		}
		if _, stop, err := d.opener(); err == nil && stop() == nil {
			return true
		}
	}
	return false
}

// All are the node's devices and pods' own devices.
func (p *Pool) All() []State {
	p.mu.Lock()
	defer p.mu.Unlock()
	return statesOf(slices.Concat(p.node, p.pods))
}

func statesOf(from []*device) []State {
	out := make([]State, 0, len(from))
	for _, d := range from {
		out = append(out, d.state())
	}
	return out
}

func (p *Pool) nodeDevices() []*device {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.node)
}

func (p *Pool) openDevice(d *device) error {
	dev, stop, err := d.opener()
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	d.open, d.close, d.err, d.since = dev, stop, nil, time.Now()
	return nil
}

// get is the open device; nil if it is missing.
func (p *Pool) get(d *device) rdma.Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	return d.open
}

// closeDevice closes a device. why says why it is missing from now on; nil if nobody needs it any
// more.
func (p *Pool) closeDevice(d *device, why error) error {
	p.mu.Lock()
	stop := d.close
	d.open, d.close, d.err, d.since = nil, nil, why, time.Now()
	p.mu.Unlock()
	if stop == nil {
		return nil
	}
	return stop()
}

// openForPod returns a pod's own device: one that is open already, or a new one. If it cannot be
// opened, its monitor tries again until the device is given back.
func (p *Pool) openForPod(ctx context.Context, in Namespace, own Own) *device {
	if d := p.findNodeDevice(&own); d != nil {
		return d
	}
	defer p.lockID(own.ID)() // of two pods that want it at once, the second one finds it with findShared
	if d := p.findShared(&own); d != nil {
		return d
	}
	d := &device{name: own.ID, own: &own, cfg: config.Device{RDMA: own.ID}, users: 1}
	d.opener = func() (rdma.Device, func() error, error) {
		now := own
		if own.LookUp {
			var err error
			if now, err = p.cfg.Learn(own); err != nil {
				return nil, nil, err
			}
		}
		inPod := p.cfg.InPod(&now)
		p.mu.Lock()
		d.own, d.inPod = &now, inPod
		p.mu.Unlock()
		return p.cfg.OpenOwn(&now, in)
	}
	if err := p.openDevice(d); err != nil {
		d.err = d.unusable(err)
		p.cfg.Log.Warn("device of a pod not opened; it is tried again", "pod", own.Pod, "err", d.err)
	}
	p.mu.Lock()
	p.pods = append(p.pods, d)
	keeping := p.monitoring
	p.mu.Unlock()
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	if keeping {
		wg.Go(func() { p.monitor(life, d) })
	}
	d.stopMonitor = func() {
		cancel()
		wg.Wait()
	}
	return d
}

// lockID locks the opening of own devices with an ID, until end is called.
func (p *Pool) lockID(id string) (end func()) {
	for {
		p.mu.Lock()
		other := p.opening[id]
		if other == nil {
			break
		}
		p.mu.Unlock()
		<-other
	}
	defer p.mu.Unlock()
	mine := make(chan struct{})
	if p.opening == nil {
		p.opening = map[string]chan struct{}{}
	}
	p.opening[id] = mine
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.opening, id)
		close(mine)
	}
}

// findShared finds an open device of the host that another pod has, too, and adds a user.
func (p *Pool) findShared(own *Own) *device {
	if own.moves() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.pods {
		if d.own.ID == own.ID && d.open != nil && !d.inPod {
			d.users++
			return d
		}
	}
	return nil
}

// findNodeDevice finds own among the node's devices; nil if it is none of them.
func (p *Pool) findNodeDevice(own *Own) *device {
	for _, d := range p.nodeDevices() {
		if d.name == own.ID || !d.cfg.Soft() && !own.moves() && slices.Contains(own.RDMA, d.cfg.RDMA) {
			return d
		}
	}
	return nil
}

// giveBack ends the use of a device by one pod, and closes it if that was the last.
func (p *Pool) giveBack(d *device) error {
	p.mu.Lock()
	d.users--
	last := d.own != nil && d.users == 0 // the node's devices stay open
	if last {
		p.pods = slices.DeleteFunc(p.pods, func(o *device) bool { return o == d })
	}
	p.mu.Unlock()
	if !last {
		return nil
	}
	d.stopMonitor()
	return p.closeDevice(d, nil)
}
