// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Labels that the chart's objects have.
const (
	labelInstance = "app.kubernetes.io/instance"
	labelPartOf   = "app.kubernetes.io/part-of"
	labelChart    = "helm.sh/chart"
	product       = "kube-smcr"
)

// notStarted says why there are no agents; "" if there is no installation, or nothing can be said. Either a pod of the
// installation does not start: for example, if the image is missing, the first Job waits, and there
// is no DaemonSet yet. Or the agents' DaemonSet has no pods, because it selects no node, or because
// Pod Security refuses them, for example.
func (c *Cluster) notStarted(ctx context.Context) string {
	of, err := c.installed(ctx)
	if err != nil {
		return "" // the caller's list of agents did not fail, so it is a matter of a moment, or of rights
	}
	for p, err := range c.list(ctx, metav1.NamespaceAll, metav1.ListOptions{LabelSelector: productLabel}) {
		if err != nil {
			return "" // as above
		}
		if stuck(p) != "" && of.has(p) && c.ofChart(ctx, p) {
			return fmt.Sprintf("the installation waits for pod %s/%s, which does not start: %s", p.Namespace, p.Name, stuck(p))
		}
	}
	if of == (installation{}) {
		return ""
	}
	return fmt.Sprintf("the DaemonSet %s/%s has no pod: kubectl -n %[1]s describe daemonset %[2]s", of.namespace, of.daemonSet)
}

// An installation is a release of the chart, with its DaemonSet of agents. The zero value stands for
// any release that has no DaemonSet yet.
type installation struct{ namespace, release, daemonSet string }

func (i installation) has(p *corev1.Pod) bool {
	return i == installation{} || p.Namespace == i.namespace && p.Labels[labelInstance] == i.release
}

// installed returns the installation whose DaemonSet of agents is the oldest. The controllers of other
// installations do nothing.
func (c *Cluster) installed(ctx context.Context) (installation, error) {
	all, err := c.client.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{LabelSelector: agentLabels, Limit: listLimit})
	if err != nil {
		return installation{}, err
	}
	var out installation
	var oldest metav1.Time
	for i := range all.Items {
		ds := &all.Items[i]
		if ds.DeletionTimestamp != nil || !chartMade(ds) || out != (installation{}) && !ds.CreationTimestamp.Before(&oldest) {
			continue
		}
		out, oldest = installation{ds.Namespace, ds.Labels[labelInstance], ds.Name}, ds.CreationTimestamp
	}
	return out, nil
}

// ofChart says whether a pod was made for an object of the chart, of the same release. The pod's own
// labels do not say so, as anybody may give them to a pod.
func (c *Cluster) ofChart(ctx context.Context, p *corev1.Pod) bool {
	o, err := c.owner(ctx, p)
	return err == nil && o != nil && chartMade(o) && o.GetLabels()[labelInstance] == p.Labels[labelInstance]
}

// chartMade says whether an object has the labels of the chart's objects.
func chartMade(o metav1.Object) bool {
	l := o.GetLabels()
	return l[labelPartOf] == product && strings.HasPrefix(l[labelChart], product+"-")
}

// owner returns the Job, DaemonSet or Deployment that a pod was made for, nil if there is none.
func (c *Cluster) owner(ctx context.Context, o metav1.Object) (metav1.Object, error) {
	ref := metav1.GetControllerOf(o)
	if ref == nil {
		return nil, nil //nolint:nilnil // it was made for itself
	}
	var owner metav1.Object
	var err error
	switch ns := o.GetNamespace(); ref.Kind {
	case "Job":
		owner, err = c.client.BatchV1().Jobs(ns).Get(ctx, ref.Name, metav1.GetOptions{})
	case "DaemonSet":
		owner, err = c.client.AppsV1().DaemonSets(ns).Get(ctx, ref.Name, metav1.GetOptions{})
	case "Deployment":
		owner, err = c.client.AppsV1().Deployments(ns).Get(ctx, ref.Name, metav1.GetOptions{})
	case "ReplicaSet":
		owner, err = c.client.AppsV1().ReplicaSets(ns).Get(ctx, ref.Name, metav1.GetOptions{})
	default:
		return nil, nil //nolint:nilnil // nothing that the chart makes
	}
	if err != nil || owner.GetUID() != ref.UID {
		return nil, err
	}
	if ref.Kind == "ReplicaSet" {
		return c.owner(ctx, owner)
	}
	return owner, nil
}
