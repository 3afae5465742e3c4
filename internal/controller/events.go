// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// mark returns a handler that marks the keys that an event concerns, to be
// looked at after a while. Until then further events cost nothing. Of a new
// object old is nil, of a deleted one now is.
func mark[T client.Object](after time.Duration, keys func(old, now T) []types.NamespacedName) handler.EventHandler {
	var none T
	add := func(q queue, old, now T) {
		for _, k := range keys(old, now) {
			q.AddAfter(reconcile.Request{NamespacedName: k}, after)
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
			if o, ok := e.Object.(T); ok {
				add(q, none, o)
			}
		},
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			o, ok1 := e.ObjectOld.(T)
			n, ok2 := e.ObjectNew.(T)
			if ok1 && ok2 {
				add(q, o, n)
			}
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) {
			if o, ok := e.Object.(T); ok {
				add(q, o, none)
			}
		},
	}
}

// key is a key without namespace.
func key(name string) []types.NamespacedName {
	if name == "" {
		return nil
	}
	return []types.NamespacedName{{Name: name}}
}

// either returns the object that an event is about, the later one of two.
func either[T any](old, now *T) *T {
	if now != nil {
		return now
	}
	return old
}

// options are those of all reconcilers. A failed key is tried again after half a
// second and then less often, but never later than maxRestart: an API server
// that was away for an hour is to be used as soon as it is back.
func options(passes int) controller.Options {
	again := true
	return controller.Options{
		MaxConcurrentReconciles: passes,
		SkipNameValidation:      &again, // a later manager of this process has the same names
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](coalesce/2, maxRestart),
	}
}
