// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// writePodStatus writes the annotation smcr.io/status of a pod, in the place of its agent: a
// pod that changed since it was read, or is gone, is left alone. "" takes away what agents or
// controllers wrote, whatever else changed.
func writePodStatus(ctx context.Context, c client.Client, pod *corev1.Pod, status string) error {
	u := &unstructured.Unstructured{Object: map[string]any{}}
	u.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Pod"))
	u.SetNamespace(pod.Namespace)
	u.SetName(pod.Name)
	u.SetUID(pod.UID)
	if status != "" {
		u.SetResourceVersion(pod.ResourceVersion)
		u.SetAnnotations(map[string]string{v1alpha1.AnnotationStatus: status})
	}
	err := c.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership)
	if err == nil || isReplaced(err) {
		return nil
	}
	return fmt.Errorf("write the status of pod %s/%s: %w", pod.Namespace, pod.Name, err)
}

// statusOf is the apply configuration for the status of an object, without any other field. It has
// the object's UID: if the object is gone, the API server refuses the write instead of making a
// new object. With a version, which is a resource version, the API server also refuses the write
// if the object has changed since; "": any.
func statusOf(kind string, obj client.Object, status any, version string) (runtime.ApplyConfiguration, error) {
	fields, ok := status.(map[string]any)
	if !ok {
		var err error
		if fields, err = runtime.DefaultUnstructuredConverter.ToUnstructured(status); err != nil {
			return nil, fmt.Errorf("encode the status of %s %s: %w", kind, obj.GetName(), err)
		}
	}
	u := &unstructured.Unstructured{Object: map[string]any{"status": fields}}
	u.SetGroupVersionKind(v1alpha1.GroupVersion().WithKind(kind))
	u.SetName(obj.GetName())
	u.SetNamespace(obj.GetNamespace())
	u.SetUID(obj.GetUID())
	u.SetResourceVersion(version)
	return client.ApplyConfigurationFromUnstructured(u), nil
}

// isReplaced tells whether the API server refused a write because the object was deleted or changed
// since it was read, or deleted and made anew, with another UID.
func isReplaced(err error) bool {
	cause, ok := apierrors.StatusCause(err, metav1.CauseTypeFieldValueInvalid)
	return apierrors.IsNotFound(err) || apierrors.IsConflict(err) || ok && cause.Field == "metadata.uid"
}
