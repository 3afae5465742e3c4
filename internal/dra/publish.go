// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// publish keeps the slices as the inventory is, until ctx ends or something breaks.
//
// The helper for kubelet would publish too, but looks at what others did to the
// slices 30 to 90 s later, and a kubelet that starts removes them.
func (d *Driver) publish(ctx context.Context) error {
	changed, stop := d.cfg.Inventory.Subscribe()
	defer stop()
	var controller *resourceslice.Controller
	defer func() { controller.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-d.fatal:
			return err
		case <-changed:
		case <-d.republish:
		}
		if !d.cfg.Inventory.Looked() {
			continue // an empty list would take devices away that are there
		}
		resources := d.published().resources(d.cfg.Node)
		if controller != nil {
			controller.Update(&resources)
			continue
		}
		var err error
		controller, err = resourceslice.StartController(ctx, resourceslice.Options{
			DriverName: DriverName, KubeClient: d.cfg.Client, Resources: &resources,
			Owner:     &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: d.cfg.Node},
			SyncDelay: new(syncDelay), MutationCacheTTL: new(mutationCacheTTL),
			ErrorHandler: d.publishFailed,
		})
		if err != nil {
			return fmt.Errorf("publish devices: %w", err)
		}
	}
}

// published is what the inventory is now in the words of the API.
func (d *Driver) published() published {
	d.mu.Lock()
	slots := d.slots
	d.mu.Unlock()
	return publish(d.cfg.Inventory.Devices(), slots)
}

// publishFailed is told of a slice that the API server did not take as it is. The
// controller tries again by itself.
func (d *Driver) publishFailed(_ context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	if !errors.As(err, &dropped) || !slices.Contains(dropped.DisabledFeatures(), "DRAConsumableCapacity") {
		d.cfg.Log.Warn("devices not published", "what", msg, "err", err)
		return
	}
	d.mu.Lock()
	first := !d.slots
	d.slots = true
	d.mu.Unlock()
	if !first {
		return
	}
	d.cfg.Log.Info("the API server has no consumable capacity; shared devices are published as slots", "slots", MaxSharers)
	select {
	case d.republish <- struct{}{}:
	default: // one is waiting already
	}
}
