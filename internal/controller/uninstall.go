// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

const (
	// uninstaller is the holder of the controllers' Lease while objects are deleted, and
	// for leaseAfter after that: by then the controllers have ended, too.
	uninstaller = "kube-smcr-uninstall"
	leaseAfter  = 60 * time.Second
	// leaderGone is how long a leader that lost its Lease may go on: the renew deadline, which
	// is 10 s in earlier versions, and one second more.
	leaderGone = 11 * time.Second
	// podsAtOnce is how many pods are read at a time.
	podsAtOnce = 500
)

// NotClean says what is left on a node that no agent cleaned, and what to do.
const NotClean = "kube-smcr is uninstalled, but no agent answered on this node: smcr-cni is left in its CNI configuration and its CNI directory, " +
	"and records in /run/kube-smcr. When the node is back, install the chart for this node alone and uninstall it again: docs/operations.md, Nodes that were left behind"

const reasonNotClean = "SMCRNotClean"

// UninstallConfig is the configuration of Uninstall.
type UninstallConfig struct {
	// Namespace is where the add-on is installed, DaemonSet the name of its agents';
	// "": all agents in Namespace are its.
	Namespace, DaemonSet string
	// Timeout is how long Uninstall waits for the agents.
	Timeout time.Duration
	// LeaderGone is how long a controller that lost its Lease may go on working, and a node
	// may be without the pod of its agent; 0 means 11 seconds, which is right for the
	// default renew deadline.
	LeaderGone time.Duration
	Log        *slog.Logger
}

// Uninstall tells all agents of the installation to leave their nodes clean, waits for
// them, and deletes the objects and annotations that agents and controllers wrote. SMCRPolicies stay, and
// so does what belongs to nodes that an agent of another installation manages. left are
// the nodes that are not clean, because no agent answered there in time: an event of each
// Node says so. They are no error, so that the rest is uninstalled all the same.
func Uninstall(ctx context.Context, api *rest.Config, c UninstallConfig) (left []string, err error) {
	scheme, err := NewScheme()
	if err != nil {
		return nil, err
	}
	cl, err := client.New(api, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connect to the API server: %w", err)
	}
	u := &uninstall{client: cl, config: c, own: installation{namespace: c.Namespace, daemonSet: c.DaemonSet}, alone: map[string]time.Time{}}
	// The controllers run until the Helm hook ends. Without the Lease they do nothing, and
	// so do not write again the objects that are deleted here.
	seized, err := u.seizeLease(ctx, c.Timeout+2*leaseAfter)
	if err != nil {
		return nil, err
	}
	until := time.Now()
	if seized {
		until = until.Add(u.patience())
	}
	left, err = u.agents(ctx)
	if err != nil {
		return nil, err
	}
	slices.Sort(left)
	u.tellOf(ctx, left)
	select {
	case <-ctx.Done():
		return left, ctx.Err()
	case <-time.After(time.Until(until)):
	}
	u.cleanPods(ctx)
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
	own    installation
	alone  map[string]time.Time // since when nodes have no pod of an agent
}

// tellOf makes an event about each Node that is not clean.
func (u *uninstall) tellOf(ctx context.Context, left []string) {
	for _, name := range left {
		// Without a UID, as kubelet's own events about its Node.
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
		if err := tell(ctx, u.client, node, reasonNotClean, NotClean); err != nil {
			u.config.Log.Warn("event not made", "node", name, "err", err)
		}
	}
}

// seizeLease takes the Lease for so long, which makes the controllers stop. It says
// whether there is a Lease.
func (u *uninstall) seizeLease(ctx context.Context, lasting time.Duration) (bool, error) {
	holder, seconds := uninstaller, int32(lasting/time.Second)
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
		return u.client.Update(ctx, &lease) // refused, and tried again, if the leader has renewed the Lease since
	})
	if err != nil {
		return false, fmt.Errorf("take the lease of the controllers: %w", err)
	}
	return found, nil
}

// agents tells the agents to leave and waits for them. It returns the nodes whose
// SMCRNode does not have the condition Uninstalled in the end.
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

// tellAgents adds the annotation that tells agents to uninstall to the SMCRNodes that do
// not have it, and returns the nodes that are not clean yet: those whose agent is to be
// waited for, and those that are not ready or have no agent, so that nobody there can clean up.
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
	agents, err := u.agentNodes(ctx)
	if err != nil {
		return nil, nil, err
	}
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, v1alpha1.AnnotationUninstall)
	for i := range smcrs.Items {
		n := &smcrs.Items[i]
		if !u.own.hasAgent(n.Status.AgentPod) || meta.IsStatusConditionTrue(n.Status.Conditions, v1alpha1.ConditionUninstalled) {
			continue
		}
		isReady, exists := ready[n.Name]
		if !exists {
			continue // the node is gone
		}
		if n.Annotations[v1alpha1.AnnotationUninstall] != "true" {
			err := u.client.Patch(ctx, n, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.ManagerController))
			if client.IgnoreNotFound(err) != nil {
				return nil, nil, err
			}
		}
		if isReady && !u.deserted(n.Name, agents, time.Now()) {
			waiting = append(waiting, n.Name)
		} else {
			dead = append(dead, n.Name)
		}
	}
	return waiting, dead, nil
}

// agentNodes are the nodes that have a pod of an agent.
func (u *uninstall) agentNodes(ctx context.Context) (map[string]bool, error) {
	selector, err := labels.Parse(DefaultAgentSelector)
	if err != nil {
		return nil, fmt.Errorf("agent selector: %w", err)
	}
	var pods corev1.PodList
	if err := u.client.List(ctx, &pods, client.InNamespace(u.config.Namespace), client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("list the agents' pods: %w", err)
	}
	out := map[string]bool{}
	for i := range pods.Items {
		out[pods.Items[i].Spec.NodeName] = true
	}
	return out, nil
}

// deserted says whether a node has had no pod of an agent for a while: a pod that was
// deleted is made anew at once.
func (u *uninstall) deserted(node string, agents map[string]bool, now time.Time) bool {
	if agents[node] {
		delete(u.alone, node)
		return false
	}
	since, ok := u.alone[node]
	if !ok {
		since = now
		u.alone[node] = now
	}
	return now.Sub(since) >= u.patience()
}

// patience is how long to wait for what comes back by itself.
func (u *uninstall) patience() time.Duration {
	if u.config.LeaderGone == 0 {
		return leaderGone
	}
	return u.config.LeaderGone
}

// cleanPods takes the annotation smcr.io/status off the pods that no agent took it off,
// because there is none on their node. Pods of nodes that an agent of another installation
// manages keep it. An annotation that stays does not hold up the uninstallation.
func (u *uninstall) cleanPods(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := retry(ctx, u.config.Log, func() error {
		var nodes v1alpha1.SMCRNodeList
		if err := u.client.List(ctx, &nodes); err != nil {
			return ignoreNoKind(err)
		}
		theirs := map[string]bool{}
		for i := range nodes.Items {
			theirs[nodes.Items[i].Name] = !u.own.hasAgent(nodes.Items[i].Status.AgentPod)
		}
		var errs []error
		for next := ""; ; {
			var pods corev1.PodList
			if err := u.client.List(ctx, &pods, client.Limit(podsAtOnce), client.Continue(next)); err != nil {
				return errors.Join(append(errs, err)...)
			}
			for i := range pods.Items {
				if p := &pods.Items[i]; p.Annotations[v1alpha1.AnnotationStatus] != "" && !theirs[p.Spec.NodeName] {
					errs = append(errs, writePodStatus(ctx, u.client, p, ""))
				}
			}
			if next = pods.Continue; next == "" {
				return errors.Join(errs...)
			}
		}
	})
	if err != nil {
		u.config.Log.Warn("an annotation is left on pods", "annotation", v1alpha1.AnnotationStatus, "err", err)
	}
}

// deleteObjects deletes what agents and controllers wrote. If another installation has
// nodes, only the objects of this one's nodes are deleted, and the SMCRPeerSlices stay,
// which that one's controller writes, too.
func (u *uninstall) deleteObjects(ctx context.Context) error {
	err := retry(ctx, u.config.Log, func() error {
		var nodes v1alpha1.SMCRNodeList
		if err := u.client.List(ctx, &nodes); err != nil {
			return ignoreNoKind(err)
		}
		var own []string
		for i := range nodes.Items {
			if n := &nodes.Items[i]; u.own.hasAgent(n.Status.AgentPod) {
				own = append(own, n.Labels[v1alpha1.LabelNode])
			}
		}
		if len(own) == len(nodes.Items) {
			return u.deleteAll(ctx)
		}
		var errs []error
		for _, node := range own {
			only := client.MatchingLabels{v1alpha1.LabelNode: node}
			errs = append(errs, u.client.DeleteAllOf(ctx, &v1alpha1.SMCRLink{}, only), u.client.DeleteAllOf(ctx, &v1alpha1.SMCRNode{}, only),
				u.client.DeleteAllOf(ctx, &coordinationv1.Lease{}, client.InNamespace(u.config.Namespace), only))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("delete the objects: %w", err)
	}
	return nil
}

func (u *uninstall) deleteAll(ctx context.Context) error {
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
		u.client.DeleteAllOf(ctx, &coordinationv1.Lease{}, client.InNamespace(u.config.Namespace), client.HasLabels{v1alpha1.LabelNode}),
	}
	for ns := range namespaces {
		errs = append(errs, u.client.DeleteAllOf(ctx, &v1alpha1.SMCRPeerSlice{}, client.InNamespace(ns)))
	}
	return errors.Join(errs...)
}

// ignoreNoKind drops the error that the CRD is missing: then there are no objects.
func ignoreNoKind(err error) error {
	if meta.IsNoMatchError(err) {
		return nil
	}
	return err
}

// permanent says whether trying again cannot help.
func permanent(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsUnauthorized(err)
}
