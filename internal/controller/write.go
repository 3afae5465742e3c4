// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// statusOf is the apply configuration for the status of an object, without any other field. It has the object's UID: if the object is gone, the API server
// refuses it instead of making a new object. With a resource version the API server also refuses it if the object has changed since; "" is any.
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
