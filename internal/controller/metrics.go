// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// metrics counts the objects in the caches when it is scraped. Only the leader has
// values, so that sums over the replicas are right.
type metrics struct {
	log *slog.Logger
	// reader is set while this replica leads.
	reader atomic.Pointer[client.Reader]

	leader, policies, links, nodes, pods *prometheus.Desc
}

func newMetrics(log *slog.Logger) *metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kube_smcr_controller_"+name, help, labels, nil)
	}
	return &metrics{
		log:      log,
		leader:   desc("leader", "1 on the replica that leads. Only it has the other metrics."),
		policies: desc("policies", "SMCRPolicies by the status of their condition Ready.", "ready"),
		links:    desc("links", "SMCRLinks, one per link group and side, by state and redundancy.", "state", "redundancy"),
		nodes:    desc("nodes", "SMCRNodes by whether their agent is alive, or Left them on purpose, and connections can be on SMC-R.", "agent_alive", "accelerating"),
		pods:     desc("pods", "Opted-in running pods by status and, of those on plain TCP, reason.", "status", "reason"),
	}
}

// lead sets the caches whose objects are counted; nil when the replica stops leading.
func (m *metrics) lead(r client.Reader) {
	if r == nil {
		m.reader.Store(nil)
		return
	}
	m.reader.Store(&r)
}

// Describe implements [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.leader, m.policies, m.links, m.nodes, m.pods} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	set := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	r := m.reader.Load()
	if r == nil {
		set(m.leader, 0)
		return
	}
	set(m.leader, 1)
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	if err := m.count(ctx, *r, set); err != nil {
		m.log.Warn("objects not counted; the metrics of this scrape are incomplete", "err", err)
	}
}

// A gauge gives one of the metrics a value.
type gauge func(d *prometheus.Desc, v int, labels ...string)

// count counts the objects of each kind, up to the first error.
func (m *metrics) count(ctx context.Context, r client.Reader, set gauge) error {
	for _, count := range []func(context.Context, client.Reader, gauge) error{m.countPolicies, m.countLinks, m.countNodes, m.countPods} {
		if err := count(ctx, r, set); err != nil {
			return err
		}
	}
	return nil
}

func (m *metrics) countPolicies(ctx context.Context, r client.Reader, set gauge) error {
	var policies v1alpha1.SMCRPolicyList
	if err := r.List(ctx, &policies); err != nil {
		return err
	}
	ready := map[metav1.ConditionStatus]int{metav1.ConditionTrue: 0, metav1.ConditionFalse: 0}
	for i := range policies.Items {
		ready[conditionStatus(policies.Items[i].Status.Conditions, v1alpha1.ConditionReady)]++
	}
	for status, n := range ready {
		set(m.policies, n, string(status))
	}
	return nil
}

func (m *metrics) countLinks(ctx context.Context, r client.Reader, set gauge) error {
	var links v1alpha1.SMCRLinkList
	if err := r.List(ctx, &links); err != nil {
		return err
	}
	type linkKind struct {
		state      v1alpha1.LinkState
		redundancy v1alpha1.Redundancy
	}
	kinds := map[linkKind]int{}
	for i := range links.Items {
		kinds[linkKind{links.Items[i].Status.State, links.Items[i].Status.Redundancy}]++
	}
	for k, n := range kinds {
		set(m.links, n, string(k.state), string(k.redundancy))
	}
	return nil
}

func (m *metrics) countNodes(ctx context.Context, r client.Reader, set gauge) error {
	var nodes v1alpha1.SMCRNodeList
	if err := r.List(ctx, &nodes); err != nil {
		return err
	}
	states := map[[2]string]int{}
	for i := range nodes.Items {
		c := nodes.Items[i].Status.Conditions
		alive := string(conditionStatus(c, v1alpha1.ConditionAgentAlive))
		if is := meta.FindStatusCondition(c, v1alpha1.ConditionAgentAlive); is != nil && is.Reason == reasonAgentLeft {
			alive = "Left"
		}
		states[[2]string{alive, string(conditionStatus(c, v1alpha1.ConditionAccelerating))}]++
	}
	for s, n := range states {
		set(m.nodes, n, s[0], s[1])
	}
	return nil
}

func (m *metrics) countPods(ctx context.Context, r client.Reader, set gauge) error {
	var namespaces corev1.NamespaceList
	if err := r.List(ctx, &namespaces); err != nil {
		return err
	}
	annotations := make(map[string]map[string]string, len(namespaces.Items))
	for i := range namespaces.Items {
		annotations[namespaces.Items[i].Name] = namespaces.Items[i].Annotations
	}
	var pods corev1.PodList
	if err := r.List(ctx, &pods); err != nil {
		return err
	}
	n := map[[2]string]int{{v1alpha1.PodStatusEnabled, ""}: 0}
	for i := range pods.Items {
		pod := &pods.Items[i]
		enabled, _ := v1alpha1.OptIn(pod.Annotations, annotations[pod.Namespace])
		enabled = enabled || claimed(pod)
		if pod.Spec.HostNetwork { // whether policies opt it in, its agent says by the status
			enabled = asks(pod) && pod.Annotations[v1alpha1.AnnotationStatus] != ""
		}
		if !enabled || !runs(pod) {
			continue
		}
		status, reason := podStatus(pod)
		n[[2]string{status, counted(reason)}]++
	}
	for k, c := range n {
		set(m.pods, c, k[0], k[1])
	}
	return nil
}

func conditionStatus(conditions []metav1.Condition, kind string) metav1.ConditionStatus {
	if c := meta.FindStatusCondition(conditions, kind); c != nil {
		return c.Status
	}
	return metav1.ConditionUnknown
}
