// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// reasonSecond is the reason of the event of a release that is not the first.
const reasonSecond = "SecondInstallation"

// An installation is where an add-on is installed: the namespace of its agents, and the name of
// their DaemonSet. Without a name, all DaemonSets in the namespace that selector selects belong
// to it.
type installation struct {
	namespace, daemonSet string
	selector             labels.Selector
}

func (i installation) has(ds *appsv1.DaemonSet) bool {
	return ds.Namespace == i.namespace && (i.daemonSet == "" && i.selector.Matches(labels.Set(ds.Labels)) || ds.Name == i.daemonSet)
}

// hasAgent says whether an agent is of the installation, by NAMESPACE/NAME of its pod as
// an SMCRNode has it. An SMCRNode that names no pod belongs to no other installation.
func (i installation) hasAgent(pod string) bool {
	namespace, name, ok := strings.Cut(pod, "/")
	return !ok || namespace == i.namespace && (i.daemonSet == "" || strings.HasPrefix(name, i.daemonSet+"-"))
}

// other returns two DaemonSets, nil where there is none: that of another installation which is
// older than this one, or has agents while this one has none; and that of this installation. Two
// installations would write the same objects, and their agents would take the nodes over from
// each other again and again.
func (i installation) other(ctx context.Context, c client.Reader) (other, own *appsv1.DaemonSet, err error) {
	all, err := labels.Parse(DefaultAgentSelector)
	if err != nil {
		return nil, nil, fmt.Errorf("agent selector: %w", err)
	}
	var list appsv1.DaemonSetList
	if err := c.List(ctx, &list, client.MatchingLabelsSelector{Selector: all}); err != nil {
		return nil, nil, fmt.Errorf("look for other installations: %w", err)
	}
	var others []*appsv1.DaemonSet
	for k := range list.Items {
		ds := &list.Items[k]
		switch {
		case i.has(ds):
			if own == nil || before(ds, own) {
				own = ds
			}
		case ds.DeletionTimestamp == nil:
			others = append(others, ds)
		}
	}
	if len(others) == 0 {
		return nil, own, nil
	}
	agents, err := haveAgents(ctx, c, all)
	if err != nil {
		return nil, nil, err
	}
	for _, ds := range others {
		if agents[ds.UID] && (other == nil || before(ds, other)) {
			other = ds
		}
	}
	if other != nil && own != nil && agents[own.UID] && before(own, other) {
		other = nil
	}
	return other, own, nil
}

// haveAgents returns the UIDs of the DaemonSets that have agents. Only pods in their node's network
// count, which Pod Security allows only administrators to make. Otherwise everybody who may make a
// DaemonSet could switch the controllers off: labels can be anybody's, and the status of a
// DaemonSet also counts pods that it adopted.
func haveAgents(ctx context.Context, c client.Reader, selector labels.Selector) (map[types.UID]bool, error) {
	var pods corev1.PodList
	if err := c.List(ctx, &pods, client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("look for the agents of other installations: %w", err)
	}
	out := map[types.UID]bool{}
	for k := range pods.Items {
		p := &pods.Items[k]
		if of := metav1.GetControllerOf(p); of != nil && p.Spec.HostNetwork {
			out[of.UID] = true
		}
	}
	return out, nil
}

// before orders DaemonSets by age.
func before(a, b *appsv1.DaemonSet) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return a.CreationTimestamp.Before(&b.CreationTimestamp)
	}
	return a.Namespace+"/"+a.Name < b.Namespace+"/"+b.Name
}

// first returns an error if this installation is not the first of the cluster. It says so
// once in an event of its DaemonSet.
func (s *service) first(ctx context.Context, api *rest.Config, i installation) error {
	scheme, err := NewScheme()
	if err != nil {
		return err
	}
	c, err := client.New(api, client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("connect to the API server: %w", err)
	}
	other, own, err := i.other(ctx, c)
	if err != nil {
		return err
	}
	if other == nil {
		s.refused.Store(nil)
		return nil
	}
	reason := "has agents, and this release none"
	if own == nil || before(other, own) {
		reason = "is older"
	}
	why := fmt.Sprintf("kube-smcr is installed already: DaemonSet %s/%s %s; this controller does nothing: uninstall one of the two", other.Namespace, other.Name, reason)
	if was := s.refused.Swap(&why); own != nil && (was == nil || *was != why) {
		if err := tell(ctx, c, own, reasonSecond, why); err != nil {
			s.config.Log.Warn("event not made", "err", err)
		}
	}
	return fmt.Errorf("%s", why)
}

// tell makes an event about a DaemonSet or a Node.
func tell(ctx context.Context, c client.Client, about client.Object, reason, message string) error {
	e := &corev1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: about.GetNamespace(), GenerateName: "kube-smcr-"},
		Type:                corev1.EventTypeWarning,
		Reason:              reason,
		Message:             message,
		Action:              "Observe",
		ReportingController: v1alpha1.ReporterController,
		ReportingInstance:   v1alpha1.ReporterController,
		EventTime:           metav1.NowMicro(),
		FirstTimestamp:      metav1.Now(),
		LastTimestamp:       metav1.Now(),
		Count:               1,
		InvolvedObject:      corev1.ObjectReference{APIVersion: "apps/v1", Kind: "DaemonSet", Namespace: about.GetNamespace(), Name: about.GetName(), UID: about.GetUID()},
	}
	if _, ok := about.(*corev1.Node); ok {
		e.Namespace, e.InvolvedObject.APIVersion, e.InvolvedObject.Kind = metav1.NamespaceDefault, "v1", "Node"
	}
	if err := c.Create(ctx, e); err != nil {
		return fmt.Errorf("make the event %s: %w", reason, err)
	}
	return nil
}
