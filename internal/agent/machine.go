// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
	"github.com/smcr-io/kube-smcr/pkg/smcr/synopt"
)

// device is an open RNIC and what is configured for it.
type device struct {
	rdma.Device
	cfg   config.Device
	close func() error
}

// openDevices opens all that are configured, or fails: an agent that started
// without one of them would be redundant on paper only. A device whose port is
// down opens all the same.
func (a *agent) openDevices() error {
	for i, cfg := range a.cfg.Node.Devices {
		dev, stop, err := a.cfg.openDevice(deviceName(i, cfg), cfg)
		if err != nil {
			return fmt.Errorf("open RDMA device node.devices[%d], %v: %w", i, cfg, err)
		}
		a.devices = append(a.devices, device{dev, cfg, stop})
	}
	return nil
}

func (a *agent) closeDevices() error {
	var err error
	for _, d := range a.devices {
		err = errors.Join(err, d.close())
	}
	return err
}

// deviceName is the name of a device in answers and logs.
func deviceName(i int, cfg config.Device) string {
	if cfg.Soft() {
		return fmt.Sprintf("soft%d", i)
	}
	return cfg.RDMA
}

// openDevice picks the provider. This is the only place that knows providers.
func openDevice(name string, cfg config.Device) (rdma.Device, func() error, error) {
	if !cfg.Soft() {
		return nil, nil, errors.New("this build has no provider for RDMA devices of the kernel: use soft")
	}
	var mtu rdma.MTU // 0: what fits the interface
	for m := rdma.MTU256; m <= rdma.MTU4096; m++ {
		if m.Bytes() == cfg.SoftMTU {
			mtu = m
		}
	}
	d, err := soft.Open(soft.Config{Name: name, Addr: cfg.SoftAddress, MTU: mtu})
	if err != nil {
		return nil, nil, err
	}
	return d, d.Close, nil
}

// route asks how the devices, which are in the agent's own namespace, reach a
// peer's.
func route(src, dst netip.Addr) (clc.Route, error) {
	r, err := linux.RouteTo(src, dst)
	out := clc.Route{Found: r.Found, Gateway: r.Gateway}
	copy(out.MAC[:], r.MAC)
	return out, err
}

// openOption attaches the program that writes the TCP option.
func openOption() (smcr.Option, func() error, error) {
	o, err := synopt.Open(synopt.Config{Mark: markWire})
	if err != nil {
		return nil, nil, err
	}
	return o, o.Close, nil
}
