// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// departure is the end of an agent after which no other one comes to the node.
type departure struct {
	why string // "": another agent comes, or that is not known
	// deselected says that agents go on running elsewhere: then the SMCRNode stays, to say
	// that there is none here.
	deselected bool
}

// departure says whether an agent comes to the node after this one. An agent that is told to
// end asks this, and is the last one that can leave the node clean:
//
//	SIGTERM: update, rollback, restart of the pod, drain    the DaemonSet wants an agent here: the next one goes on
//	SIGTERM: the DaemonSet is deleted (GitOps prune, helm uninstall --no-hooks)   departure
//	SIGTERM: the node left the DaemonSet's selector                               departure, deselected
//	the API server does not answer                                                not known
func (c *cluster) departure(ctx context.Context) departure {
	if c.cfg.DaemonSet == "" {
		return departure{}
	}
	ctx, cancel := context.WithTimeout(ctx, departureWait)
	defer cancel()
	ds, err := c.daemonSet(ctx)
	switch {
	case apierrors.IsNotFound(err), err == nil && ds.DeletionTimestamp != nil:
		return departure{why: "the DaemonSet of the agents is deleted"}
	case apierrors.IsUnauthorized(err):
		return departure{why: "the agents' account is deleted"}
	case apierrors.IsForbidden(err):
		// All objects of the installation are being deleted, and the roles were first. A
		// role that lacks only this right is a mistake, and no reason to leave.
		if _, err := c.coreNode(ctx); apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			return departure{why: "the agents' rights are deleted"}
		}
		c.cfg.Log.Warn("not known whether another agent comes to the node", "err", err)
		return departure{}
	case err != nil:
		c.cfg.Log.Warn("not known whether another agent comes to the node", "err", err)
		return departure{}
	}
	node, err := c.coreNode(ctx)
	switch {
	case err != nil:
		c.cfg.Log.Warn("not known whether another agent comes to the node", "err", err)
		return departure{}
	case selects(&ds.Spec.Template.Spec, node):
		return departure{}
	case node.Labels[v1alpha1.LabelLeave] == "true":
		return departure{fmt.Sprintf("the node has the label %s=true", v1alpha1.LabelLeave), true}
	}
	return departure{"the DaemonSet of the agents does not select the node any more", true}
}

func (c *cluster) daemonSet(ctx context.Context) (*appsv1.DaemonSet, error) {
	cl, err := restClient(c.cfg.REST, appsv1.SchemeGroupVersion, "/apis", appsv1.AddToScheme)
	if err != nil {
		return nil, err
	}
	var ds appsv1.DaemonSet
	err = cl.Get().Namespace(c.cfg.podNamespace()).Resource("daemonsets").Name(c.cfg.DaemonSet).Do(ctx).Into(&ds)
	return &ds, err
}

func (c *cluster) coreNode(ctx context.Context) (*corev1.Node, error) {
	cl, err := restClient(c.cfg.REST, corev1.SchemeGroupVersion, "/api", corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	var n corev1.Node
	err = cl.Get().Resource("nodes").Name(c.cfg.Node).Do(ctx).Into(&n)
	return &n, err
}

// selects says whether pods of a template may run on a node by its node selector and
// required node affinity. One that cannot be read selects: the API server has checked it, and so
// it is newer than this program. selects does not look at taints: what makes a taint drive pods
// off passes in most cases.
func selects(pod *corev1.PodSpec, node *corev1.Node) bool {
	here, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: *pod}).Match(node)
	return here || err != nil
}

// depart tells the API server, as far as that still lets it, that the node is clean. If the
// agents are gone from all nodes it deletes the SMCRNode, since nobody else would; else the
// controller says of the node what is not said in time.
func (c *cluster) depart(ctx context.Context) {
	c.mu.Lock()
	left := c.report.Left()
	c.mu.Unlock()
	stays := c.departs.Load().deselected
	select {
	case <-left:
	case <-time.After(departureReports):
		if stays {
			c.cfg.Log.Info("not all reports are written; the controller says of the rest that the agent is gone")
		} else {
			c.cfg.Log.Warn("the API server does not take the last reports; the annotation may be left on pods", "annotation", v1alpha1.AnnotationStatus)
		}
	}
	if stays {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, departureWait)
	defer cancel()
	cl, err := restClient(c.cfg.REST, v1alpha1.GroupVersion(), "/apis", v1alpha1.AddToScheme)
	if err == nil {
		err = cl.Delete().Resource("smcrnodes").Name(c.cfg.Node).Do(ctx).Error()
	}
	if err != nil && !apierrors.IsNotFound(err) {
		c.cfg.Log.Warn("the SMCRNode is left; delete it", "err", fmt.Errorf("delete SMCRNode %s: %w", c.cfg.Node, err))
	}
}
