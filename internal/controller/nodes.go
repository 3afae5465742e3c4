// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// nodes keeps what the agent of a node wrote true when the agent is not alive any more, or the
// node is gone: the SMCRNode, the SMCRLinks and the annotation smcr.io/status of pods.
type nodes struct {
	client   client.Client
	live     client.Reader // reads from the API server, not from the cache
	recorder events.EventRecorder
	agents   agentPods
	leases   *leases // nil: the pods say whether agents live
	taint    bool    // remove the start-up taint
	// daemonSet is the name of the agents' DaemonSet; "": there is one.
	daemonSet string

	mu sync.Mutex
	// missing is since when the agent of a node is away, for nodes whose SMCRNode does not say
	// that yet, and for nodes without an SMCRNode.
	missing map[string]time.Time
}

func (r *nodes) setUp(mgr ctrl.Manager) error {
	r.missing = map[string]time.Time{}
	b := ctrl.NewControllerManagedBy(mgr).Named("nodes").WithOptions(options(nodePasses))
	if r.leases != nil {
		b = b.Watches(&coordinationv1.Lease{}, r.leases.queue())
	}
	return r.watchInstallation(b).
		Watches(&corev1.Node{}, mark(0, func(old, now *corev1.Node) []types.NamespacedName {
			if old != nil && now != nil && sameNode(old, now) {
				return nil
			}
			return key(either(old, now).Name)
		})).
		Watches(&v1alpha1.SMCRNode{}, mark(0, func(old, now *v1alpha1.SMCRNode) []types.NamespacedName {
			if now == nil || old != nil && old.UID == now.UID && sameConditions(old, now) {
				return nil
			}
			return key(now.Name)
		})).
		Watches(&corev1.Pod{}, mark(0, r.ofAgent)).
		Watches(&corev1.Pod{}, mark(coalesce, func(old, now *corev1.Pod) []types.NamespacedName {
			if now == nil || !mayCarry(now) || old != nil && mayCarry(old) && maps.Equal(old.Annotations, now.Annotations) {
				return nil
			}
			return key(now.Spec.NodeName) // its agent may be gone
		})).
		Watches(&v1alpha1.SMCRLink{}, mark(coalesce, func(old, now *v1alpha1.SMCRLink) []types.NamespacedName {
			if old != nil {
				return nil
			}
			return key(now.Status.Node) // the node may be gone
		})).
		Complete(r)
}

// ofAgent returns the nodes to look at after an event of a pod: those where an agent's pod came,
// went, or changed whether it is ready. If a watch missed that a pod was deleted and another one
// made under its name, one event is of both pods, and they may be on different nodes.
func (r *nodes) ofAgent(old, now *corev1.Pod) (out []types.NamespacedName) {
	was, is := old != nil && r.agents.contain(old), now != nil && r.agents.contain(now)
	if was && is && old.UID == now.UID && podReady(old) == podReady(now) && old.Spec.NodeName == now.Spec.NodeName {
		return nil
	}
	if was {
		out = key(old.Spec.NodeName)
	}
	if is && (!was || old.Spec.NodeName != now.Spec.NodeName) {
		out = append(out, key(now.Spec.NodeName)...)
	}
	return out
}

func nodeReady(n *corev1.Node) bool { return readiness(n) == corev1.ConditionTrue }

// readiness is the status of the condition Ready of a node, "" if it has none.
func readiness(n *corev1.Node) corev1.ConditionStatus {
	if c := nodeCondition(n, corev1.NodeReady); c != nil {
		return c.Status
	}
	return ""
}

// sameNode says whether a and b are equal in all of a Node that Reconcile depends on. They differ
// if the Node was deleted and made anew under its name.
func sameNode(a, b *corev1.Node) bool {
	return a.UID == b.UID && readiness(a) == readiness(b) && equality.Semantic.DeepEqual(startupTaints(a), startupTaints(b))
}

// sameConditions says whether a and b are equal in the conditions that Reconcile depends on.
func sameConditions(a, b *v1alpha1.SMCRNode) bool {
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionAgentAlive, v1alpha1.ConditionUninstalled} {
		x, y := meta.FindStatusCondition(a.Status.Conditions, kind), meta.FindStatusCondition(b.Status.Conditions, kind)
		if (x == nil) != (y == nil) || x != nil && (x.Status != y.Status || x.Reason != y.Reason) {
			return false
		}
	}
	return true
}

// Reconcile brings the objects of one node in line.
func (r *nodes) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var node corev1.Node
	err := r.client.Get(ctx, req.NamespacedName, &node)
	if apierrors.IsNotFound(err) {
		return ctrl.Result{}, r.sweep(ctx, req.Name)
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("get node %s: %w", req.Name, err)
	}
	var smcr v1alpha1.SMCRNode
	if err := r.client.Get(ctx, req.NamespacedName, &smcr); client.IgnoreNotFound(err) != nil {
		return ctrl.Result{}, fmt.Errorf("get SMCRNode %s: %w", req.Name, err)
	}
	smcr.Name = req.Name // also of a node without one: then it has no UID
	if end := uninstalled(&smcr); end != nil && end.Reason != v1alpha1.ReasonNodeLeft {
		return ctrl.Result{}, nil // it is being deleted
	}
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.MatchingFields{indexAgentNode: req.Name}); err != nil {
		return ctrl.Result{}, fmt.Errorf("list the agent's pods on %s: %w", req.Name, err)
	}
	if smcr.UID == "" || left(&smcr, pods.Items) {
		if wanted, err := r.installed(ctx); err != nil {
			return ctrl.Result{}, err
		} else if !wanted {
			return r.forget(ctx, &smcr, pods.Items)
		}
	}
	state, again := r.state(&smcr, &node, pods.Items)
	if state == nil {
		return ctrl.Result{RequeueAfter: again}, nil
	}
	if err := r.writeState(ctx, &smcr, *state); apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: coalesce}, nil // the change is on its way here
	} else if err != nil {
		return ctrl.Result{}, err
	}
	if state.Status != metav1.ConditionTrue {
		return r.clear(ctx, &smcr, again)
	}
	if r.taint && meta.IsStatusConditionTrue(smcr.Status.Conditions, v1alpha1.ConditionReady) {
		return ctrl.Result{RequeueAfter: again}, r.untaint(ctx, &node)
	}
	return ctrl.Result{RequeueAfter: again}, nil
}

// clear deletes and corrects what is left of the agent of a node that has none any more. again is after
// which time the node is to be looked at in any case; 0: at the next event.
func (r *nodes) clear(ctx context.Context, n *v1alpha1.SMCRNode, again time.Duration) (ctrl.Result, error) {
	links, err1 := r.removeLinks(ctx, n.Name)
	told, err2 := r.tellPods(ctx, n.Name, uninstalled(n) != nil)
	if links+told > 0 && again == 0 {
		again = coalesce // some may have changed since they were read
	}
	return ctrl.Result{RequeueAfter: again}, errors.Join(err1, err2)
}

// state returns the condition AgentAlive of a node, nil if it is not known yet, and after which
// time to look again; 0: at the next event.
func (r *nodes) state(n *v1alpha1.SMCRNode, node *corev1.Node, pods []corev1.Pod) (state *metav1.Condition, again time.Duration) {
	if left(n, pods) {
		r.found(n.Name)
		return new(condition(v1alpha1.ConditionAgentAlive, metav1.ConditionFalse, reasonAgentLeft, uninstalled(n).Message)), 0
	}
	v := noLease
	if r.leases != nil {
		v, again = r.leases.judge(v1alpha1.NodeLabel(node.Name, node.UID))
	}
	if state, ok := agentState(v, node, pods); ok {
		r.found(n.Name)
		return &state, again
	}
	byPods := podState(node, pods)
	if was := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionAgentAlive); v == unproved && was != nil {
		// What the former controller found holds until the agent's next renewal. But if it found that the
		// agent is gone, and the agent's pod is ready, the agent may have come back since: then its new
		// links and statuses must not be deleted, and nothing is decided before the renewal.
		if was.Status != metav1.ConditionTrue && byPods.Status == metav1.ConditionTrue {
			return nil, again
		}
		return was, again
	}
	if wait := r.grace(n, byPods); wait > 0 {
		return nil, wait
	}
	return &byPods, again
}

// grace is how much longer to wait before an agent without a Lease counts as gone: agentGrace for
// an agent that was there or has no pod, startGrace for the first agent of a node once it has a pod.
func (r *nodes) grace(n *v1alpha1.SMCRNode, state metav1.Condition) time.Duration {
	if state.Status == metav1.ConditionTrue || agentMissing(n) {
		r.found(n.Name)
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	since, ok := r.missing[n.Name]
	if !ok {
		since = time.Now()
		r.missing[n.Name] = since
	}
	if n.UID == "" && state.Reason != reasonAgentNoPod {
		return startGrace - time.Since(since)
	}
	return agentGrace - time.Since(since)
}

// found notes that it is known whether the agent of a node is there: nobody waits for it any more.
func (r *nodes) found(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.missing, node)
}

// writeState writes the condition AgentAlive into the SMCRNode. While the agent is gone, it also
// sets the conditions to Unknown that only an agent can know:
//
//	the agent ends     AgentAlive is False; Ready, Accelerating, DevicesHealthy, MetricsServed are Unknown, AgentGone
//	the agent is back  AgentAlive is True; the agent writes the others again
//	the agent leaves   the agent has written the others; AgentAlive is False
//
// Until an agent that is back has written its conditions, the controller keeps its own fields of
// them: without these fields the object would have conditions without a status.
func (r *nodes) writeState(ctx context.Context, n *v1alpha1.SMCRNode, state metav1.Condition) error {
	if n.UID == "" {
		return nil
	}
	was := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionAgentAlive)
	same := was != nil && was.Status == state.Status && was.Reason == state.Reason && was.Message == state.Message
	if same && (state.Status != metav1.ConditionTrue || !servesNoMore(n)) {
		return nil
	}
	turned := was == nil || was.Status != state.Status
	all := append([]metav1.Condition{state}, ofAgentGone(n, state)...)
	conditions := make([]any, 0, len(all))
	for i := range all {
		c := &all[i]
		c.LastTransitionTime = metav1.Now()
		if old := meta.FindStatusCondition(n.Status.Conditions, c.Type); old != nil && old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(c)
		if err != nil {
			return fmt.Errorf("encode the condition %s: %w", c.Type, err)
		}
		conditions = append(conditions, fields)
	}
	if err := r.apply(ctx, n, map[string]any{"conditions": conditions}); err != nil {
		return err
	}
	switch {
	case turned && state.Reason == reasonAgentLeft:
		r.recorder.Eventf(n, nil, corev1.EventTypeNormal, reasonAgentLeft, "Observe", "%s", state.Message)
	case turned && state.Status == metav1.ConditionFalse:
		r.recorder.Eventf(n, nil, corev1.EventTypeWarning, "AgentLost", "Observe", "%s", state.Message)
	case turned && was != nil:
		r.recorder.Eventf(n, nil, corev1.EventTypeNormal, "AgentBack", "Observe", "%s", state.Message)
	}
	return nil
}

// ofAgentGone are the agent's conditions that the controller writes together with state, which is
// AgentAlive: Unknown while the agent is gone, and, when it is back, those that it has not written
// again yet.
func ofAgentGone(n *v1alpha1.SMCRNode, state metav1.Condition) (out []metav1.Condition) {
	if uninstalled(n) != nil {
		return nil
	}
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionAccelerating, v1alpha1.ConditionDevicesHealthy, v1alpha1.ConditionMetricsServed} {
		c := meta.FindStatusCondition(n.Status.Conditions, kind)
		switch metrics := kind == v1alpha1.ConditionMetricsServed; {
		case metrics && (c == nil || state.Status == metav1.ConditionTrue && servesNoMore(n)): // the agent is to serve none
		case state.Status != metav1.ConditionTrue:
			out = append(out, condition(kind, metav1.ConditionUnknown, v1alpha1.ReasonAgentGone, "the agent of the node is gone: "+state.Message))
		case c != nil && c.Reason == v1alpha1.ReasonAgentGone:
			out = append(out, *c)
		}
	}
	return out
}

// servesNoMore says whether an agent that is back serves no metrics, while the former one did: it
// has written its other conditions, but not MetricsServed, which is still the controller's.
func servesNoMore(n *v1alpha1.SMCRNode) bool {
	ready, metrics := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionReady), meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionMetricsServed)
	return ready != nil && ready.Reason != v1alpha1.ReasonAgentGone && metrics != nil && metrics.Reason == v1alpha1.ReasonAgentGone
}

// removeLinks deletes the SMCRLinks of a node whose agent is gone. An SMCRLink that changed
// since it was read is left alone: an agent wrote it, and so is alive. An agent that was only
// away from the API server makes its SMCRLinks again. n is how many there were.
func (r *nodes) removeLinks(ctx context.Context, node string) (n int, err error) {
	var links v1alpha1.SMCRLinkList
	if err := r.client.List(ctx, &links, client.MatchingFields{indexLinkNode: node}); err != nil {
		return 0, fmt.Errorf("list the links of %s: %w", node, err)
	}
	var errs []error
	for i := range links.Items {
		l := &links.Items[i]
		errs = append(errs, r.remove(ctx, l, client.Preconditions{UID: &l.UID, ResourceVersion: &l.ResourceVersion}))
	}
	return len(links.Items), errors.Join(errs...)
}

// tellPods writes into the annotation smcr.io/status of the opted-in pods of a node that they have
// no agent; clean says that the last agent left the node clean. It writes as the field manager of
// agents, so that an agent that is back can also take the annotation away, and leaves pods alone
// that changed since they were read. n is how many pods were told.
func (r *nodes) tellPods(ctx context.Context, node string, clean bool) (n int, err error) {
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.MatchingFields{indexPodNode: node}); err != nil {
		return 0, fmt.Errorf("list the pods of %s: %w", node, err)
	}
	var errs []error
	for i := range pods.Items {
		pod := &pods.Items[i]
		if !mayCarry(pod) {
			continue
		}
		is, err := r.withoutAgent(ctx, pod, clean)
		if err != nil || is == pod.Annotations[v1alpha1.AnnotationStatus] {
			errs = append(errs, err)
			continue
		}
		if is != "" {
			n++
		}
		errs = append(errs, writePodStatus(ctx, r.client, pod, is))
	}
	return n, errors.Join(errs...)
}

// apply writes fields of the status of an SMCRNode. If the SMCRNode has changed since it was read,
// the error is a conflict, because an agent that came back may just have written the conditions
// itself:
//
//	the controller reads the SMCRNode   Ready is Unknown, AgentGone
//	the agent is back and writes        Ready is True
//	the controller writes AgentAlive    and would write back the Ready that it has read
func (r *nodes) apply(ctx context.Context, n *v1alpha1.SMCRNode, status map[string]any) error {
	config, err := statusOf("SMCRNode", n, status, n.ResourceVersion)
	if err != nil {
		return err
	}
	err = r.client.Apply(ctx, config, client.FieldOwner(v1alpha1.ManagerController), client.ForceOwnership)
	if err == nil || apierrors.IsNotFound(err) { // deleted since it was read
		return nil
	}
	return fmt.Errorf("write the status of SMCRNode %s: %w", n.Name, err)
}

// sweep deletes the objects of a node that is gone. Kubernetes' garbage collector deletes
// the objects that the node owns; sweep is for objects without an owner, and for clusters
// whose garbage collector is slow.
func (r *nodes) sweep(ctx context.Context, node string) error {
	name := types.NamespacedName{Name: node}
	switch err := r.live.Get(ctx, name, &corev1.Node{}); {
	case err == nil:
		return nil // the node is new; its event will come
	case !apierrors.IsNotFound(err):
		return fmt.Errorf("find out whether node %s is gone: %w", node, err)
	}
	r.found(node)
	var links v1alpha1.SMCRLinkList
	if err := r.client.List(ctx, &links, client.MatchingFields{indexLinkNode: node}); err != nil {
		return fmt.Errorf("list the links of %s: %w", node, err)
	}
	var errs []error
	for i := range links.Items {
		errs = append(errs, r.remove(ctx, &links.Items[i], client.Preconditions{UID: &links.Items[i].UID}))
	}
	var smcr v1alpha1.SMCRNode
	if err := r.client.Get(ctx, name, &smcr); err == nil {
		errs = append(errs, r.remove(ctx, &smcr, client.Preconditions{UID: &smcr.UID}))
	}
	return errors.Join(errs...)
}

func (r *nodes) remove(ctx context.Context, obj client.Object, unless client.Preconditions) error {
	err := r.client.Delete(ctx, obj, unless)
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return fmt.Errorf("delete %T %s: %w", obj, obj.GetName(), err)
}

// untaint takes the start-up taint off a node, and no other taint. It reads the node from
// the API server, which refuses the write if the node has changed since: otherwise a taint
// that somebody adds in between would be lost.
func (r *nodes) untaint(ctx context.Context, cached *corev1.Node) error {
	if _, had := withoutTaint(cached.Spec.Taints); !had {
		return nil
	}
	var node corev1.Node
	if err := r.live.Get(ctx, client.ObjectKeyFromObject(cached), &node); err != nil {
		return client.IgnoreNotFound(err)
	}
	rest, had := withoutTaint(node.Spec.Taints)
	if !had {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"taints": rest},
	})
	if err != nil {
		return fmt.Errorf("encode the taints of node %s: %w", node.Name, err)
	}
	err = r.client.Patch(ctx, &node, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(v1alpha1.ManagerController))
	if err != nil {
		return fmt.Errorf("take the taint %s off node %s: %w", v1alpha1.TaintAgentNotReady, node.Name, err)
	}
	r.recorder.Eventf(&node, nil, corev1.EventTypeNormal, "AgentReady", "Untaint", "took the taint %s off", v1alpha1.TaintAgentNotReady)
	return nil
}
