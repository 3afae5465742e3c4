// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

const (
	// uninstaller holds the Lease of the controllers while objects are removed,
	// and for leaseAfter behind that: then the controllers are gone, too.
	uninstaller = "kube-smcr-uninstall"
	leaseAfter  = 60 * time.Second
	// leaderGone is how long a leader that lost its Lease may go on: the renew
	// deadline, and a moment.
	leaderGone = 11 * time.Second
)

// UninstallConfig is how Uninstall goes about it.
type UninstallConfig struct {
	// Namespace is where the add-on is installed.
	Namespace string
	// Timeout is how long it waits for the agents.
	Timeout time.Duration
	// LeaderGone is how long a controller may go on working that has lost its
	// Lease; 0 means 11 seconds, which is right for the default lease.
	LeaderGone time.Duration
	Log        *slog.Logger
}

// Uninstall tells all agents to leave their nodes clean, waits for them, and
// deletes the objects that agents and controllers wrote. SMCRPolicies stay. left
// are the nodes that are not clean, because no agent answered there in time; that
// is no error, since it must not keep anybody from uninstalling the rest.
func Uninstall(ctx context.Context, api *rest.Config, c UninstallConfig) (left []string, err error) {
	scheme, err := NewScheme()
	if err != nil {
		return nil, err
	}
	cl, err := client.New(api, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connect to the API server: %w", err)
	}
	u := &uninstall{client: cl, config: c}
	// The controllers run until the hook ends. Without the Lease they do nothing,
	// and so do not write again what is deleted here.
	seized, err := u.seizeLease(ctx, c.Timeout+2*leaseAfter)
	if err != nil {
		return nil, err
	}
	until := time.Now()
	if seized {
		wait := c.LeaderGone
		if wait == 0 {
			wait = leaderGone
		}
		until = until.Add(wait)
	}
	left, err = u.agents(ctx)
	if err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
		return left, ctx.Err()
	case <-time.After(time.Until(until)):
	}
	if err := u.deleteObjects(ctx); err != nil {
		return nil, err
	}
	if seized {
		if _, err := u.seizeLease(ctx, leaseAfter); err != nil {
			return nil, err
		}
	}
	return left, nil
}

type uninstall struct {
	client client.Client
	config UninstallConfig
}

// seizeLease makes the controllers stop: none of them takes a Lease that
// somebody else holds. It says whether there is one.
func (u *uninstall) seizeLease(ctx context.Context, hold time.Duration) (bool, error) {
	holder, seconds := uninstaller, int32(hold/time.Second)
	var found bool
	err := retry(ctx, u.config.Log, func() error {
		var lease coordinationv1.Lease
		err := u.client.Get(ctx, types.NamespacedName{Namespace: u.config.Namespace, Name: LeaseName}, &lease)
		if apierrors.IsNotFound(err) {
			found = false
			return nil
		}
		if err != nil {
			return err
		}
		now := metav1.NowMicro()
		lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds = &holder, &seconds
		lease.Spec.AcquireTime, lease.Spec.RenewTime = &now, &now
		found = true
		return u.client.Update(ctx, &lease) // refused, and tried again, if the leader renewed it meanwhile
	})
	if err != nil {
		return false, fmt.Errorf("take the lease of the controllers: %w", err)
	}
	return found, nil
}

// agents tells the agents to leave and waits for them. It returns the nodes
// that did not say that they are clean.
func (u *uninstall) agents(ctx context.Context) (left []string, err error) {
	deadline := time.Now().Add(u.config.Timeout)
	for {
		var waiting, dead []string
		err := retry(ctx, u.config.Log, func() (err error) {
			waiting, dead, err = u.tellAgents(ctx)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("tell the agents: %w", err)
		}
		if len(waiting) == 0 || time.Now().After(deadline) {
			return append(dead, waiting...), nil
		}
		u.config.Log.Info("waiting for agents", "nodes", len(waiting), "dead", len(dead))
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(coalesce):
		}
	}
}

// tellAgents annotates the SMCRNodes that are not, and returns the nodes that
// are not clean yet: those whose agent is to be waited for, and those that are
// not ready, so that nobody is there who could clean up.
func (u *uninstall) tellAgents(ctx context.Context) (waiting, dead []string, err error) {
	var smcrs v1alpha1.SMCRNodeList
	if err := u.client.List(ctx, &smcrs); err != nil {
		return nil, nil, ignoreNoKind(err)
	}
	var all corev1.NodeList
	if err := u.client.List(ctx, &all); err != nil {
		return nil, nil, err
	}
	ready := map[string]bool{}
	for i := range all.Items {
		ready[all.Items[i].Name] = nodeReady(&all.Items[i])
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, v1alpha1.AnnotationUninstall)
	for i := range smcrs.Items {
		n := &smcrs.Items[i]
		if meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionUninstalled) {
			continue
		}
		isReady, exists := ready[n.Name]
		if !exists {
			continue // gone, with everything on it
		}
		if n.Annotations[v1alpha1.AnnotationUninstall] != "true" {
			err := u.client.Patch(ctx, n, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.ManagerController))
			if client.IgnoreNotFound(err) != nil {
				return nil, nil, err
			}
		}
		if isReady {
			waiting = append(waiting, n.Name)
		} else {
			dead = append(dead, n.Name)
		}
	}
	return waiting, dead, nil
}

// deleteObjects deletes what agents and controllers wrote.
func (u *uninstall) deleteObjects(ctx context.Context) error {
	err := retry(ctx, u.config.Log, func() error {
		var slices v1alpha1.SMCRPeerSliceList
		if err := u.client.List(ctx, &slices); err != nil {
			return ignoreNoKind(err)
		}
		namespaces := map[string]bool{}
		for i := range slices.Items {
			namespaces[slices.Items[i].Namespace] = true
		}
		errs := []error{
			u.client.DeleteAllOf(ctx, &v1alpha1.SMCRLink{}),
			u.client.DeleteAllOf(ctx, &v1alpha1.SMCRNode{}),
		}
		for ns := range namespaces {
			errs = append(errs, u.client.DeleteAllOf(ctx, &v1alpha1.SMCRPeerSlice{}, client.InNamespace(ns)))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("delete the objects: %w", err)
	}
	return nil
}

// ignoreNoKind takes the lack of a definition for the lack of objects.
func ignoreNoKind(err error) error {
	if meta.IsNoMatchError(err) {
		return nil
	}
	return err
}

// permanent says whether trying again is of no use.
func permanent(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsUnauthorized(err)
}
