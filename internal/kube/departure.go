// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

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
// required node affinity. It does not look at taints: what makes a taint drive pods off
// passes in most cases.
func selects(pod *corev1.PodSpec, node *corev1.Node) bool {
	if !labels.SelectorFromSet(pod.NodeSelector).Matches(labels.Set(node.Labels)) {
		return false
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil || pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	terms := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	return slices.ContainsFunc(terms, func(t corev1.NodeSelectorTerm) bool {
		all := labels.Set(node.Labels)
		fields := labels.Set{metav1.ObjectNameField: node.Name}
		return len(t.MatchExpressions)+len(t.MatchFields) > 0 && meets(t.MatchExpressions, all) && meets(t.MatchFields, fields)
	})
}

// operators are those of node selectors, as label selectors have them.
var operators = map[corev1.NodeSelectorOperator]selection.Operator{
	corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn,
	corev1.NodeSelectorOpExists: selection.Exists, corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
	corev1.NodeSelectorOpGt: selection.GreaterThan, corev1.NodeSelectorOpLt: selection.LessThan,
}

// meets says whether values meet all requirements. One that cannot be read is met: the
// API server has checked it, and so it is newer than this program.
func meets(requirements []corev1.NodeSelectorRequirement, values labels.Set) bool {
	for _, r := range requirements {
		q, err := labels.NewRequirement(r.Key, operators[r.Operator], r.Values)
		if err == nil && !q.Matches(values) {
			return false
		}
	}
	return true
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
