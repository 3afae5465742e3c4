// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// departure is the end of an agent after which no other agent comes to the node.
type departure struct {
	why string // "": another agent comes, or it is not known whether one comes
	// deselected says that agents go on running on other nodes: then the SMCRNode stays, and
	// says that this node has none.
	deselected bool
	// unsure says that the API server does not know the agent any more. Either the agents'
	// account is deleted, and no agent comes; or only the agent's pod is, to which its token is
	// bound, and another agent comes.
	unsure bool
}

// unknownAgent is the departure of an agent whose token the API server refuses.
var unknownAgent = departure{why: "the agents' account is deleted, and no other agent has come", unsure: true}

// departure says whether an agent comes to the node after this one. An agent that is told to end
// has to know: if none comes, this agent is the last one that can leave the node clean.
//
//	SIGTERM: update, rollback, restart of the pod, drain    the DaemonSet wants an agent here: the next one goes on
//	SIGTERM: the DaemonSet is deleted (GitOps prune, helm uninstall --no-hooks)   departure
//	SIGTERM: the node left the DaemonSet's selector                               departure, deselected
//	SIGTERM: the agents' account is deleted, or the agent's pod object            departure, unsure
//	the API server does not answer                                                not known
func (c *cluster) departure(ctx context.Context) departure {
	if c.cfg.DaemonSet == "" {
		return departure{}
	}
	ctx, cancel := context.WithTimeout(ctx, departureWait)
	defer cancel()
	d, err := c.askDeparture(ctx)
	if err != nil {
		c.cfg.Log.Warn("not known whether another agent comes to the node", "err", err)
	}
	return d
}

// askDeparture asks the API server for the departure. The error says that it is not known.
func (c *cluster) askDeparture(ctx context.Context) (departure, error) {
	ds, err := c.daemonSet(ctx)
	switch {
	case apierrors.IsNotFound(err), err == nil && ds.DeletionTimestamp != nil:
		return departure{why: "the DaemonSet of the agents is deleted"}, nil
	case apierrors.IsUnauthorized(err):
		return unknownAgent, nil
	case apierrors.IsForbidden(err):
		// All objects of the installation are being deleted, and the roles were first. A
		// role that lacks only this right is a mistake, and no reason to leave.
		switch _, nerr := c.coreNode(ctx); {
		case apierrors.IsForbidden(nerr):
			return departure{why: "the agents' rights are deleted"}, nil
		case apierrors.IsUnauthorized(nerr):
			return unknownAgent, nil
		}
		return departure{}, err
	case err != nil:
		return departure{}, err
	}
	node, err := c.coreNode(ctx)
	switch {
	case err != nil:
		return departure{}, err
	case selects(&ds.Spec.Template.Spec, node):
		return departure{}, nil
	case node.Labels[v1alpha1.LabelLeave] == "true":
		return departure{why: fmt.Sprintf("the node has the label %s=true", v1alpha1.LabelLeave), deselected: true}, nil
	}
	return departure{why: "the DaemonSet of the agents does not select the node any more", deselected: true}, nil
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

// selects says whether pods of a template may run on a node, by the template's node selector and
// required node affinity. An affinity that cannot be read counts as one that selects the node: it
// is valid, since the API server has checked it, but newer than this program. selects does not
// look at taints: most taints that drive pods off a node are for a while only.
func selects(pod *corev1.PodSpec, node *corev1.Node) bool {
	here, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: *pod}).Match(node)
	return here || err != nil
}

// exit is how an agent leaves its node clean. When the agent is told to end, the context ctx ends;
// the contexts called life last until the agent has drained.
type exit struct {
	c        *cluster
	leave    chan struct{} // closed when the agent is to leave the node clean
	departed chan struct{} // closed when that is because no other agent comes
	once     sync.Once
	// mayBeLast says that the agent leaves the node clean, unless a successor asks for the node
	// while the agent drains.
	mayBeLast atomic.Bool
}

func (c *cluster) newExit() *exit {
	return &exit{c: c, leave: make(chan struct{}), departed: make(chan struct{})}
}

// goAway removes what the agent itself does not know of, and then has the agent leave.
func (e *exit) goAway(life context.Context, why string) {
	e.once.Do(func() {
		e.c.cfg.Log.Info("the agent removes its rules and files from the node", "why", why)
		e.c.uninstallPlugin(life)
		if err := errors.Join(e.c.source.forget(), e.c.forgetDevices()); err != nil {
			e.c.cfg.Log.Error("files of the product are left on the node; remove them by hand", "err", err)
		}
		close(e.leave)
	})
}

// depart calls goAway because no other agent comes.
func (e *exit) depart(life context.Context, d departure) {
	e.c.departs.Store(&d)
	close(e.departed)
	e.c.source.leave()
	e.goAway(life, d.why)
}

// awaitUninstall has the agent leave when the SMCRNode says so.
func (e *exit) awaitUninstall(life context.Context) {
	select {
	case <-life.Done():
	case <-e.c.source.Uninstall():
	}
	select {
	case <-life.Done():
	case <-e.departed: // said by whoever closed it
	default:
		e.goAway(life, "the SMCRNode says that the product is uninstalled from the node")
	}
}

// awaitEnd returns when the agent is to stop: ctx has ended, and the API server was asked whether
// another agent comes.
func (e *exit) awaitEnd(ctx, life context.Context) {
	select {
	case <-life.Done():
		return
	case <-ctx.Done():
	}
	if !e.c.managesNode() || e.c.uninstalled.Load() {
		return
	}
	switch d := e.c.departure(life); {
	case d.why == "", !e.c.managesNode(): // there is a successor by now
	case d.unsure:
		e.c.cfg.Log.Info("the API server does not know the agent any more; the node is left clean unless another agent asks for it")
		e.mayBeLast.Store(true)
	default:
		e.depart(life, d)
	}
}

// noSuccessor has an agent depart that may be the last one, unless the API server says by now that
// another one comes.
func (e *exit) noSuccessor(life context.Context) {
	if d := e.c.departure(life); d.why != "" {
		e.depart(life, d)
	}
}

// reportDeparture waits until the reports are written that the node is clean, as far as the API
// server still allows that. If the agents are gone from all nodes, it then deletes the SMCRNode,
// since nobody else would. Else the controller writes what the agent could not write in time.
func (c *cluster) reportDeparture(ctx context.Context) {
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
