// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
}

func (r *podEvents) setUp(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("pod-events").WithOptions(options(1)).
		Watches(&corev1.Event{}, mark(0, func(old, now *corev1.Event) []types.NamespacedName {
			if old != nil || now.Related == nil {
				return nil
			}
			return []types.NamespacedName{client.ObjectKeyFromObject(now)}
		})).
		Complete(r)
}

// Reconcile passes one event on. Doing it twice does no harm: the name of the new event is
// made from the agent's event, so the second write finds it there.
func (r *podEvents) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var said corev1.Event
	if err := r.client.Get(ctx, req.NamespacedName, &said); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	age := time.Since(said.CreationTimestamp.Time)
	if said.Related == nil || age > maxEventAge {
		return ctrl.Result{}, nil
	}
	var pod corev1.Pod
	err := r.client.Get(ctx, types.NamespacedName{Namespace: said.Related.Namespace, Name: said.Related.Name}, &pod)
	switch {
	case apierrors.IsNotFound(err) && age < podWait:
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
