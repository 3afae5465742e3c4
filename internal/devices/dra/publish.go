// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
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
	var again <-chan time.Time
	said := ""
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-d.fatal:
			return err
		case <-changed:
		case <-d.republish:
		case <-again:
		}
		if !d.cfg.Inventory.Looked() {
			continue // the inventory is empty because Run has not looked yet
		}
		if controller == nil {
			if err := d.learnSlots(ctx); err != nil {
				// kubelet is served meanwhile: what was prepared is given back without the API server.
				if text := err.Error(); text != said { // log the same error once
					said = text
					d.cfg.Log.Warn("devices not published yet; tried again every few seconds", "err", err)
				}
				again = time.After(restartPause)
				continue
			}
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

// learnSlots finds out whether shared devices have to be published as slots, if an earlier agent of the
// node did so. If they were first published in the other form, slots that claims have would be missing
// until the API server has refused that form.
func (d *Driver) learnSlots(ctx context.Context) error {
	api := d.cfg.Client.ResourceV1().ResourceSlices()
	selector := fields.Set{resourceapi.ResourceSliceSelectorDriver: DriverName, resourceapi.ResourceSliceSelectorNodeName: d.cfg.Node}
	stored, err := api.List(ctx, metav1.ListOptions{FieldSelector: selector.String()})
	if err != nil {
		return fmt.Errorf("list the slices of an earlier agent: %w", err)
	}
	if !slices.ContainsFunc(stored.Items, func(s resourceapi.ResourceSlice) bool {
		return s.Spec.NodeName != nil && *s.Spec.NodeName == d.cfg.Node && s.Spec.Driver == DriverName && slices.ContainsFunc(s.Spec.Devices, isSlot)
	}) {
		return nil
	}
	// The API server may have been upgraded since.
	device := translate([]inventory.Device{{Device: vf.Device{ID: "trial"}, Kind: inventory.KindSoftware}}, false).devices
	trial, err := api.Create(ctx, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "smcr-trial-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: DriverName, NodeName: &d.cfg.Node, Pool: resourceapi.ResourcePool{Name: d.cfg.Node, Generation: 1, ResourceSliceCount: 1}, Devices: device,
		},
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		d.cfg.Log.Warn("not known whether the API server supports consumable capacity; shared devices stay slots", "err", err)
	}
	if err != nil || !slices.ContainsFunc(trial.Spec.Devices, func(x resourceapi.Device) bool { return x.AllowMultipleAllocations != nil }) {
		d.mu.Lock()
		d.slots = true
		d.mu.Unlock()
	}
	return nil
}

// published is the present inventory as devices of the API.
func (d *Driver) published() published {
	d.mu.Lock()
	slots := d.slots
	d.mu.Unlock()
	return translate(d.cfg.Inventory.Devices(), slots)
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
