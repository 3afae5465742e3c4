// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"time"

	"google.golang.org/grpc"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
)

// NodeWatchResources sends the health of the devices to kubelet, which writes it into the
// status of the pods that have them.
func (d *Driver) NodeWatchResources(_ *drahealth.NodeWatchResourcesRequest, stream grpc.ServerStreamingServer[drahealth.NodeWatchResourcesResponse]) error {
	changed, stop := d.cfg.Inventory.Subscribe()
	defer stop()
	again := time.NewTicker(healthEvery)
	defer again.Stop()
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		case <-again.C:
		}
		if err := stream.Send(d.health(time.Now())); err != nil {
			return err
		}
	}
}

// health is the health of the devices: that of their ports.
func (d *Driver) health(now time.Time) *drahealth.NodeWatchResourcesResponse {
	p := d.published()
	out := &drahealth.NodeWatchResourcesResponse{}
	for _, x := range p.devices {
		h := &drahealth.DeviceHealth{
			Device: &drahealth.DeviceIdentifier{PoolName: d.cfg.Node, DeviceName: x.Name},
			Health: drahealth.HealthStatus_HEALTHY, LastUpdatedTime: now.Unix(),
		}
		if !p.ids[x.Name].Up {
			h.Health, h.Message = drahealth.HealthStatus_UNHEALTHY, "the port is down"
		}
		out.Devices = append(out.Devices, h)
	}
	return out
}
