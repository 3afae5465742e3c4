// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applyresource "k8s.io/client-go/applyconfigurations/resource/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/internal/devices/claims"
)

// A network is the interface of a claimed device in its pod.
type network struct {
	pool, device string
	ifName, mac  string
	ips          []string
}

func (n network) equal(o network) bool {
	return n.pool == o.pool && n.device == o.device && n.ifName == o.ifName && n.mac == o.mac && slices.Equal(n.ips, o.ips)
}

// reporter writes into the status of claims which interfaces the CNI plugin made of their
// devices. The goroutine of run owns it.
type reporter struct {
	d    *Driver
	told map[string][]network // the networks that were written, by the claim's UID
	said string               // the last error that was logged
}

// run reports until ctx ends. It tries again after an error: a pod runs also if the status
// of its claim is not up to date.
func (r *reporter) run(ctx context.Context) {
	attachments := cni.NewStore(r.d.cfg.DataDir)
	events, stop := watchAll(r.d.cfg.Log, r.d.store, attachments)
	defer stop()
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for {
		// The agent and Assigned log records that cannot be read.
		all, _ := r.d.store.List()
		if atts, _, err := attachments.List(); err == nil {
			r.report(ctx, all, atts)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-events:
		}
	}
}

// report brings the status of claims up to date.
func (r *reporter) report(ctx context.Context, all []claims.Claim, atts []cni.Attachment) {
	told := make(map[string][]network, len(all))
	for _, c := range all {
		want, had := networks(c, atts), r.told[c.UID]
		if slices.EqualFunc(want, had, network.equal) {
			told[c.UID] = had
			continue
		}
		err := r.apply(ctx, c, want)
		switch {
		case err == nil, apierrors.IsNotFound(err), apierrors.IsConflict(err): // written; or the claim is gone, and another one may have its name
			told[c.UID] = want
		default:
			told[c.UID] = had
			if text := err.Error(); text != r.said && ctx.Err() == nil {
				r.said = text
				r.d.cfg.Log.Warn("status of a claim not written; trying again", "claim", c.String(), "err", err)
			}
		}
	}
	r.told = told
}

// networks are the interfaces that the CNI plugin made of a claim's devices.
func networks(c claims.Claim, atts []cni.Attachment) []network {
	var out []network
	for _, d := range c.Devices {
		if d.Shared {
			continue // a shared device has no interface in the pod
		}
		for _, a := range atts {
			i := slices.IndexFunc(a.Devices, func(x cni.AttachedDevice) bool { return x.ID == d.ID && x.IfName != "" })
			if i < 0 || !c.Of(a.Pod.UID) {
				continue
			}
			n := network{pool: d.Pool, device: d.Name, ifName: a.Devices[i].IfName, mac: a.Devices[i].MAC}
			for _, p := range a.Devices[i].IPs[:min(len(a.Devices[i].IPs), maxStatusIPs)] {
				n.ips = append(n.ips, p.String())
			}
			out = append(out, n)
			break
		}
	}
	return out
}

// apply writes the part of a claim's status that belongs to the driver.
func (r *reporter) apply(ctx context.Context, c claims.Claim, want []network) error {
	status := applyresource.ResourceClaimStatus()
	for _, n := range want {
		data := applyresource.NetworkDeviceData().WithInterfaceName(n.ifName).WithIPs(n.ips...)
		if n.mac != "" {
			data.WithHardwareAddress(n.mac)
		}
		status.WithDevices(applyresource.AllocatedDeviceStatus().
			WithDriver(DriverName).WithPool(n.pool).WithDevice(n.device).WithNetworkData(data))
	}
	_, err := r.d.cfg.Client.ResourceV1().ResourceClaims(c.Namespace).ApplyStatus(ctx,
		applyresource.ResourceClaim(c.Name, c.Namespace).WithUID(types.UID(c.UID)).WithStatus(status),
		metav1.ApplyOptions{FieldManager: v1alpha1.ManagerAgent, Force: true})
	if err != nil {
		return fmt.Errorf("write the devices' networks: %w", err)
	}
	return nil
}
