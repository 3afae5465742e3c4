// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// podEvents passes the events of agents about pods on to those pods. An agent has no right
// to write events in the pods' namespaces: the API server cannot see in an event on which
// node its pod runs, so one agent could write about the pods of all nodes. The controller
// knows the pod, and checks that it runs on the agent's node. The chart's admission policy
// makes sure that the node in an agent's event is the agent's own.
type podEvents struct {
	client client.Client
	log    *slog.Logger

	mu sync.Mutex // guards what is below
	// newest is the creation time of the youngest event in the first list.
	newest time.Time
	// pending are the events that Reconcile is not done with.
	pending map[types.NamespacedName]arrival
}

// arrival is how an event came to this controller.
type arrival struct {
	listed bool      // with the first list, so it may be old
	waits  time.Time // since when its pod is waited for
}

func (r *podEvents) setUp(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("pod-events").WithOptions(options(1)).
		Watches(&corev1.Event{}, handler.Funcs{CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) {
			if said, ok := e.Object.(*corev1.Event); ok && said.Related != nil {
				q.Add(reconcile.Request{NamespacedName: r.arrived(said, e.IsInInitialList)})
			}
		}}).
		Complete(r)
}

// arrived notes an event that is to be passed on, and returns its key.
func (r *podEvents) arrived(said *corev1.Event, listed bool) types.NamespacedName {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pending == nil {
		r.pending = map[types.NamespacedName]arrival{}
	}
	if made := said.CreationTimestamp.Time; listed && made.After(r.newest) {
		r.newest = made
	}
	k := client.ObjectKeyFromObject(said)
	r.pending[k] = arrival{listed: listed}
	return k
}

// old says whether an event was made long before this controller began. It compares times of the
// API server with each other, never with the time of this machine.
func (r *podEvents) old(said *corev1.Event) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pending[client.ObjectKeyFromObject(said)].listed && r.newest.Sub(said.CreationTimestamp.Time) > maxEventAge
}

// waits returns for how long an event has waited for its pod.
func (r *podEvents) waits(event types.NamespacedName) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.pending[event]
	if a.waits.IsZero() {
		a.waits = time.Now()
		r.pending[event] = a
	}
	return time.Since(a.waits)
}

// Reconcile passes one event on, and forgets it unless that is to be tried again.
func (r *podEvents) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	result, err := r.pass(ctx, req.NamespacedName)
	if err == nil && result.RequeueAfter == 0 {
		r.mu.Lock()
		delete(r.pending, req.NamespacedName)
		r.mu.Unlock()
	}
	return result, err
}

// pass passes one event on. Doing it twice does no harm: the name of the new event is
// made from the agent's event, so the second write finds it there.
func (r *podEvents) pass(ctx context.Context, name types.NamespacedName) (ctrl.Result, error) {
	var said corev1.Event
	if err := r.client.Get(ctx, name, &said); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if said.Related == nil || r.old(&said) {
		return ctrl.Result{}, nil
	}
	var pod corev1.Pod
	err := r.client.Get(ctx, types.NamespacedName{Namespace: said.Related.Namespace, Name: said.Related.Name}, &pod)
	switch {
	case apierrors.IsNotFound(err) && r.waits(name) < podWait:
		return ctrl.Result{RequeueAfter: podRetry}, nil
	case apierrors.IsNotFound(err):
		return ctrl.Result{}, nil // it is gone
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("get pod %s/%s: %w", said.Related.Namespace, said.Related.Name, err)
	}
	if !mayTellOf(&said, &pod) {
		r.log.Warn("event of an agent not passed on: it is about a pod that is not on the agent's node", "agent", said.InvolvedObject.Name, "node", said.Source.Host,
			"pod", pod.Namespace+"/"+pod.Name)
		return ctrl.Result{}, nil
	}
	err = r.client.Create(ctx, passedOn(&said, &pod))
	if err == nil || apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, fmt.Errorf("pass an event on to pod %s/%s: %w", pod.Namespace, pod.Name, err)
}

// mayTellOf says whether the pod runs on the node of the agent that made the event.
func mayTellOf(said *corev1.Event, pod *corev1.Pod) bool {
	return said.ReportingController == v1alpha1.ReporterAgent && strings.HasPrefix(said.Reason, "SMCR") &&
		said.Source.Host != "" && said.Source.Host == pod.Spec.NodeName && said.Related.UID == pod.UID
}

// passedOn is the event that the pod gets.
func passedOn(said *corev1.Event, pod *corev1.Pod) *eventsv1.Event {
	about := corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	number := strings.ReplaceAll(string(said.UID), "-", "")
	name := strings.TrimRight(pod.Name[:min(len(pod.Name), maxEventName)], ".-")
	return &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: name + "." + number},
		EventTime:  metav1.MicroTime{Time: said.LastTimestamp.Time},
		Regarding:  about, Related: &said.InvolvedObject, Reason: said.Reason, Note: said.Message, Type: said.Type, Action: "Carry",
		ReportingController: v1alpha1.ReporterController, ReportingInstance: said.Source.Host[:min(len(said.Source.Host), maxInstance)],
	}
}
