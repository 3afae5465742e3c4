// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// TestMark: a key that an event concerns is looked at after a while, once, however many events there
// were until then. Events of other kinds of objects concern nobody.
func TestMark(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
		var got []string
		name := func(p *corev1.Pod) string {
			if p == nil {
				return "-"
			}
			return p.Name
		}
		h := mark(time.Minute, func(old, now *corev1.Pod) []types.NamespacedName {
			got = append(got, name(old)+" "+name(now))
			return key(either(old, now).Spec.NodeName)
		})
		a, b, node := newPod("shop", "a", "n1", ""), newPod("shop", "b", "n1", ""), &corev1.Node{}
		nowhere := newPod("shop", "c", "", "")
		h.Create(t.Context(), event.CreateEvent{Object: a}, q)
		h.Update(t.Context(), event.UpdateEvent{ObjectOld: a, ObjectNew: b}, q)
		h.Delete(t.Context(), event.DeleteEvent{Object: b}, q)
		h.Create(t.Context(), event.CreateEvent{Object: nowhere}, q)
		h.Create(t.Context(), event.CreateEvent{Object: node}, q)
		h.Update(t.Context(), event.UpdateEvent{ObjectOld: node, ObjectNew: a}, q)
		h.Update(t.Context(), event.UpdateEvent{ObjectOld: a, ObjectNew: node}, q)
		h.Delete(t.Context(), event.DeleteEvent{Object: node}, q)
		if d := cmp.Diff([]string{"- a", "a b", "b -", "- c"}, got); d != "" {
			t.Errorf("asked about (-want +got):\n%s", d)
		}
		<-time.After(time.Minute - 1)
		synctest.Wait()
		if n := q.Len(); n != 0 {
			t.Errorf("%d keys are due before the while is over", n)
		}
		<-time.After(time.Second)
		synctest.Wait()
		if n := q.Len(); n != 1 {
			t.Fatalf("%d keys are due, want 1", n)
		}
		if r, _ := q.Get(); r.NamespacedName != (types.NamespacedName{Name: "n1"}) {
			t.Errorf("key %v", r)
		}
		q.ShutDown()
		synctest.Wait()
	})
}

// TestOptions: a key that fails is tried again soon, and then ever more rarely, up to maxRestart.
func TestOptions(t *testing.T) {
	l := options(3).RateLimiter
	r := reconcile.Request{NamespacedName: types.NamespacedName{Name: "n1"}}
	want := coalesce / 2
	for range 20 {
		if got := l.When(r); got != want {
			t.Fatalf("again after %v, want %v", got, want)
		}
		want = min(2*want, maxRestart)
	}
	l.Forget(r)
	if got := l.When(r); got != coalesce/2 {
		t.Errorf("after it worked: again after %v, want %v", got, coalesce/2)
	}
	if n := options(3).MaxConcurrentReconciles; n != 3 {
		t.Errorf("%d at once, want 3", n)
	}
}
