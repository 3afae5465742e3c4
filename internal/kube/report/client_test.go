// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// answers is an API server that answers each path with an object or an error, and
// remembers the requests.
type answers struct {
	byPath map[string]any

	mu       sync.Mutex // guards what is below
	requests []string
	bodies   []string
}

func (a *answers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	a.requests = append(a.requests, r.Method+" "+r.URL.RequestURI()+" "+r.Header.Get("Content-Type"))
	a.bodies = append(a.bodies, string(body))
	a.mu.Unlock()
	answer := a.byPath[r.URL.Path]
	w.Header().Set("Content-Type", "application/json")
	if status, ok := answer.(metav1.Status); ok {
		w.WriteHeader(int(status.Code))
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// connect returns a client of a.
func connect(t *testing.T, a *answers) *client {
	t.Helper()
	srv := httptest.NewServer(a)
	t.Cleanup(srv.Close)
	c, err := newClient(&rest.Config{Host: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, r := range []rest.Interface{c.core, c.smcr} {
			r.(*rest.RESTClient).Client.CloseIdleConnections()
		}
	})
	return c
}

const (
	pathOfNode     = "/api/v1/nodes/" + node
	pathOfSMCRNode = "/apis/smcr.io/v1alpha1/smcrnodes/" + node
	pathOfLinks    = "/apis/smcr.io/v1alpha1/smcrlinks"
)

func notFound(resource, name string) metav1.Status {
	return apierrors.NewNotFound(schema.GroupResource{Group: "smcr.io", Resource: resource}, name).ErrStatus
}

// unknownKind is the answer to a request for objects of a kind without a CRD.
func unknownKind() metav1.Status {
	return metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound,
		Code: http.StatusNotFound, Message: "the server could not find the requested resource", Details: &metav1.StatusDetails{},
	}
}

func TestClient_load(t *testing.T) {
	core := corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: node, UID: "7"}}
	group := v1alpha1.GroupVersion().String()
	links := v1alpha1.SMCRLinkList{
		TypeMeta: metav1.TypeMeta{APIVersion: group, Kind: "SMCRLinkList"},
		Items:    []v1alpha1.SMCRLink{{ObjectMeta: metav1.ObjectMeta{Name: "node-a-1"}}},
	}
	smcrNode := v1alpha1.SMCRNode{TypeMeta: metav1.TypeMeta{APIVersion: group, Kind: "SMCRNode"}, ObjectMeta: metav1.ObjectMeta{Name: node}}
	for _, tt := range []struct {
		name       string
		core, smcr any
		wantErr    bool
		wantNode   bool
	}{
		{name: "all are there", core: core, smcr: smcrNode, wantNode: true},
		{name: "no SMCRNode yet", core: core, smcr: notFound(resourceSMCRNodes, node)},
		{name: "no CRD yet", core: core, smcr: unknownKind(), wantErr: true},
		{name: "no node", core: notFound(resourceNodes, node), smcr: smcrNode, wantErr: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := &answers{byPath: map[string]any{pathOfNode: tt.core, pathOfSMCRNode: tt.smcr, pathOfLinks: links}}
			f, err := connect(t, a).load(t.Context(), node)
			if tt.wantErr {
				if err == nil {
					t.Fatalf("found %+v, want an error", f)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if f.owner != "7" || (f.node != nil) != tt.wantNode || len(f.links) != 1 || f.links[0].Name != "node-a-1" {
				t.Errorf("found %+v", f)
			}
			want := []string{"GET " + pathOfNode + " ", "GET " + pathOfSMCRNode + " ", "GET " + pathOfLinks + "?labelSelector=smcr.io%2Fnode%3Dnode-a "}
			if diff := cmp.Diff(want, a.requests); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}

// Everything is written by server-side apply, as the agent, and takes what others
// have written of the agent's fields.
func TestClient_apply(t *testing.T) {
	for _, tt := range []struct {
		key  key
		path string
	}{
		{key{kind: kindNode, name: node}, pathOfSMCRNode},
		{key{kind: kindLink, name: "node-a-1"}, pathOfLinks + "/node-a-1"},
		{key{kind: kindPod, namespace: "shop", name: "web"}, "/api/v1/namespaces/shop/pods/web/status"},
	} {
		t.Run(tt.key.String(), func(t *testing.T) {
			a := &answers{byPath: map[string]any{tt.path: metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: "1", ResourceVersion: "2"}}}}
			got, err := connect(t, a).apply(t.Context(), tt.key, map[string]string{"kind": "X"})
			if err != nil || got.UID != "1" || got.ResourceVersion != "2" {
				t.Errorf("it is %+v, %v", got, err)
			}
			want := "PATCH " + tt.path + "?fieldManager=" + v1alpha1.ManagerAgent + "&force=true application/apply-patch+yaml"
			if len(a.requests) != 1 || a.requests[0] != want || a.bodies[0] != `{"kind":"X"}` {
				t.Errorf("requests %q with %q, want %q", a.requests, a.bodies, want)
			}
		})
	}
}

func TestClient_remove(t *testing.T) {
	const path = pathOfLinks + "/node-a-1"
	for _, tt := range []struct {
		name   string
		answer any
		fails  bool
	}{
		{"it is there", metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusSuccess, Code: http.StatusOK}, false},
		{"it is gone", notFound(resourceSMCRLinks, "node-a-1"), false},
		{"its kind is gone", unknownKind(), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := &answers{byPath: map[string]any{path: tt.answer}}
			if err := connect(t, a).remove(t.Context(), "node-a-1"); (err != nil) != tt.fails {
				t.Errorf("remove: %v", err)
			}
		})
	}
}

func TestIsAboutObject(t *testing.T) {
	pods := schema.GroupResource{Resource: resourcePods}
	for _, tt := range []struct {
		name string
		err  error
		want bool
	}{
		{"no answer", errors.New("connection refused"), false},
		{"refused by a webhook", apierrors.NewForbidden(pods, "web", nil), true},
		{"invalid", apierrors.NewInvalid(schema.GroupKind{Kind: kindOfPods}, "web", nil), true},
		{"gone", apierrors.NewNotFound(pods, "web"), true},
		{"too much", apierrors.NewTooManyRequests("slow down", 1), false},
		{"no token", apierrors.NewUnauthorized("expired"), false},
		{"broken", apierrors.NewInternalError(errors.New("etcd")), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := isAboutObject(tt.err); got != tt.want {
				t.Errorf("%v: %t, want %t", tt.err, got, tt.want)
			}
		})
	}
}

func TestIsInternal(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		want bool
	}{
		{"no answer", errors.New("connection refused"), false},
		{"a webhook without its backend", fmt.Errorf("write: %w", apierrors.NewInternalError(errors.New("failed calling webhook"))), true},
		{"overloaded", apierrors.NewServiceUnavailable("later"), false},
		{"slow", apierrors.NewTimeoutError("etcd", 1), false},
		{"refused", apierrors.NewForbidden(schema.GroupResource{}, "web", nil), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := isInternal(tt.err); got != tt.want {
				t.Errorf("%v: %t, want %t", tt.err, got, tt.want)
			}
		})
	}
}
