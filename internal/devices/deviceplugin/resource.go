// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// resource is the server of one resource, which answers kubelet's calls.
type resource struct {
	pluginapi.UnimplementedDevicePluginServer

	cfg      *Config
	name     string
	endpoint string // name of the socket in kubelet's directory

	mu      sync.Mutex // guards what is below
	offer   offer
	changed chan struct{} // closed, and replaced, when the offer changes
	streams int           // kubelet's open calls of ListAndWatch
	ended   chan struct{} // closed, and replaced, when the last of them ends
	halt    chan struct{} // closed when the server stops; nil: the server does not run
}

func newResource(cfg *Config, name, endpoint string) *resource {
	return &resource{cfg: cfg, name: name, endpoint: endpoint, changed: make(chan struct{}), ended: make(chan struct{})}
}

// publish offers o from now on.
func (r *resource) publish(o offer) {
	r.mu.Lock()
	old := r.offer
	same := old.equal(o)
	if !same {
		r.offer = o
		close(r.changed)
		r.changed = make(chan struct{})
	}
	r.mu.Unlock()
	r.cfg.Metrics.offered(r.name, o)
	if same {
		return
	}
	why := map[string]string{}
	for _, d := range old.devices {
		why[d.ID] = d.Why
	}
	for _, d := range o.devices {
		switch before, known := why[d.ID]; {
		case known && before == d.Why:
		case d.Why == "":
			r.cfg.Log.Info("device is offered to pods", "resource", r.name, "device", d.ID)
		default:
			r.cfg.Log.Warn("device is not offered to pods", "resource", r.name, "device", d.ID, "why", d.Why)
		}
		delete(why, d.ID)
	}
	for id := range why {
		r.cfg.Log.Warn("device is gone", "resource", r.name, "device", id)
	}
}

// now returns the offer, and a channel that is closed when there is another one.
func (r *resource) now() (o offer, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.offer, r.changed
}

// watched says whether a call of ListAndWatch is open, and returns a channel that is closed
// when the last one ends.
func (r *resource) watched() (yes bool, ended <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.streams > 0, r.ended
}

// stream changes the number of open calls of ListAndWatch, and returns the channel that
// ends them.
func (r *resource) stream(change int) (halt <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.streams += change; r.streams == 0 {
		close(r.ended)
		r.ended = make(chan struct{})
	}
	return r.halt
}

// GetDevicePluginOptions implements pluginapi.DevicePluginServer.
func (r *resource) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch implements pluginapi.DevicePluginServer: it sends all devices at once, and
// again whenever one of them changes.
func (r *resource) ListAndWatch(_ *pluginapi.Empty, s grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	halt := r.stream(1)
	defer r.stream(-1)
	for {
		o, changed := r.now()
		if err := s.Send(o.list()); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-halt:
			return nil
		case <-s.Context().Done():
			return nil
		}
	}
}

// GetPreferredAllocation implements pluginapi.DevicePluginServer.
func (r *resource) GetPreferredAllocation(_ context.Context, req *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	o, _ := r.now()
	out := &pluginapi.PreferredAllocationResponse{}
	for _, c := range req.GetContainerRequests() {
		out.ContainerResponses = append(out.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{
			DeviceIDs: o.prefer(c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize())),
		})
	}
	return out, nil
}

// Allocate implements pluginapi.DevicePluginServer. Kubelet puts an error into the status of
// the pod.
func (r *resource) Allocate(_ context.Context, req *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	o, _ := r.now()
	out := &pluginapi.AllocateResponse{}
	for _, c := range req.GetContainerRequests() {
		a, devices, err := o.allocate(r.name, c.GetDevicesIds())
		if err != nil {
			r.cfg.Metrics.allocations.WithLabelValues(r.name, resultRefused).Inc()
			return nil, status.Error(codes.NotFound, fmt.Sprintf("%s: %v: the pod must be scheduled again", r.name, err))
		}
		r.cfg.Metrics.allocations.WithLabelValues(r.name, resultDone).Inc()
		for _, d := range devices {
			r.cfg.Log.Debug("device allocated", "resource", r.name, "device", d.ID)
		}
		out.ContainerResponses = append(out.ContainerResponses, a)
	}
	return out, nil
}
