// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// device is an RNIC that stacks run on: open, or missing.
type device struct {
	name   string
	cfg    config.Device
	opener func() (rdma.Device, func() error, error)
	unkeep func() // ends what looks after one that is not the node's

	// guarded by devices.mu
	own   *ownDevice  // nil: it is the node's; the latest that is known
	inPod bool        // its network interface is
	users int         // pods that have it, if it is not the node's
	open  rdma.Device // nil: it is missing
	close func() error
	err   error // why it is missing
	since time.Time
}

// devices are the RNICs of the agent. A device of the kernel may be gone at any
// time, and come back.
type devices struct {
	mu   sync.Mutex // guards what is below, and what its devices say
	node []*device  // in the order of the configuration
	pods []*device  // that pods have for themselves, as long as they do
	// came counts the devices that were opened after the start.
	came uint64
	// opening are the IDs of the pods' devices that are being opened; closed
	// when that is over.
	opening map[string]chan struct{}
}

// turn waits until nobody opens a device of this ID for a pod, and keeps others
// from it until end is called.
func (ds *devices) turn(id string) (end func()) {
	for {
		ds.mu.Lock()
		other := ds.opening[id]
		if other == nil {
			break
		}
		ds.mu.Unlock()
		<-other
	}
	defer ds.mu.Unlock()
	mine := make(chan struct{})
	if ds.opening == nil {
		ds.opening = map[string]chan struct{}{}
	}
	ds.opening[id] = mine
	return func() {
		ds.mu.Lock()
		defer ds.mu.Unlock()
		delete(ds.opening, id)
		close(mine)
	}
}

// deviceNow is a device as it was a moment ago.
type deviceNow struct {
	name  string
	cfg   config.Device
	own   *ownDevice // nil: it is the node's
	inPod bool
	open  rdma.Device
	err   error
	since time.Time
}

// now are the devices of a set, of the node if it is nil.
func (ds *devices) now(set *deviceSet) []deviceNow {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	out := nowOf(ds.of(set))
	for i := range out {
		if out[i].own == nil && set != nil {
			own := set.want[i] // one of the node's
			out[i].own = &own
		}
	}
	return out
}

// all are the node's devices and those of pods.
func (ds *devices) all() []deviceNow {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return nowOf(slices.Concat(ds.node, ds.pods))
}

func nowOf(from []*device) []deviceNow {
	out := make([]deviceNow, 0, len(from))
	for _, d := range from {
		out = append(out, deviceNow{d.name, d.cfg, d.own, d.inPod, d.open, d.err, d.since})
	}
	return out
}

func (ds *devices) of(set *deviceSet) []*device {
	if set == nil {
		return ds.node
	}
	return set.devices
}

// usable are the open ones of a set, and how many came after the start.
func (ds *devices) usable(set *deviceSet) (open []rdma.Device, came uint64) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	for _, d := range ds.of(set) {
		if d.open != nil {
			open = append(open, d.open)
		}
	}
	return open, ds.came
}

// note says that a device has come.
func (ds *devices) note() {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	ds.came++
}

func (ds *devices) get(d *device) rdma.Device {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return d.open
}

// drop closes a device; why is nil if the agent ends.
func (ds *devices) drop(d *device, why error) error {
	ds.mu.Lock()
	stop := d.close
	d.open, d.close, d.err, d.since = nil, nil, why, time.Now()
	ds.mu.Unlock()
	if stop == nil {
		return nil
	}
	return stop()
}

func (ds *devices) close() error {
	var err error
	for _, d := range ds.node {
		err = errors.Join(err, ds.drop(d, nil))
	}
	return err
}

// openDevices opens all that are configured, or fails: an agent that started
// without one of them would be redundant on paper only. With Stay it goes on
// with those that there are, and tells about the others. A device whose port is
// down opens all the same.
func (a *agent) openDevices(ctx context.Context) error {
	for i, cfg := range a.cfg.Node.Devices {
		d := &device{name: config.DeviceName(i, cfg), cfg: cfg, since: time.Now()}
		d.opener = func() (rdma.Device, func() error, error) {
			return a.cfg.openDevice(d.name, cfg, a.cfg.Node.Takeover)
		}
		err := a.openDevice(d)
		for said := false; errors.Is(err, soft.ErrShared); said = true {
			if !said {
				a.cfg.Log.Info("waiting for the end of one of the two agents before this one", "device", cfg.String())
			}
			if !wait(ctx, sharePoll) {
				break
			}
			err = a.openDevice(d)
		}
		if err != nil {
			err = fmt.Errorf("open RDMA device node.devices[%d], %v: %w", i, cfg, err)
			if !a.cfg.Stay || ctx.Err() != nil {
				return err
			}
			a.cfg.Log.Warn("device left out", "err", err)
			d.err = err
		}
		a.devices.mu.Lock()
		a.devices.node = append(a.devices.node, d)
		a.devices.mu.Unlock()
	}
	return nil
}

func (a *agent) openDevice(d *device) error {
	dev, stop, err := d.opener()
	if err != nil {
		return err
	}
	a.devices.mu.Lock()
	d.open, d.close, d.err, d.since = dev, stop, nil, time.Now()
	a.devices.mu.Unlock()
	return nil
}

// incapable is why nothing can be on SMC-R now with a set of devices, nil being
// the node's: since the start, or because all of them are gone. Its code is
// empty if something can.
func (a *agent) incapable(set *deviceSet) unable {
	if a.unable.code != "" {
		return a.unable
	}
	code, why := agentapi.CodeOf(clc.ReasonNoDev), errors.New("no RDMA device is open")
	if set != nil {
		code = agentapi.CodePodDevice
	} else if len(a.devices.node) == 0 {
		why = errors.New("the node has no RDMA device for all pods (node.devices is empty), and the pod has none for itself")
	}
	for _, d := range slices.Backward(a.devices.now(set)) {
		if d.open != nil {
			return unable{}
		}
		if d.err != nil {
			why = d.err // the first one's
		}
	}
	return unable{why.Error(), code}
}

// idle is why nothing at all can be on SMC-R on this node now.
func (a *agent) idle() unable {
	lack := a.incapable(nil)
	if a.unable.code == "" && slices.ContainsFunc(a.devices.all(), func(d deviceNow) bool { return d.open != nil }) {
		return unable{}
	}
	return lack
}
