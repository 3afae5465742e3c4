// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/kube/report"
	"github.com/smcr-io/kube-smcr/internal/preflight"
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

// TestSource_uninstallOutdated: the agent's own name in the SMCRNode does not make the annotation of an earlier uninstallation its own:
// neither when the list of SMCRNodes comes after the agent has begun to report, nor while the annotation is not off.
func TestSource_uninstallOutdated(t *testing.T) {
	w := newWorld(t)
	cfg := w.clusterConfig()
	own := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: w.node, Annotations: map[string]string{v1alpha1.AnnotationUninstall: "true"}}}
	own.Status.AgentPod = "kube-smcr/agent-w"
	w.create(own)
	listed, removed := make(chan struct{}), make(chan struct{})
	rc := server.Config(t)
	rc.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(r *http.Request) (*http.Response, error) {
			until := map[string]<-chan struct{}{"GET": listed, "PATCH": removed}[r.Method]
			if until != nil && strings.Contains(r.URL.Path, "/smcrnodes") {
				select {
				case <-until:
				case <-r.Context().Done():
					return nil, r.Context().Err()
				}
			}
			return next.RoundTrip(r)
		})
	})
	c := &cluster{cfg: cfg, source: w.source(rc)}
	looks := make(chan struct{})
	r, err := report.New(report.Config{
		Client: cfg.REST, Node: w.node, AgentPod: cfg.Pod, Log: cfg.Log, Preflight: func(context.Context) preflight.Report { return preflight.Report{} },
		Source: func() report.Snapshot {
			select {
			case looks <- struct{}{}:
			case <-t.Context().Done():
			}
			s := c.snapshot()
			s.Status.Started = time.Now()
			return s
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	wg.Go(func() { r.Run(t.Context()) })
	agentPod := func(annotated bool) string {
		t.Helper()
		if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(own), own); err != nil {
			t.Fatal(err)
		}
		if _, is := own.Annotations[v1alpha1.AnnotationUninstall]; annotated && !is {
			t.Fatal("no annotation any more")
		}
		return own.Status.AgentPod
	}
	for _, step := range []chan struct{}{listed, removed} {
		for range 4 { // one before the API server's objects are read, and what the next one finds is written before the one after
			r.Poke()
			<-looks
		}
		if got := agentPod(true); got != "kube-smcr/agent-w" {
			t.Errorf("the SMCRNode is of %s already", got)
		}
		close(step)
	}
	within(t, slowly, func() string {
		select {
		case <-looks:
		default:
		}
		if got := agentPod(false); got != cfg.Pod {
			return fmt.Sprintf("the SMCRNode is of %s", got)
		}
		return ""
	})
	select {
	case <-c.source.Uninstall():
		t.Error("the agent leaves, though nobody uninstalls it")
	default:
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestSource_noteGone: an SMCRNode that is deleted takes an outdated annotation with it.
func TestSource_noteGone(t *testing.T) {
	node := func(name string) *v1alpha1.SMCRNode {
		return &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	for _, tt := range []struct {
		name string
		gone any
		want bool
	}{
		{"another node's", node("other"), true},
		{"its own", node("own"), false},
		{"its own, by a list", cache.DeletedFinalStateUnknown{Key: "own", Obj: node("own")}, false},
	} {
		s := &Source{cfg: Config{Node: "own"}, outdated: true}
		if s.noteGone(tt.gone); s.isOutdated() != tt.want {
			t.Errorf("%s: outdated %t", tt.name, !tt.want)
		}
	}
}
