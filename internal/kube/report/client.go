// SPDX-License-Identifier: Apache-2.0

package report

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// Resources.
const (
	resourceNodes     = "nodes"
	resourcePods      = "pods"
	resourceEvents    = "events"
	resourceSMCRNodes = "smcrnodes"
	resourceSMCRLinks = "smcrlinks"
	resourceLeases    = "leases"
)

// server is what the reporter asks of the API server; tests have a fake.
type server interface {
	// load reads what an earlier agent of the node left.
	load(ctx context.Context, node string) (*found, error)
	// apply writes an object, and returns its metadata after the write.
	apply(ctx context.Context, k key, body any) (metav1.ObjectMeta, error)
	// remove deletes an SMCRLink. It is no error if there is none.
	remove(ctx context.Context, name string) error
	// watch calls see for each change of the SMCRNode with the node's name and of the
	// SMCRLinks with the node's label, until ctx ends.
	watch(ctx context.Context, node, label string, see func(observation))
	// event creates an event.
	event(ctx context.Context, e *corev1.Event) error
	// renew writes the Lease of the agent.
	renew(ctx context.Context, lease *coordinationv1.Lease) error
}

// found is what the API server has of a node.
type found struct {
	owner types.UID // of the core Node
	node  *v1alpha1.SMCRNode
	links []v1alpha1.SMCRLink
}

// client is the real API server.
type client struct {
	core, smcr, leases rest.Interface
	params             runtime.ParameterCodec
}

func newClient(config *rest.Config) (_ *client, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("client of the API server: %w", err)
		}
	}()
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	if err := errors.Join(corev1.AddToScheme(scheme), coordinationv1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	apart := rest.CopyConfig(config) // see client.renew
	apart.NextProtos = []string{"http/1.1"}
	ofLeases, err := rest.HTTPClientFor(apart)
	if err != nil {
		return nil, err
	}
	codecs := serializer.NewCodecFactory(scheme).WithoutConversion()
	restClient := func(path string, gv schema.GroupVersion, transport *http.Client) (rest.Interface, error) {
		c := rest.CopyConfig(config)
		c.APIPath, c.GroupVersion, c.NegotiatedSerializer = path, &gv, codecs
		c.QPS, c.RateLimiter = -1, nil // the queue limits
		return rest.RESTClientForConfigAndClient(c, transport)
	}
	c := &client{params: runtime.NewParameterCodec(scheme)}
	if c.core, err = restClient("/api", corev1.SchemeGroupVersion, transport); err != nil {
		return nil, err
	}
	if c.smcr, err = restClient("/apis", v1alpha1.GroupVersion(), transport); err != nil {
		return nil, err
	}
	if c.leases, err = restClient("/apis", coordinationv1.SchemeGroupVersion, ofLeases); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *client) load(ctx context.Context, node string) (*found, error) {
	var core corev1.Node
	if err := c.core.Get().Resource(resourceNodes).Name(node).MaxRetries(0).Do(ctx).Into(&core); err != nil {
		return nil, fmt.Errorf("read node %s: %w", node, err)
	}
	f := &found{owner: core.UID, node: &v1alpha1.SMCRNode{}}
	err := c.smcr.Get().Resource(resourceSMCRNodes).Name(node).MaxRetries(0).Do(ctx).Into(f.node)
	if isGone(err) {
		f.node, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read SMCRNode %s: %w", node, err)
	}
	var list v1alpha1.SMCRLinkList
	options := metav1.ListOptions{LabelSelector: v1alpha1.LabelNode + "=" + v1alpha1.NodeLabel(node, core.UID)}
	if err := c.smcr.Get().Resource(resourceSMCRLinks).VersionedParams(&options, c.params).MaxRetries(0).Do(ctx).Into(&list); err != nil {
		return nil, fmt.Errorf("list the SMCRLinks of node %s: %w", node, err)
	}
	f.links = list.Items
	return f, nil
}

func (c *client) apply(ctx context.Context, k key, body any) (metav1.ObjectMeta, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return metav1.ObjectMeta{}, fmt.Errorf("encode %s: %w", k, err)
	}
	options := metav1.PatchOptions{FieldManager: v1alpha1.ManagerAgent, Force: new(true)}
	var req *rest.Request
	switch k.kind {
	case kindNode:
		req = c.smcr.Patch(types.ApplyPatchType).Resource(resourceSMCRNodes)
	case kindLink:
		req = c.smcr.Patch(types.ApplyPatchType).Resource(resourceSMCRLinks)
	case kindPod:
		req = c.core.Patch(types.ApplyPatchType).Namespace(k.namespace).Resource(resourcePods).SubResource("status")
	}
	var out metav1.PartialObjectMetadata
	answer := req.Name(k.name).VersionedParams(&options, c.params).Body(data).MaxRetries(0).Do(ctx)
	raw, err := answer.Raw()
	if err == nil {
		err = json.Unmarshal(raw, &out)
	} else {
		err = answer.Error() // in the API server's words
	}
	if err != nil {
		return metav1.ObjectMeta{}, fmt.Errorf("write %s: %w", k, err)
	}
	return out.ObjectMeta, nil
}

func (c *client) remove(ctx context.Context, name string) error {
	err := c.smcr.Delete().Resource(resourceSMCRLinks).Name(name).Body(&metav1.DeleteOptions{}).MaxRetries(0).Do(ctx).Error()
	if err != nil && !isGone(err) {
		return fmt.Errorf("delete SMCRLink %s: %w", name, err)
	}
	return nil
}

func (c *client) event(ctx context.Context, e *corev1.Event) error {
	err := c.core.Post().Namespace(e.Namespace).Resource(resourceEvents).Body(e).MaxRetries(0).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("send event %s about %s %s: %w", e.Reason, e.InvolvedObject.Kind, e.InvolvedObject.Name, err)
	}
	return nil
}

// isGone tells whether the object that an answer is about does not exist. It is false
// if the object's whole kind does not exist, because the CRD is missing.
func isGone(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Name != ""
}

// isAnother tells whether the API server refused a write because the object was deleted, and another
// one made under its name.
func isAnother(err error) bool {
	cause, ok := apierrors.StatusCause(err, metav1.CauseTypeFieldValueInvalid)
	return ok && cause.Field == "metadata.uid"
}

// isAboutObject tells whether the API server refused the object that was to be written. Other
// errors are about the API server itself or the network, except those for which [isInternal] is
// true: they may be about either.
func isAboutObject(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	switch code := status.Status().Code; code {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooManyRequests:
		return false
	default:
		return code >= http.StatusBadRequest && code < http.StatusInternalServerError
	}
}

// isInternal tells whether the API server answered with an internal error (500). Its cause may
// concern one object only, such as a webhook for the object's namespace, or all, such as etcd.
func isInternal(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code == http.StatusInternalServerError
}
