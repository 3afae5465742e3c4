// SPDX-License-Identifier: Apache-2.0

package rnics

import (
	"cmp"
	"fmt"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
)

// device is an RNIC that stacks use: open, or missing.
type device struct {
	name        string
	cfg         config.Device
	opener      func() (rdma.Device, func() error, error)
	stopMonitor func() // ends the device's monitor; not used for devices of the node

	// guarded by Pool.mu:
	own   *Own        // what is known of the pod's device now; nil: a device of the node
	inPod bool        // the device's network interface is in the pod's namespace
	users int         // pods that use a pod's own device
	open  rdma.Device // nil: the device is missing
	close func() error
	err   error // why the device is missing
	since time.Time
}

func (d *device) state() State {
	return State{Name: d.name, Config: d.cfg, Own: d.own, InPod: d.inPod, Open: d.open, Err: d.err, Since: d.since}
}

// unusable says why a pod's device cannot be used.
func (d *device) unusable(err error) error {
	return fmt.Errorf("device %s of pod %s cannot be used: %w", d.own.ID, d.own.Pod, err)
}

// State is a device at one moment.
type State struct {
	Name   string
	Config config.Device
	Own    *Own        // nil: no pod has it for itself
	InPod  bool        // its network interface is in a pod's namespace
	Open   rdma.Device // nil: it is missing
	Err    error       // why it is missing
	Since  time.Time   // of being open, or missing
}

// Info describes the device for the API.
func (d *State) Info() agentapi.Device {
	x := agentapi.Device{Name: d.Name, Provider: "verbs", Port: rdma.PortDown.String(), Since: d.Since}
	x.Interface = d.Config.Interface
	if d.Config.Soft() {
		x.Provider = "soft"
		if d.Config.SoftAddress.IsValid() {
			x.Address = d.Config.SoftAddress.String()
		}
	} else if d.Config.GIDAddress.IsValid() {
		x.Address = d.Config.GIDAddress.String()
	}
	if d.Err != nil {
		x.Missing = d.Err.Error()
	}
	if d.Open == nil {
		return x
	}
	port, table := d.Open.Port(), d.Open.GIDs()
	x.Provider, x.MTU, x.Port = d.Open.Attr().Provider, port.ActiveMTU.Bytes(), port.State.String()
	x.Address = cmp.Or(address(d.Open), x.Address)
	x.Interface = "" // the interface of the address counts, not that of the configuration
	for _, g := range table {
		x.Interface = cmp.Or(x.Interface, g.NetDev)
	}
	if c, ok := d.Open.(interface{ GIDChoice() string }); ok {
		x.Choice = c.GIDChoice()
	}
	return x
}

// address is the RoCEv2 address of a device; "" if it has none.
func address(dev rdma.Device) string {
	for _, g := range dev.GIDs() {
		if g.Type == rdma.GIDTypeRoCEv2 {
			return g.GID.Addr().String()
		}
	}
	return ""
}
