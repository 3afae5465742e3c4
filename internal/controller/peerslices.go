// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// peers writes the SMCRPeerSlices of a policy.
type peers struct {
	client   client.Client
	recorder events.EventRecorder

	mu sync.Mutex
	// compiled are the policies with peer selectors. Every event of a pod is compared
	// with them.
	compiled  map[types.NamespacedName]*policy
	truncated map[types.NamespacedName]bool // policies whose event about too many peers was sent
}

func (r *peers) setUp(mgr ctrl.Manager) error {
	r.compiled, r.truncated = map[types.NamespacedName]*policy{}, map[types.NamespacedName]bool{}
	return ctrl.NewControllerManagedBy(mgr).Named("peers").WithOptions(options(1)).
		Watches(&v1alpha1.SMCRPolicy{}, mark(coalesce, r.keep)).
		Watches(&corev1.Pod{}, mark(coalesce, func(old, now *corev1.Pod) []types.NamespacedName {
			if old != nil && now != nil && sameForPeers(old, now) {
				return nil
			}
			return r.lookingAt(either(old, now).Namespace)
		})).
		Watches(&corev1.Service{}, mark(coalesce, func(old, now *corev1.Service) []types.NamespacedName {
			if old != nil && now != nil && maps.Equal(old.Spec.Selector, now.Spec.Selector) && slices.Equal(old.Spec.ClusterIPs, now.Spec.ClusterIPs) {
				return nil
			}
			return r.lookingAt(either(old, now).Namespace)
		})).
		Watches(&corev1.Namespace{}, mark(coalesce, r.lookingAtChanged)).
		Watches(&v1alpha1.SMCRPeerSlice{}, mark(coalesce, ownersOf)).
		Complete(r)
}

// ownersOf returns the keys of the policies that a slice belongs to, and belonged to before the
// event: whoever changes a slice may also change the name of its policy.
func ownersOf(old, now *v1alpha1.SMCRPeerSlice) []types.NamespacedName {
	var out []types.NamespacedName
	for _, s := range []*v1alpha1.SMCRPeerSlice{old, now} {
		if s == nil {
			continue
		}
		for _, name := range []string{s.Policy, s.Labels[v1alpha1.LabelPolicy]} {
			if k := (types.NamespacedName{Namespace: s.Namespace, Name: name}); name != "" && !slices.Contains(out, k) {
				out = append(out, k)
			}
		}
	}
	return out
}

// lookingAtChanged returns the keys of the policies whose peers an event of a namespace may change.
// An event of a pod leads to no policy while its namespace is not in the cache (see lookingAt): so
// a namespace that comes or goes leads to all policies that may have peers in it.
func (r *peers) lookingAtChanged(old, now *corev1.Namespace) []types.NamespacedName {
	if old != nil && now != nil && maps.Equal(old.Labels, now.Labels) {
		return nil
	}
	var out []types.NamespacedName
	for _, ns := range []*corev1.Namespace{old, now} {
		if ns != nil {
			out = append(out, r.lookingWith(ns.Name, ns.Labels)...)
		}
	}
	return out
}

// keep brings compiled in line with an event of a policy, and returns the policy's key.
func (r *peers) keep(old, now *v1alpha1.SMCRPolicy) []types.NamespacedName {
	p := either(old, now)
	name := client.ObjectKeyFromObject(p)
	if old != nil && now != nil && old.Generation == now.Generation && old.UID == now.UID {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.compiled, name)
	if now != nil {
		if c := compile(now); len(c.peers) > 0 {
			r.compiled[name] = c
		}
	}
	return []types.NamespacedName{name}
}

// lookingAt returns the keys of the policies whose peers may be pods of the namespace.
func (r *peers) lookingAt(namespace string) []types.NamespacedName {
	r.mu.Lock()
	idle := len(r.compiled) == 0
	r.mu.Unlock()
	if idle {
		return nil
	}
	var ns corev1.Namespace
	if err := r.client.Get(context.Background(), types.NamespacedName{Name: namespace}, &ns); err != nil {
		return nil // gone, or not known yet: the event of the namespace leads to the policies, see lookingAtChanged
	}
	return r.lookingWith(namespace, ns.Labels)
}

func (r *peers) lookingWith(namespace string, lbls map[string]string) []types.NamespacedName {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []types.NamespacedName
	for name, p := range r.compiled {
		if p.mayHavePeersIn(namespace, labels.Set(lbls)) {
			out = append(out, name)
		}
	}
	return out
}

// Reconcile brings the slices of a policy in line with its peer selectors.
func (r *peers) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var have v1alpha1.SMCRPeerSliceList
	if err := r.client.List(ctx, &have, client.InNamespace(req.Namespace)); err != nil {
		return ctrl.Result{}, fmt.Errorf("list the peer slices of policy %s: %w", req, err)
	}
	have.Items = slices.DeleteFunc(have.Items, func(s v1alpha1.SMCRPeerSlice) bool { return !isSliceOf(req.Name, &s) })
	noSlices := placement{remove: pointers(have.Items)}
	var obj v1alpha1.SMCRPolicy
	err := r.client.Get(ctx, req.NamespacedName, &obj)
	if apierrors.IsNotFound(err) || err == nil && !obj.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.carryOut(ctx, noSlices)
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("get policy %s: %w", req, err)
	}
	p := compile(&obj)
	if p.err != nil {
		return ctrl.Result{}, nil // the slices stay as they are; the policy's status says what is wrong
	}
	if len(p.peers) == 0 {
		return ctrl.Result{}, r.carryOut(ctx, noSlices)
	}
	v, err := r.view(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	addrs, err := resolvePeers(p, v)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("resolve the peers of policy %s: %w", req, err)
	}
	todo := placeAddresses(&obj, have.Items, addrs)
	r.tell(&obj, req.NamespacedName, todo.truncated)
	return ctrl.Result{}, r.carryOut(ctx, todo)
}

// view reads what the peers of a policy are computed from.
func (r *peers) view(ctx context.Context) (peerView, error) {
	var namespaces corev1.NamespaceList
	if err := r.client.List(ctx, &namespaces); err != nil {
		return peerView{}, fmt.Errorf("list namespaces: %w", err)
	}
	return peerView{
		namespaces: namespaces.Items,
		pods: func(ns string) ([]corev1.Pod, error) {
			var l corev1.PodList
			err := r.client.List(ctx, &l, client.InNamespace(ns))
			return l.Items, err
		},
		services: func(ns string) ([]corev1.Service, error) {
			var l corev1.ServiceList
			err := r.client.List(ctx, &l, client.InNamespace(ns))
			return l.Items, err
		},
	}, nil
}

// tell sends an event when the peers become too many for the slices.
func (r *peers) tell(obj *v1alpha1.SMCRPolicy, name types.NamespacedName, truncated int) {
	r.mu.Lock()
	told := r.truncated[name]
	r.truncated[name] = truncated > 0
	r.mu.Unlock()
	if truncated > 0 && !told {
		r.recorder.Eventf(obj, nil, corev1.EventTypeWarning, reasonTooManyPeers, "Resolve", "%s", tooManyPeers(truncated))
	}
}

// carryOut writes and deletes slices, in this order:
//
//	slices but the first  have all addresses that the first one does not have
//	the first slice       tells agents, by its generation, that the others are there
//	deletions             addresses of these slices are in others by now
//
// After an error carryOut does not begin what follows. If a slice has changed since it was read, or is
// gone, the API server refuses the write, and the key is reconciled again.
func (r *peers) carryOut(ctx context.Context, todo placement) error {
	if err := r.write(ctx, todo, func(s *v1alpha1.SMCRPeerSlice) bool { return !isFirst(s) }); err != nil {
		return err
	}
	if err := r.write(ctx, todo, isFirst); err != nil {
		return err
	}
	var errs []error
	for _, s := range todo.remove {
		errs = append(errs, wrapSlice("delete", s, client.IgnoreNotFound(r.client.Delete(ctx, s, client.Preconditions{UID: &s.UID}))))
	}
	return errors.Join(errs...)
}

// write creates and updates those slices of a placement for which only is true.
func (r *peers) write(ctx context.Context, todo placement, only func(*v1alpha1.SMCRPeerSlice) bool) error {
	var errs []error
	for _, s := range todo.create {
		if only(s) {
			errs = append(errs, wrapSlice("create", s, r.client.Create(ctx, s, client.FieldOwner(v1alpha1.ManagerController))))
		}
	}
	for _, s := range todo.update {
		if only(s) {
			errs = append(errs, wrapSlice("update", s, r.client.Update(ctx, s, client.FieldOwner(v1alpha1.ManagerController))))
		}
	}
	return errors.Join(errs...)
}

// isFirst says whether a slice is the first one of its policy.
func isFirst(s *v1alpha1.SMCRPeerSlice) bool { return s.Name == v1alpha1.FirstPeerSlice(s.Policy) }

func wrapSlice(what string, s *v1alpha1.SMCRPeerSlice, err error) error {
	if err != nil {
		return fmt.Errorf("%s peer slice %s/%s: %w", what, s.Namespace, s.Name, err)
	}
	return nil
}

func pointers[T any](items []T) []*T {
	out := make([]*T, len(items))
	for i := range items {
		out[i] = &items[i]
	}
	return out
}
