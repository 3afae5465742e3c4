// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/smcr-io/kube-smcr/internal/devices/claims"
	"github.com/smcr-io/kube-smcr/internal/devices/inventory"
	"github.com/smcr-io/kube-smcr/internal/devices/vf"
	"github.com/smcr-io/kube-smcr/internal/records"
)

// PrepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (d *Driver) PrepareResourceClaims(ctx context.Context, wanted []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	out := make(map[types.UID]kubeletplugin.PrepareResult, len(wanted))
	patience, cancel := context.WithTimeout(ctx, d.cfg.returnWait)
	defer cancel()
	for _, c := range wanted {
		devices, err := d.prepare(ctx, patience.Done(), c)
		d.cfg.Metrics.count("prepare", err)
		if err != nil {
			err = fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
		}
		out[c.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return out, nil
}

// prepare writes the record of a claim, which may exist already. Once late is closed, it does not wait
// any more for devices of pods that are ending.
func (d *Driver) prepare(ctx context.Context, late <-chan struct{}, c *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	before, err := d.store.Get(string(c.UID))
	switch {
	case err == nil, errors.Is(err, claims.ErrNoClaim):
	case records.IsShortage(err): // only the record says when the claim was prepared, and with which devices
		return nil, fmt.Errorf("%w: kubelet tries again", err)
	default:
		// The record cannot be read. The allocation has all that is needed for a new one.
		d.cfg.Log.Warn("record of a claim replaced: the old one cannot be read", "claim", c.Namespace+"/"+c.Name, "err", err)
	}
	record := claims.Claim{Namespace: c.Namespace, Name: c.Name, UID: string(c.UID), Prepared: before.Prepared, Pods: podsOf(c)}
	if record.Prepared.IsZero() {
		if record.Prepared, err = d.afterAll(time.Now()); err != nil {
			return nil, err
		}
	}
	var out []kubeletplugin.Device
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver != DriverName {
			continue
		}
		out = append(out, kubeletplugin.Device{
			Requests: []string{r.Request}, PoolName: r.Pool, DeviceName: r.Device, ShareID: r.ShareID,
		})
		if r.AdminAccess != nil && *r.AdminAccess {
			continue // admin access to a device that other claims have
		}
		x, err := d.deviceOf(ctx, late, c, before, r)
		if err != nil {
			return nil, err
		}
		if x.IfName != "" && slices.ContainsFunc(record.Devices, func(o claims.Device) bool { return o.IfName == x.IfName }) {
			return nil, fmt.Errorf("two devices would be interface %s in the pod: give each request parameters with another interfaceName", x.IfName)
		}
		record.Devices = append(record.Devices, x)
	}
	if before.UID == "" {
		if err := d.fits(record); err != nil {
			return nil, err
		}
	}
	if err := d.store.Write(record); err != nil {
		return nil, err
	}
	ids := make([]string, len(record.Devices))
	for i, x := range record.Devices {
		ids[i] = x.ID
	}
	d.cfg.Log.Info("claim prepared", "claim", record.String(), "devices", ids)
	return out, nil
}

// fits refuses a claim with which a pod would have more devices for itself than the CNI plugin
// gives one.
func (d *Driver) fits(c claims.Claim) error {
	if c.Own() == 0 {
		return nil
	}
	all, err := d.store.List() // exclusive logs what cannot be read
	if records.IsShortage(err) {
		return fmt.Errorf("it is not known how many devices the pod has: %w: kubelet tries again", err)
	}
	for _, pod := range c.Pods {
		n := c.Own()
		for _, o := range all {
			if o.UID != c.UID && o.Of(pod.UID) {
				n += o.Own()
			}
		}
		if n > claims.MaxDevices {
			return fmt.Errorf("pod %s/%s would have %d devices for itself, at most %d are allowed: let it claim fewer", pod.Namespace, pod.Name, n, claims.MaxDevices)
		}
	}
	return nil
}

// afterAll is now or, if the node's clock was set back, a moment after the last time at which a claim was
// prepared: by the order of these times, a pod is told from a former pod of its name.
func (d *Driver) afterAll(now time.Time) (time.Time, error) {
	all, err := d.store.List() // exclusive and Assigned log what cannot be read
	if records.IsShortage(err) {
		return time.Time{}, fmt.Errorf("it is not known which claims are prepared: %w: kubelet tries again", err)
	}
	for _, c := range all {
		if !c.Prepared.Before(now) {
			now = c.Prepared.Add(1)
		}
	}
	return now, nil
}

// podsOf are the pods that a claim is reserved for.
func podsOf(c *resourceapi.ResourceClaim) []records.Pod {
	var out []records.Pod
	for _, r := range c.Status.ReservedFor {
		if r.APIGroup == "" && r.Resource == "pods" {
			out = append(out, records.Pod{Namespace: c.Namespace, Name: r.Name, UID: string(r.UID)})
		}
	}
	return out
}

// deviceOf is the device of one result of an allocation.
func (d *Driver) deviceOf(ctx context.Context, late <-chan struct{}, c *resourceapi.ResourceClaim, before claims.Claim, r resourceapi.DeviceRequestAllocationResult) (claims.Device, error) {
	p, err := parametersOf(c.Status.Allocation, r.Request)
	if err != nil {
		return claims.Device{}, err
	}
	at := slices.IndexFunc(before.Devices, func(x claims.Device) bool {
		return x.Request == r.Request && x.Pool == r.Pool && x.Name == r.Device
	})
	if at >= 0 {
		x := before.Devices[at] // prepared before: even if the device is gone now, the pod may run with it
		if !x.Shared {
			x.IfName = p.InterfaceName
		}
		return x, nil
	}
	x, ok := d.allocated(r.Device)
	switch {
	case !ok && !d.cfg.Inventory.Looked():
		return claims.Device{}, fmt.Errorf("device %s: the agent has just started and has not looked for devices yet: kubelet tries again", r.Device)
	case r.Pool != d.cfg.Node:
		return claims.Device{}, fmt.Errorf("device %s is of pool %s, not of this node: allocate the claim again", r.Device, r.Pool)
	case !ok:
		return claims.Device{}, fmt.Errorf("device %s is not on this node any more: delete the pod, so that its claim is allocated again", r.Device)
	}
	out := claims.Device{ID: x.ID, Request: r.Request, Pool: r.Pool, Name: r.Device, Shared: x.Shared()}
	if x.Shared() {
		return out, nil
	}
	out.IfName = p.InterfaceName
	return out, d.exclusive(ctx, late, c, r.Device, x.ID)
}

// allocated is the device with a name that an allocation has. The name of a shared device may be that of
// the device or that of a slot, as allocations may be older than the form that is published now.
func (d *Driver) allocated(name string) (inventory.Device, bool) {
	list := d.cfg.Inventory.Devices()
	for _, slots := range []bool{false, true} {
		if x, ok := translate(list, slots).ids[name]; ok {
			return x, true
		}
	}
	return inventory.Device{}, false
}

// exclusive makes sure that no other claim or pod has a device. The scheduler does so too,
// but it does not know of devices that pods got without it, for example by the device
// plugin.
func (d *Driver) exclusive(ctx context.Context, late <-chan struct{}, c *resourceapi.ResourceClaim, name, id string) error {
	if n := len(c.Status.ReservedFor); n > 1 {
		return fmt.Errorf("the claim is shared by %d pods, but device %s is for one pod: use a ResourceClaimTemplate", n, id)
	}
	if err := d.awaitReturn(late, c, name, id); err != nil {
		return err
	}
	others, err := d.store.List()
	if errors.Is(err, claims.ErrUnread) {
		return fmt.Errorf("it is not known whether another claim has device %s: %w: kubelet tries again", id, err)
	}
	if err != nil {
		d.cfg.Log.Warn("not all records of claims can be read", "err", err)
	}
	for _, o := range others {
		has := func(y claims.Device) bool { return y.ID == id && !y.Shared }
		if o.UID == string(c.UID) || !slices.ContainsFunc(o.Devices, has) {
			continue
		}
		if d.gone(ctx, o) {
			d.cfg.Log.Info("record removed of a claim that does not exist any more", "claim", o.String())
			if err := d.store.Delete(o.UID); err != nil {
				return err
			}
			continue
		}
		if slices.ContainsFunc(o.Pods, func(p records.Pod) bool { return d.ending(p.UID) }) {
			return fmt.Errorf("device %s is prepared for claim %v (UID %s), whose pod is ending: kubelet tries again, and the device is free when that pod is gone", id, o, o.UID)
		}
		return fmt.Errorf("device %s is prepared for claim %v (UID %s): delete its pod first", id, o, o.UID)
	}
	return nil
}

// awaitReturn returns nil when no other pod has a device any more. A pod that was made anew under the
// name of a former one often gets that one's device: to the scheduler the device is free as soon as the
// former pod is gone from the API server. But after a deletion by force, for example, the former pod
// may still be ending on the node, without a DEL so far. That is worth a short wait.
func (d *Driver) awaitReturn(late <-chan struct{}, c *resourceapi.ResourceClaim, name, id string) error {
	changed, stop := d.cfg.Inventory.Subscribe()
	defer stop()
	for {
		x, ok := d.published().ids[name]
		if !ok || x.ID != id {
			return fmt.Errorf("device %s is not on this node any more: delete the pod, so that its claim is allocated again", name)
		}
		err := x.Usable()
		var busy *vf.BusyError
		if !errors.As(err, &busy) {
			return err
		}
		owner := busy.Owner.Pod.UID
		if slices.ContainsFunc(c.Status.ReservedFor, func(r resourceapi.ResourceClaimConsumerReference) bool { return string(r.UID) == owner }) {
			return nil
		}
		if !d.ending(owner) {
			return fmt.Errorf("%w: that pod runs, and got the device without a claim (by Multus or a device plugin), or has another claim of it: let only one of these give VFs away", err)
		}
		select {
		case <-changed:
			continue
		case <-late:
		}
		return fmt.Errorf("%w: that pod is ending, and the CNI plugin has not yet been told to take the device back: kubelet tries again", err)
	}
}

// ending says whether it is known that a pod is ending or gone.
func (d *Driver) ending(podUID string) bool {
	return podUID != "" && d.cfg.Ending != nil && d.cfg.Ending(podUID)
}

// gone says whether a claim does not exist any more. Kubelet normally unprepares such a
// claim, but not if it lost its state.
func (d *Driver) gone(ctx context.Context, o claims.Claim) bool {
	now, err := d.cfg.Client.ResourceV1().ResourceClaims(o.Namespace).Get(ctx, o.Name, metav1.GetOptions{})
	return apierrors.IsNotFound(err) || err == nil && string(now.UID) != o.UID
}

// UnprepareResourceClaims implements [kubeletplugin.DRAPlugin].
func (d *Driver) UnprepareResourceClaims(_ context.Context, over []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	out := make(map[types.UID]error, len(over))
	for _, c := range over {
		err := d.store.Delete(string(c.UID))
		d.cfg.Metrics.count("unprepare", err)
		if err == nil {
			d.cfg.Log.Info("claim unprepared", "claim", c.String())
		}
		out[c.UID] = err
	}
	return out, nil
}
