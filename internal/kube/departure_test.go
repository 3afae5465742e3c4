// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agent"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// daemonSet makes the DaemonSet of the agents in the world's namespace.
func (w *world) daemonSet() *appsv1.DaemonSet {
	w.t.Helper()
	l := map[string]string{"app": "agent"}
	ds := &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "agent"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: l}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: "i"}}},
			},
		},
	}
	w.create(ds)
	return ds
}

// TestRunAgent_departure: an agent that ends cleans its node if no other agent is to come to the node,
// and only then. If agents go on to run on other nodes, the SMCRNode and the pods of this node say that
// it has no agent.
func TestRunAgent_departure(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Nftables)
	for _, tt := range []struct {
		name string
		end  func(w *world, ds *appsv1.DaemonSet) // before the agent ends
		want bool                                 // whether the node is clean in the end
		says string                               // in the SMCRNode of a clean node; "": the SMCRNode is deleted
	}{
		{"another agent comes", func(*world, *appsv1.DaemonSet) {}, false, ""},
		{"deleted", func(w *world, ds *appsv1.DaemonSet) {
			if err := w.client.Delete(w.t.Context(), ds); err != nil {
				w.t.Fatal(err)
			}
		}, true, ""},
		{"not selected any more", func(w *world, ds *appsv1.DaemonSet) {
			w.change(ds, func() { ds.Spec.Template.Spec.NodeSelector = map[string]string{"pool": "roce"} })
		}, true, "does not select the node any more"},
		{"told to leave", func(w *world, ds *appsv1.DaemonSet) {
			w.change(ds, func() {
				stay := corev1.NodeSelectorRequirement{Key: v1alpha1.LabelLeave, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"true"}}
				terms := []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{stay}}}
				ds.Spec.Template.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
					RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms},
				}}
			})
			n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node}}
			w.change(n, func() { n.Labels = map[string]string{v1alpha1.LabelLeave: "true"} })
		}, true, "the node has the label smcr.io/leave=true"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			p := w.pod("a", enabled("true"))
			cfg := w.clusterConfig()
			ds := w.daemonSet()
			cfg.Pod, cfg.DaemonSet = w.namespace+"/agent-x", ds.Name
			stop := w.runAgent(cfg)
			node := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: w.node}}
			within(t, slowly, func() string {
				if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(node), node); err != nil {
					return err.Error()
				}
				if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
					return err.Error()
				}
				if !meta.IsStatusConditionTrue(node.Status.Conditions, v1alpha1.ConditionCNIInstalled) || p.Annotations[v1alpha1.AnnotationStatus] == "" {
					return fmt.Sprintf("conditions %v, annotations %v", node.Status.Conditions, p.Annotations)
				}
				return ""
			})
			tt.end(w, ds)
			stop()

			_, err := os.Stat(filepath.Join(w.dir, "bin/smcr-cni"))
			if gone := errors.Is(err, fs.ErrNotExist); gone != tt.want {
				t.Errorf("the plugin is gone: %v, want %v", gone, tt.want)
			}
			b, err := os.ReadFile(filepath.Join(w.dir, "net.d/10-kind.conflist"))
			if err != nil || strings.Contains(string(b), "smcr") == tt.want {
				t.Errorf("the network's configuration: %s, %v; want it clean: %v", b, err, tt.want)
			}
			if files, _ := filepath.Glob(filepath.Join(w.dir, "data", "*")); len(files) == 0 != tt.want {
				t.Errorf("files in the data directory: %v, want it clean: %v", files, tt.want)
			}
			err = w.client.Get(t.Context(), client.ObjectKeyFromObject(node), node)
			if gone := tt.want && tt.says == ""; apierrors.IsNotFound(err) != gone {
				t.Errorf("SMCRNode: %v, want that it is gone: %v", err, gone)
			}
			if tt.says != "" {
				c := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionReady)
				if c == nil || c.Status != metav1.ConditionFalse || c.Reason != v1alpha1.ReasonAgentGone || !strings.Contains(c.Message, tt.says) {
					t.Errorf("the SMCRNode is %+v, want AgentGone, because %s", c, tt.says)
				}
				if c := meta.FindStatusCondition(node.Status.Conditions, v1alpha1.ConditionUninstalled); c == nil || c.Reason != v1alpha1.ReasonNodeLeft {
					t.Errorf("the SMCRNode has %+v, want NodeLeft", c)
				}
			}
			if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(p), p); err != nil {
				t.Fatal(err)
			}
			status := p.Annotations[v1alpha1.AnnotationStatus]
			if tt.says != "" && status != v1alpha1.PodStatusNoAgent || tt.says == "" && status == "" != tt.want {
				t.Errorf("annotation %q of the pod", status)
			}
		})
	}
}

// refused answers some requests as an API server does that does not know who asks.
func refused(which func(*http.Request) bool) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(req *http.Request) (*http.Response, error) {
			if !which(req) {
				return next.RoundTrip(req)
			}
			return &http.Response{StatusCode: http.StatusUnauthorized, Header: http.Header{}, Body: http.NoBody, Request: req}, nil
		})
	}
}

// TestRunAgent_refused: the API server refuses the token of an agent that ends. Its account is deleted, or only its
// pod object, to which the token is bound: then the next agent needs everything that is on the node.
func TestRunAgent_refused(t *testing.T) {
	for _, tt := range []struct {
		name         string
		succeeds     bool // another agent asks for the node meanwhile
		refusedAtEnd bool
		clean        bool
	}{
		{"account deleted", false, true, true},
		{"pod object deleted", true, true, false},
		{"known again", false, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			cfg := w.clusterConfig()
			var refuses atomic.Bool
			cfg.REST = rest.CopyConfig(cfg.REST)
			cfg.REST.Wrap(refused(func(*http.Request) bool { return refuses.Load() }))
			cfg.Pod, cfg.DaemonSet = w.namespace+"/agent-x", w.daemonSet().Name
			cfg.run = func(ctx context.Context, c agent.Config) error {
				c.Manages(true)
				<-ctx.Done()
				if !c.MayBeLast() {
					t.Error("the agent takes it for sure that another one comes, or that none does")
				}
				select {
				case <-c.Leave:
					t.Error("the agent leaves at once")
				default:
				}
				if refuses.Store(tt.refusedAtEnd); tt.succeeds {
					c.Manages(false)
				} else {
					c.NoSuccessor()
				}
				return nil
			}
			plugin, state := filepath.Join(w.dir, "bin/smcr-cni"), filepath.Join(w.dir, "data", stateFile)
			if err := os.Mkdir(filepath.Dir(state), 0o700); err != nil { // as agent.Run does
				t.Fatal(err)
			}
			stop := w.runAgent(cfg)
			within(t, slowly, func() string {
				b, err := os.ReadFile(filepath.Join(w.dir, "net.d/10-kind.conflist"))
				if _, serr := os.Stat(state); serr != nil || err != nil || !strings.Contains(string(b), "smcr") {
					return fmt.Sprintf("%s, %v, %v", b, err, serr)
				}
				return ""
			})
			refuses.Store(true)
			stop()
			for _, path := range []string{plugin, state} {
				if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) != tt.clean {
					t.Errorf("%s: %v, want the node clean: %t", path, err, tt.clean)
				}
			}
		})
	}
}

// TestDeparture: what the API server answers to an agent that ends, and what that means.
func TestDeparture(t *testing.T) {
	w := newWorld(t)
	cfg := w.clusterConfig()
	w.daemonSet()
	user := "agent-" + w.namespace
	as := rest.CopyConfig(cfg.REST)
	as.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	dead := rest.CopyConfig(cfg.REST)
	dead.Host = "https://127.0.0.1:1"
	noToken := rest.AnonymousClientConfig(cfg.REST)
	noToken.BearerToken = "junk"
	find := func(api *rest.Config, ds string) departure {
		c := &cluster{cfg: cfg}
		c.cfg.REST, c.cfg.Pod, c.cfg.DaemonSet = api, w.namespace+"/agent-x", ds
		return c.departure(t.Context())
	}
	ask := func(api *rest.Config, ds string) string { return find(api, ds).why }
	expect := func(name, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	expect("there", ask(cfg.REST, "agent"), "")
	expect("not of a DaemonSet", ask(dead, ""), "")
	expect("gone", ask(cfg.REST, "nobody"), "the DaemonSet of the agents is deleted")
	expect("API server away", ask(dead, "agent"), "")
	if got := find(noToken, "agent"); got != unknownAgent {
		t.Errorf("account or pod deleted: %+v, want %+v", got, unknownAgent)
	}
	rolesFirst := rest.CopyConfig(as)
	rolesFirst.Wrap(refused(func(req *http.Request) bool { return strings.Contains(req.URL.Path, "/nodes/") }))
	if got := find(rolesFirst, "agent"); got != unknownAgent {
		t.Errorf("rights deleted, and then the account or pod: %+v, want %+v", got, unknownAgent)
	}
	expect("no rights", ask(as, "agent"), "the agents' rights are deleted")
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}}}}
	w.create(role)
	w.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
		Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}},
	})
	within(t, slowly, func() string { return ask(as, "agent") }) // the role lacks only the right to read this
}

func TestSelects(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{"pool": "roce", "gen": "7", "gone": "true"}}}
	term := func(key string, op corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: op, Values: values}}}
	}
	named := func(names ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: names}}}
	}
	for _, tt := range []struct {
		name     string
		selector map[string]string
		terms    []corev1.NodeSelectorTerm
		want     bool
	}{
		{"all", nil, nil, true},
		{"label", map[string]string{"pool": "roce"}, nil, true},
		{"other label", map[string]string{"pool": "cpu"}, nil, false},
		{"no such label", map[string]string{"zone": "a"}, nil, false},
		{"in", nil, []corev1.NodeSelectorTerm{term("pool", corev1.NodeSelectorOpIn, "a", "roce")}, true},
		{"not in", nil, []corev1.NodeSelectorTerm{term("pool", corev1.NodeSelectorOpNotIn, "a", "roce")}, false},
		{"exists", nil, []corev1.NodeSelectorTerm{term("zone", corev1.NodeSelectorOpExists)}, false},
		{"does not exist", nil, []corev1.NodeSelectorTerm{term("zone", corev1.NodeSelectorOpDoesNotExist)}, true},
		{"greater", nil, []corev1.NodeSelectorTerm{term("gen", corev1.NodeSelectorOpGt, "6")}, true},
		{"less", nil, []corev1.NodeSelectorTerm{term("gen", corev1.NodeSelectorOpLt, "7")}, false},
		{"name", nil, []corev1.NodeSelectorTerm{named("n1")}, true},
		{"other name", nil, []corev1.NodeSelectorTerm{named("n2")}, false},
		{"one of two terms", nil, []corev1.NodeSelectorTerm{named("n2"), term("pool", corev1.NodeSelectorOpIn, "roce")}, true},
		{"no term", nil, []corev1.NodeSelectorTerm{{}}, false},
		{"told to leave", nil, []corev1.NodeSelectorTerm{term("gone", corev1.NodeSelectorOpNotIn, "true")}, false},
		{"not told to leave", nil, []corev1.NodeSelectorTerm{term(v1alpha1.LabelLeave, corev1.NodeSelectorOpNotIn, "true")}, true},
		{"label and term", map[string]string{"pool": "cpu"}, []corev1.NodeSelectorTerm{named("n1")}, false},
		{"operator of later versions", nil, []corev1.NodeSelectorTerm{term("gen", "Like", "7")}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pod := &corev1.PodSpec{NodeSelector: tt.selector}
			if tt.terms != nil {
				pod.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
					RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: tt.terms},
				}}
			}
			if got := selects(pod, node); got != tt.want {
				t.Errorf("selects = %v, want %v", got, tt.want)
			}
		})
	}
}
