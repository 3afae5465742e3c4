// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
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

// nodes looks after the objects that the agents write: whether the agent is
// still there, and the node itself.
type nodes struct {
	client   client.Client
	live     client.Reader // past the cache
	recorder events.EventRecorder
	agents   agentPods
	taint    bool // remove the start-up taint

	mu sync.Mutex
	// missing is since when the agent of a node is away, as long as nothing says
	// so yet.
	missing map[string]time.Time
}

func (r *nodes) setUp(mgr ctrl.Manager) error {
	r.missing = map[string]time.Time{}
	return ctrl.NewControllerManagedBy(mgr).Named("nodes").WithOptions(options(nodePasses)).
		Watches(&corev1.Node{}, mark(0, func(old, now *corev1.Node) []types.NamespacedName {
			if old != nil && now != nil && nodeReady(old) == nodeReady(now) && len(old.Spec.Taints) == len(now.Spec.Taints) {
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
		Watches(&corev1.Pod{}, mark(0, func(old, now *corev1.Pod) []types.NamespacedName {
			p := either(old, now)
			if !r.agents.contain(p) || old != nil && now != nil && podReady(old) == podReady(now) && old.Spec.NodeName == now.Spec.NodeName {
				return nil
			}
			return key(p.Spec.NodeName)
		})).
		Watches(&v1alpha1.SMCRLink{}, mark(coalesce, func(old, now *v1alpha1.SMCRLink) []types.NamespacedName {
			if old != nil {
				return nil
			}
			return key(now.Status.Node) // of a node that is gone?
		})).
		Complete(r)
}

func nodeReady(n *corev1.Node) bool {
	c := nodeCondition(n, corev1.NodeReady)
	return c != nil && c.Status == corev1.ConditionTrue
}

func sameConditions(a, b *v1alpha1.SMCRNode) bool {
	for _, kind := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionAgentAlive, v1alpha1.ConditionUninstalled} {
		x, y := meta.FindStatusCondition(a.Status.Conditions, kind), meta.FindStatusCondition(b.Status.Conditions, kind)
		if (x == nil) != (y == nil) || x != nil && x.Status != y.Status {
			return false
		}
	}
	return true
}

// Reconcile looks at one node.
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
	if err := r.client.Get(ctx, req.NamespacedName, &smcr); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err) // no agent was there yet
	}
	if meta.IsStatusConditionTrue(smcr.Status.Conditions, v1alpha1.ConditionUninstalled) {
		return ctrl.Result{}, nil // about to go
	}
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.MatchingFields{indexAgentNode: req.Name}); err != nil {
		return ctrl.Result{}, fmt.Errorf("list the agent's pods on %s: %w", req.Name, err)
	}
	state := agentState(&node, pods.Items)
	if wait := r.grace(&smcr, state.Status); wait > 0 {
		return ctrl.Result{RequeueAfter: wait}, nil
	}
	if err := r.writeState(ctx, &smcr, state); err != nil {
		return ctrl.Result{}, err
	}
	if r.taint && state.Status == metav1.ConditionTrue && meta.IsStatusConditionTrue(smcr.Status.Conditions, v1alpha1.ConditionReady) {
		return ctrl.Result{}, r.untaint(ctx, &node)
	}
	return ctrl.Result{}, nil
}

// grace says how long to wait before it is said that the agent is away.
func (r *nodes) grace(n *v1alpha1.SMCRNode, alive metav1.ConditionStatus) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if alive == metav1.ConditionTrue || agentMissing(n) {
		delete(r.missing, n.Name)
		return 0
	}
	since, ok := r.missing[n.Name]
	if !ok {
		since = time.Now()
		r.missing[n.Name] = since
	}
	return agentGrace - time.Since(since)
}

// writeState says in the SMCRNode whether the agent is alive. When that turns,
// its links come first: if that is interrupted, it is done again. They become
// Unknown, or what they were before. A link that was written in between was
// written by an agent that is alive in spite of all, so it is left alone.
func (r *nodes) writeState(ctx context.Context, n *v1alpha1.SMCRNode, state metav1.Condition) error {
	was := meta.FindStatusCondition(n.Status.Conditions, v1alpha1.ConditionAgentAlive)
	if was != nil && was.Status == state.Status && was.Reason == state.Reason && was.Message == state.Message {
		return nil
	}
	turned := was == nil || was.Status != state.Status
	if turned {
		if err := r.turnLinks(ctx, n.Name, state.Status == metav1.ConditionTrue); err != nil {
			return err
		}
	}
	state.LastTransitionTime = metav1.Now()
	if !turned {
		state.LastTransitionTime = was.LastTransitionTime
	}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&state)
	if err != nil {
		return fmt.Errorf("encode the condition %s: %w", state.Type, err)
	}
	if err := r.apply(ctx, "SMCRNode", n, map[string]any{"conditions": []any{fields}}, nil); err != nil {
		return err
	}
	switch {
	case turned && state.Status == metav1.ConditionFalse:
		r.recorder.Eventf(n, nil, corev1.EventTypeWarning, "AgentLost", "Observe", "%s", state.Message)
	case turned && was != nil:
		r.recorder.Eventf(n, nil, corev1.EventTypeNormal, "AgentBack", "Observe", "%s", state.Message)
	}
	r.mu.Lock()
	delete(r.missing, n.Name)
	r.mu.Unlock()
	return nil
}

// turnLinks marks the links of a node whose agent is gone Unknown, or takes that
// back. An agent writes a link when it changes, and so would not take it back
// itself.
func (r *nodes) turnLinks(ctx context.Context, node string, alive bool) error {
	var links v1alpha1.SMCRLinkList
	if err := r.client.List(ctx, &links, client.MatchingFields{indexLinkNode: node}); err != nil {
		return fmt.Errorf("list the links of %s: %w", node, err)
	}
	var errs []error
	for i := range links.Items {
		l := &links.Items[i]
		unknown, before := l.Status.State == v1alpha1.LinkUnknown, l.Annotations[v1alpha1.AnnotationStateBefore]
		switch {
		case !alive && !unknown:
			errs = append(errs, r.apply(ctx, "SMCRLink", l, map[string]any{"state": string(v1alpha1.LinkUnknown)},
				map[string]string{v1alpha1.AnnotationStateBefore: string(l.Status.State)}))
		case alive && unknown && before != "":
			errs = append(errs, r.apply(ctx, "SMCRLink", l, map[string]any{"state": before}, nil)) // without the annotation, which goes
		}
	}
	return errors.Join(errs...)
}

// apply writes fields of the status of an object that exists.
func (r *nodes) apply(ctx context.Context, kind string, obj client.Object, status map[string]any, annotations map[string]string) error {
	config, err := statusOf(kind, obj, status, annotations)
	if err != nil {
		return err
	}
	err = r.client.Apply(ctx, config, client.FieldOwner(v1alpha1.ManagerController), client.ForceOwnership)
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // deleted meanwhile
		return nil
	}
	return fmt.Errorf("write the status of %s %s: %w", kind, obj.GetName(), err)
}

// sweep deletes the objects of a node that is gone. They are owned by the node,
// so that this is for what has no owner, and for clusters whose garbage
// collector is slow.
func (r *nodes) sweep(ctx context.Context, node string) error {
	name := types.NamespacedName{Name: node}
	switch err := r.live.Get(ctx, name, &corev1.Node{}); {
	case err == nil:
		return nil // new; its event is on the way
	case !apierrors.IsNotFound(err):
		return fmt.Errorf("look whether node %s is gone: %w", node, err)
	}
	r.mu.Lock()
	delete(r.missing, node)
	r.mu.Unlock()
	var links v1alpha1.SMCRLinkList
	if err := r.client.List(ctx, &links, client.MatchingFields{indexLinkNode: node}); err != nil {
		return fmt.Errorf("list the links of %s: %w", node, err)
	}
	var errs []error
	for i := range links.Items {
		errs = append(errs, r.remove(ctx, &links.Items[i]))
	}
	var smcr v1alpha1.SMCRNode
	if err := r.client.Get(ctx, name, &smcr); err == nil {
		errs = append(errs, r.remove(ctx, &smcr))
	}
	return errors.Join(errs...)
}

func (r *nodes) remove(ctx context.Context, obj client.Object) error {
	uid := obj.GetUID()
	err := r.client.Delete(ctx, obj, client.Preconditions{UID: &uid})
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return fmt.Errorf("delete %T %s: %w", obj, obj.GetName(), err)
}

// untaint takes the start-up taint off a node, and no other. The node is read
// anew, and the write refused if it changed since: somebody may add a taint now.
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
