// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// TestSource_uninstall: the SMCRNode of this node alone says when to leave.
func TestSource_uninstall(t *testing.T) {
	w := newWorld(t)
	s := w.source(server.Config(t))
	s.First(t.Context())
	other := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: "other-" + w.node, Annotations: map[string]string{v1alpha1.AnnotationUninstall: "true"}}}
	own := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: w.node, Annotations: map[string]string{v1alpha1.AnnotationUninstall: "false"}}}
	w.create(other)
	w.create(own)
	select {
	case <-s.Uninstall():
		t.Fatal("told to leave by another node's object")
	case <-time.After(500 * time.Millisecond):
	}
	w.change(own, func() { own.Annotations[v1alpha1.AnnotationUninstall] = "true" })
	select {
	case <-s.Uninstall():
	case <-time.After(prompt):
		t.Fatal("not told to leave")
	}
}

// TestSource_uninstallBefore: an annotation that is there when the agent comes is obeyed if it was meant for the agent's
// pod, whose container started again. One for another pod may be of an uninstallation that failed long ago: it is
// taken off, and whoever still uninstalls annotates the SMCRNode again.
func TestSource_uninstallBefore(t *testing.T) {
	for pod, obeyed := range map[string]bool{"kube-smcr/agent-x": true, "kube-smcr/agent-w": false, "": false} {
		t.Run(fmt.Sprintf("of %q", pod), func(t *testing.T) {
			w := newWorld(t)
			own := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: w.node, Annotations: map[string]string{v1alpha1.AnnotationUninstall: "true", "other": "x"}}}
			own.Status.AgentPod = pod
			w.create(own)
			s := w.source(server.Config(t))
			s.First(t.Context())
			if !obeyed {
				within(t, slowly, func() string {
					if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(own), own); err != nil {
						return err.Error()
					}
					if _, ok := own.Annotations[v1alpha1.AnnotationUninstall]; ok || own.Annotations["other"] != "x" {
						return fmt.Sprintf("annotations %v", own.Annotations)
					}
					return ""
				})
				select {
				case <-s.Uninstall():
					t.Fatal("the agent leaves, though nobody uninstalls it")
				default:
				}
				w.change(own, func() { own.Annotations[v1alpha1.AnnotationUninstall] = "true" })
			}
			select {
			case <-s.Uninstall():
			case <-time.After(slowly):
				t.Fatal("not told to leave")
			}
		})
	}
}
