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

// mark returns a handler that queues the keys that an event concerns, to be looked at
// after a while. Until then further events for the same key change nothing. keys gets the
// object before and after the event: for a new object old is nil, for a deleted one now.
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

// key is the key of an object without namespace, for handlers that return keys; none for "".
func key(name string) []types.NamespacedName {
	if name == "" {
		return nil
	}
	return []types.NamespacedName{{Name: name}}
}

// either returns now, or old if there is no now.
func either[T any](old, now *T) *T {
	if now != nil {
		return now
	}
	return old
}

// options are the options of all reconcilers. A failed key is tried again after half a
// second, and then with growing pauses up to maxRestart, so that work goes on soon after
// the API server is back.
func options(passes int) controller.Options {
	return controller.Options{
		MaxConcurrentReconciles: passes,
		SkipNameValidation:      new(true), // a later manager of this process has the same names
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](coalesce/2, maxRestart),
	}
}
