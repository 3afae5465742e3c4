// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// renew renews the Lease of the node's agent until ctx ends. By the Lease the controller knows
// whether the agent lives: also if kubelet does not run, and soon after the node lost its power:
//
//	0 s     the Lease is renewed
//	1 s     the node loses power
//	2.5 s   the Lease is not renewed
//	7..9 s  the controller finds that the agent is gone (silentAfter in package controller)
//
// A renewal that fails is tried again, at first soon: only if renewals fail for several seconds the
// controller takes the agent for gone. It takes no agent for gone because it does not reach the API
// server itself, or because the API server answers nobody.
//
// The Lease is not given up at the end of ctx: the node may have another agent by then, or
// get one, whose Lease it is.
func (r *Reporter) renew(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	pause, failing := renewRetry, false
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		owner := r.owner.Load()
		if owner == nil || r.clean.Load() {
			timer.Reset(renewRetry) // asks nobody
			continue
		}
		cctx, cancel := context.WithTimeout(ctx, renewTimeout)
		err := r.server.renew(cctx, r.lease(*owner, time.Now()))
		cancel()
		switch {
		case err == nil || isAboutObject(err):
			r.contact.found(callerLease, time.Now())
		case ctx.Err() == nil:
			r.contact.lost(callerLease, err, time.Now())
		}
		if err != nil {
			if !failing && ctx.Err() == nil && isAboutObject(err) { // others are told of by the reports
				failing = true
				r.cfg.Log.Warn("API server refuses the agent's Lease, so that the agent counts as gone; check the agent's Role", "err", err)
			}
			timer.Reset(pause)
			pause = min(2*pause, renewEvery)
			continue
		}
		pause, failing = renewRetry, false
		timer.Reset(renewEvery)
	}
}

// lease is the Lease as it is renewed now. The node owns it, so that it goes with the node.
func (r *Reporter) lease(owner types.UID, now time.Time) *coordinationv1.Lease {
	label := v1alpha1.NodeLabel(r.cfg.Node, owner)
	namespace, holder, _ := strings.Cut(r.cfg.AgentPod, "/")
	seconds, at := int32(leaseDuration/time.Second), metav1.NewMicroTime(now)
	return &coordinationv1.Lease{
		TypeMeta: metav1.TypeMeta{APIVersion: coordinationv1.SchemeGroupVersion.String(), Kind: "Lease"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.AgentLeasePrefix + label,
			Labels:          map[string]string{v1alpha1.LabelNode: label},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: r.cfg.Node, UID: owner}},
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &at},
	}
}

// renew implements server. It has connections of its own, of HTTP/1.1: a call that hangs
// ends its connection, and the next one makes another. Of HTTP/2 all calls share one, which
// a machine that is gone without a word keeps for 45 s.
func (c *client) renew(ctx context.Context, lease *coordinationv1.Lease) error {
	options := metav1.PatchOptions{FieldManager: v1alpha1.ManagerAgent, Force: new(true)}
	body, err := json.Marshal(lease)
	if err == nil {
		err = c.leases.Patch(types.ApplyPatchType).Namespace(lease.Namespace).Resource(resourceLeases).Name(lease.Name).
			VersionedParams(&options, c.params).Body(body).MaxRetries(0).Do(ctx).Error()
	}
	if err != nil {
		return fmt.Errorf("renew the lease %s/%s: %w", lease.Namespace, lease.Name, err)
	}
	return nil
}
