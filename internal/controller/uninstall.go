// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
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
	// writesAtOnce is how many objects are written at a time: one after the other, 1000 nodes
	// would hear for half a minute that they are to be left.
	writesAtOnce = 16
	// cleanTimeout is how long pods are cleaned: by apiQPS 15,000 of them. The deadline of the
	// hook's Job has as much on top of the time for the agents, and 45 s for the rest.
	cleanTimeout = 75 * time.Second
)

// NotClean says what is left on a node that no agent cleaned, and what to do.
const NotClean = "kube-smcr is uninstalled, but no agent answered on this node: smcr-cni is left in its CNI configuration and its CNI directory, " +
	"and records in /run/kube-smcr. When the node is back, install the chart for this node alone and uninstall it again: docs/operations.md, Nodes that were left behind"

const reasonNotClean = "SMCRNotClean"

// UninstallConfig is the configuration of Uninstall.
type UninstallConfig struct {
	// Namespace is where the add-on is installed, and DaemonSet the name of its agents'
	// DaemonSet; "": all agents in Namespace belong to it.
	Namespace, DaemonSet string
	// Timeout is how long Uninstall waits for the agents.
	Timeout time.Duration
	// LeaderGone is how long a controller that lost its Lease may go on working, and a node
	// may be without the pod of its agent; 0 means 11 seconds, which is right for the
	// default renew deadline.
	LeaderGone time.Duration
	Log        *slog.Logger
}

// Uninstall tells all agents of the installation to leave their nodes clean, waits for them, and
// deletes the objects and annotations that agents and controllers wrote. SMCRPolicies stay, and so
// does what belongs to nodes that an agent of another installation manages. left are the nodes
// that are not clean, because no agent answered there in time; an event of each Node says so. That
// is no error, so that the rest is uninstalled all the same.
func Uninstall(ctx context.Context, api *rest.Config, c UninstallConfig) (left []string, err error) {
	scheme, err := NewScheme()
	if err != nil {
		return nil, err
	}
	cl, err := client.New(paced(api), client.Options{Scheme: scheme})
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

// each calls f for all numbers below n, for some at a time, and returns its first error.
func each(n int, f func(i int) error) error {
	var g errgroup.Group
	g.SetLimit(writesAtOnce)
	for i := range n {
		g.Go(func() error { return f(i) })
	}
	return g.Wait()
}

// tellOf makes an event about each Node that is not clean.
func (u *uninstall) tellOf(ctx context.Context, left []string) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := each(len(left), func(i int) error {
		// Without a UID, as kubelet's own events about its Node.
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: left[i], UID: types.UID(left[i])}}
		return tell(ctx, u.client, node, reasonNotClean, NotClean)
	})
	if err != nil {
		u.config.Log.Warn("not every node that is not clean has an event", "nodes", len(left), "err", err)
	}
}

// seizeLease takes the controllers' Lease for the time lasting, which makes the controllers stop.
// It returns whether there is a Lease.
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

// agents tells the agents to leave and waits for them. It returns the nodes whose SMCRNode does not
// have the condition Uninstalled in the end. It looks once more after the deadline, because some
// agents may still have left while the last ones were told.
func (u *uninstall) agents(ctx context.Context) (left []string, err error) {
	deadline := time.Now().Add(u.config.Timeout)
	for first := true; ; first = false {
		late, told := !first && !time.Now().Before(deadline), deadline
		if first && u.config.Timeout <= 0 {
			told = time.Now().Add(callTimeout) // without time to wait for them, agents are told all the same
		}
		var n unclean
		err := retry(ctx, u.config.Log, func() (err error) {
			n, err = u.look(ctx)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("find out which nodes are clean: %w", err)
		}
		if late || len(n.waiting) == 0 && len(n.untold) == 0 {
			return append(n.dead, n.waiting...), nil
		}
		if err := u.tellAgents(ctx, n.untold, told); err != nil {
			return nil, err
		}
		u.config.Log.Info("waiting for agents", "nodes", len(n.waiting), "dead", len(n.dead))
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(min(coalesce, time.Until(deadline))):
		}
	}
}

// unclean are nodes that are not clean yet. The agents of waiting are waited for. The nodes of dead
// are not ready or have no agent, so that nobody there can clean up. untold are the SMCRNodes of
// both that do not have the annotation that tells agents to uninstall.
type unclean struct {
	waiting, dead []string
	untold        []*v1alpha1.SMCRNode
}

// look finds out which nodes are not clean.
func (u *uninstall) look(ctx context.Context) (out unclean, err error) {
	var smcrs v1alpha1.SMCRNodeList
	if err := u.client.List(ctx, &smcrs); err != nil {
		return out, ignoreNoKind(err)
	}
	var all corev1.NodeList
	if err := u.client.List(ctx, &all); err != nil {
		return out, err
	}
	ready := map[string]bool{}
	for i := range all.Items {
		ready[all.Items[i].Name] = nodeReady(&all.Items[i])
	}
	agents, err := u.agentNodes(ctx)
	if err != nil {
		return out, err
	}
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
			out.untold = append(out.untold, n)
		}
		if isReady && !u.deserted(n.Name, agents, time.Now()) {
			out.waiting = append(out.waiting, n.Name)
		} else {
			out.dead = append(out.dead, n.Name)
		}
	}
	return out, nil
}

// tellAgents adds the annotation that tells agents to uninstall, until the deadline. Agents that
// could not be told are told by the next call. An error means that a further call cannot help.
func (u *uninstall) tellAgents(ctx context.Context, untold []*v1alpha1.SMCRNode, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, v1alpha1.AnnotationUninstall)
	err := each(len(untold), func(i int) error {
		if !time.Now().Before(deadline) {
			return nil
		}
		err := u.client.Patch(ctx, untold[i], client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.ManagerController))
		return client.IgnoreNotFound(err)
	})
	if permanent(err) {
		return fmt.Errorf("tell the agents: %w", err)
	}
	if err != nil {
		u.config.Log.Info("not all agents were told; tried again", "err", err)
	}
	return nil
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

// cleanPods takes the annotation smcr.io/status off pods that have no agent on their node which
// would do it. Pods of nodes that an agent of another installation manages keep the annotation.
// If it cannot be taken off, the uninstallation goes on all the same.
func (u *uninstall) cleanPods(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, cleanTimeout)
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
			own := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
				return p.Annotations[v1alpha1.AnnotationStatus] == "" || theirs[p.Spec.NodeName]
			})
			errs = append(errs, each(len(own), func(i int) error { return writePodStatus(ctx, u.client, &own[i], "") }))
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
