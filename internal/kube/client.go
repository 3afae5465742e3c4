// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"reflect"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// noIndexes: informers want an empty map.
func noIndexes() cache.Indexers { return cache.Indexers{} }

// restClient makes a client for one API group.
func restClient(base *rest.Config, gv schema.GroupVersion, path string, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		return nil, fmt.Errorf("register the objects of %v: %w", gv, err)
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	c := rest.CopyConfig(base)
	c.GroupVersion, c.APIPath = &gv, path
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	if gv == corev1.SchemeGroupVersion {
		// A third of the processor time of JSON. Custom resources have JSON only.
		c.ContentType = runtime.ContentTypeProtobuf
		c.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	}
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("client for %v: %w", gv, err)
	}
	return client, nil
}

// informers are of the objects that configurations are made of.
type informers struct {
	pods, namespaces, policies, slices cache.SharedIndexInformer
	// nodes is of all SMCRNodes, which say which node has a device's address, and whether this
	// node is to be left clean.
	nodes cache.SharedIndexInformer
}

// needed are the informers by the names of their objects. Without the first list of each there is
// no configuration.
func (i informers) needed() map[string]cache.SharedIndexInformer {
	return map[string]cache.SharedIndexInformer{
		"pods": i.pods, "namespaces": i.namespaces, "smcrpolicies": i.policies, "smcrpeerslices": i.slices,
		"smcrnodes": i.nodes,
	}
}

// asNode is how to read pods with the rights of the node instead of the agent's own. The
// API server lets a pod impersonate the node that it runs on and no other (impersonation
// of the associated node), and shows a node no pods but its own.
func asNode(base *rest.Config, node string) *rest.Config {
	c := rest.CopyConfig(base)
	c.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + node}
	return c
}

// newInformers makes the informers of a node; the caller runs them. pods says how to
// connect to read pods, base how to connect for all else.
func newInformers(base, pods *rest.Config, node string) (informers, error) {
	core, err := restClient(pods, corev1.SchemeGroupVersion, "/api", corev1.AddToScheme)
	if err != nil {
		return informers{}, err
	}
	smcr, err := restClient(base, v1alpha1.GroupVersion(), "/apis", v1alpha1.AddToScheme)
	if err != nil {
		return informers{}, err
	}
	meta, err := metadata.NewForConfig(base)
	if err != nil {
		return informers{}, fmt.Errorf("metadata client: %w", err)
	}
	ofNode := func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	}
	anything := func(*metav1.ListOptions) {}
	informer := func(c cache.Getter, resource string, narrow func(*metav1.ListOptions), example runtime.Object) cache.SharedIndexInformer {
		lw := cache.NewFilteredListWatchFromClient(c, resource, metav1.NamespaceAll, narrow)
		return cache.NewSharedIndexInformer(lw, example, 0, noIndexes())
	}
	return informers{
		pods: informer(core, "pods", ofNode, &corev1.Pod{}),
		namespaces: metadatainformer.NewFilteredMetadataInformer(meta,
			corev1.SchemeGroupVersion.WithResource("namespaces"), metav1.NamespaceAll, 0, noIndexes(), nil).Informer(),
		policies: informer(smcr, "smcrpolicies", anything, &v1alpha1.SMCRPolicy{}),
		slices:   informer(smcr, "smcrpeerslices", anything, &v1alpha1.SMCRPeerSlice{}),
		nodes:    informer(smcr, "smcrnodes", anything, &v1alpha1.SMCRNode{}),
	}, nil
}

// annotationHash on the mirror of a static pod in the API server is the UID that the pod has on the
// node: kubelet gives it to container runtimes and CNI plugins.
const annotationHash = "kubernetes.io/config.hash"

// trim drops what this package does not use of an object. Informers call trim before
// they store an object, so it may change the object.
func trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Pod:
		meta := trimMeta(o.ObjectMeta)
		meta.DeletionTimestamp = o.DeletionTimestamp
		if hash := configHash(o); hash != "" {
			if meta.Annotations == nil {
				meta.Annotations = map[string]string{}
			}
			meta.Annotations[annotationHash], meta.Annotations[corev1.MirrorPodAnnotationKey] = hash, hash
		}
		return &corev1.Pod{
			ObjectMeta: meta,
			Spec:       corev1.PodSpec{HostNetwork: o.Spec.HostNetwork},
			Status:     corev1.PodStatus{Phase: o.Status.Phase, PodIPs: o.Status.PodIPs},
		}, nil
	case *metav1.PartialObjectMetadata:
		o.ObjectMeta = trimMeta(o.ObjectMeta)
		o.Labels = nil
	case *v1alpha1.SMCRPolicy:
		deleted := o.DeletionTimestamp
		o.ObjectMeta, o.Status = trimMeta(o.ObjectMeta), v1alpha1.SMCRPolicyStatus{ObservedGeneration: o.Status.ObservedGeneration, PeersGeneration: o.Status.PeersGeneration}
		o.Annotations, o.Labels, o.DeletionTimestamp = nil, nil, deleted
	case *v1alpha1.SMCRNode:
		var status v1alpha1.SMCRNodeStatus
		for _, d := range o.Status.Devices {
			status.Devices = append(status.Devices, v1alpha1.NodeDevice{Name: d.Name, Address: d.Address, OtherAddresses: d.OtherAddresses})
		}
		for _, d := range o.Status.PodDevices {
			if d.Address != "" { // most are free
				status.PodDevices = append(status.PodDevices, v1alpha1.NodePodDevice{ID: d.ID, Address: d.Address})
			}
		}
		o.ObjectMeta = trimMeta(o.ObjectMeta)
		if o.Annotations[v1alpha1.AnnotationUninstall] != "" {
			status.AgentPod = o.Status.AgentPod // few have it
		}
		o.Status, o.Labels = status, nil
	case *v1alpha1.SMCRPeerSlice:
		owner := metav1.GetControllerOf(o)
		o.ObjectMeta = trimMeta(o.ObjectMeta)
		o.Annotations, o.Labels = nil, nil
		if owner != nil {
			o.OwnerReferences = []metav1.OwnerReference{{UID: owner.UID, Controller: owner.Controller}}
		}
	}
	return obj, nil
}

// sameButVersion says whether two states of an object differ at most in their resource version.
// trim has dropped what is not used of both.
func sameButVersion(was, is any) bool {
	old, ok1 := was.(runtime.Object)
	now, ok2 := is.(metav1.Object)
	if !ok1 || !ok2 {
		return false
	}
	same, ok := old.DeepCopyObject().(metav1.Object)
	if !ok {
		return false
	}
	same.SetResourceVersion(now.GetResourceVersion())
	return reflect.DeepEqual(same, now)
}

func trimMeta(m metav1.ObjectMeta) metav1.ObjectMeta {
	out := metav1.ObjectMeta{
		Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion,
		Labels: m.Labels, CreationTimestamp: m.CreationTimestamp, Generation: m.Generation,
	}
	for _, key := range []string{v1alpha1.AnnotationEnabled, v1alpha1.AnnotationStatus, v1alpha1.AnnotationUninstall} {
		if v, ok := m.Annotations[key]; ok {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[key] = v
		}
	}
	return out
}
