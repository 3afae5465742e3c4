// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// publish keeps the slices in line with the inventory, until ctx ends or an error.
//
// Kubernetes' helper package can publish too, but it notices only 30 to 90 s later that
// another program changed the slices, and a kubelet that starts removes them.
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
			continue // the inventory is empty because Run has not looked yet
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

// published is the present inventory as devices of the API.
func (d *Driver) published() published {
	d.mu.Lock()
	slots := d.slots
	d.mu.Unlock()
	return publish(d.cfg.Inventory.Devices(), slots)
}

// publishFailed gets the error about a slice that the API server refused, or took only in
// part. The slice controller tries again by itself.
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
	d.cfg.Log.Info("the API server does not support consumable capacity; shared devices are published as slots", "slots", MaxSharers)
	select {
	case d.republish <- struct{}{}:
	default: // a value is waiting already
	}
}
