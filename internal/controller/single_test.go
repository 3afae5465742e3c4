// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

func newDaemonSet(ns, name string, age time.Duration) *appsv1.DaemonSet {
	l := map[string]string{"app.kubernetes.io/part-of": "kube-smcr", "app.kubernetes.io/component": "agent"}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: types.UID(ns + "." + name), Labels: l, CreationTimestamp: metav1.NewTime(time.Now().Add(-age).Truncate(time.Second))},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l}, Spec: newPod("", "", "", "").Spec},
		},
	}
}

// podOfAgent is a pod of a DaemonSet that is in the node's network.
func podOfAgent(ds *appsv1.DaemonSet) *corev1.Pod {
	p := newPod(ds.Namespace, ds.Name+"-x", "n", "192.0.2.1")
	p.Labels, p.Spec.HostNetwork = ds.Labels, true
	p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(ds, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))}
	return p
}

// bare is a DaemonSet that has no pods in the node's network.
type bare struct{ *appsv1.DaemonSet }

// tenants is what somebody can do who may not have pods in the node's network: a DaemonSet that is older than any
// other, with any template, and pods in its namespace that it adopts, which its status counts.
func tenants() []client.Object {
	ds := newDaemonSet("tenant", "agent", time.Hour)
	ds.Spec.Template.Spec.HostNetwork = true
	ds.Status.DesiredNumberScheduled, ds.Status.CurrentNumberScheduled, ds.Status.UpdatedNumberScheduled = 1, 1, 1
	adopted := podOfAgent(ds)
	adopted.Spec.HostNetwork = false
	return []client.Object{bare{ds}, adopted}
}

func TestInstallation_other(t *testing.T) {
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	stranger := newDaemonSet("elsewhere", "x", time.Hour)
	stranger.Labels = map[string]string{"app.kubernetes.io/part-of": "something"}
	leaving := newDaemonSet("elsewhere", "agent", time.Hour)
	leaving.Finalizers, leaving.DeletionTimestamp = []string{"example.com/x"}, &metav1.Time{Time: time.Now()}
	for _, tt := range []struct {
		name string
		all  []client.Object
		want string // "": it is the first
	}{
		{"nobody", nil, ""},
		{"alone", []client.Object{newDaemonSet("a", "agent", 0)}, ""},
		{"first", []client.Object{newDaemonSet("a", "agent", time.Hour), newDaemonSet("b", "agent", 0)}, ""},
		{"second", []client.Object{newDaemonSet("a", "agent", 0), newDaemonSet("b", "agent", time.Hour)}, "b/agent"},
		{"second in the same namespace", []client.Object{newDaemonSet("a", "agent", 0), newDaemonSet("a", "pool-agent", time.Hour)}, "a/pool-agent"},
		{"third", []client.Object{newDaemonSet("a", "agent", 0), newDaemonSet("b", "agent", time.Minute), newDaemonSet("c", "agent", time.Hour)}, "c/agent"},
		{"of the same second", []client.Object{newDaemonSet("a", "agent", 0), newDaemonSet("0", "agent", 0)}, "0/agent"},
		{"without agents of its own yet", []client.Object{newDaemonSet("b", "agent", 0)}, "b/agent"},
		{"the other one is leaving", []client.Object{newDaemonSet("a", "agent", 0), leaving}, ""},
		{"older, without agents", []client.Object{newDaemonSet("a", "agent", 0), bare{newDaemonSet("b", "agent", time.Hour)}}, ""},
		{"younger, and the first has no agents", []client.Object{bare{newDaemonSet("a", "agent", time.Hour)}, newDaemonSet("b", "agent", 0)}, "b/agent"},
		{"a tenant's", append(tenants(), newDaemonSet("a", "agent", 0)), ""},
		{"a tenant's, and nothing of its own yet", tenants(), ""},
		{"a tenant's, and another one", append(tenants(), newDaemonSet("a", "agent", 0), newDaemonSet("b", "agent", time.Minute)), "b/agent"},
		{"something else", []client.Object{newDaemonSet("a", "agent", 0), stranger}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := fake.NewClientBuilder().WithScheme(scheme)
			for _, o := range tt.all {
				switch o := o.(type) {
				case bare:
					b.WithObjects(o.DaemonSet)
				case *appsv1.DaemonSet:
					b.WithObjects(o, podOfAgent(o))
				default:
					b.WithObjects(o)
				}
			}
			c := b.Build()
			other, _, err := installation{namespace: "a", daemonSet: "agent"}.other(t.Context(), c)
			got := ""
			if other != nil {
				got = other.Namespace + "/" + other.Name
			}
			if err != nil || got != tt.want {
				t.Errorf("%q (%v), want %q", got, err, tt.want)
			}
		})
	}
	selector, err := labels.Parse(DefaultAgentSelector)
	if err != nil {
		t.Fatal(err)
	}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(newDaemonSet("a", "x", 0), newDaemonSet("a", "y", time.Hour)).Build()
	if other, own, err := (installation{namespace: "a", selector: selector}).other(t.Context(), c); other != nil || own == nil || err != nil {
		t.Errorf("without a name: other %v, own %v, %v; want that all in the namespace are own", other, own, err)
	}
}

// The controller of a second installation does nothing, says why, and begins when the
// first one is gone.
func TestSecondInstallation(t *testing.T) {
	w := newWorld(t)
	first := newDaemonSet(w.ns, "agent", 0)
	w.create(first)
	w.create(podOfAgent(first))
	var second *appsv1.DaemonSet
	w.eventually("a DaemonSet that is younger, in whole seconds", func() error {
		second = newDaemonSet(system, theDaemonSet, 0)
		if err := w.Create(t.Context(), second); err != nil {
			return err
		}
		if first.CreationTimestamp.Before(&second.CreationTimestamp) {
			return nil
		}
		return errors.Join(errors.New("it is as old"), w.Delete(t.Context(), second))
	})
	t.Cleanup(func() { _ = w.Delete(context.Background(), second) })
	node := "n-" + w.ns
	w.node(node)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	w.run(w.asController(), func(c *Config) { c.DaemonSet, c.HealthAddress = second.Name, address })
	w.eventually("it says why it is not ready", func() error {
		resp, err := http.Get("http://" + address + "/readyz") //nolint:noctx // a test
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(text), "DaemonSet "+w.ns+"/agent is older") {
			return fmt.Errorf("%d %s (%w)", resp.StatusCode, text, err)
		}
		return nil
	})
	count := func() (n int) {
		var events corev1.EventList
		if err := w.List(t.Context(), &events, client.InNamespace(system)); err != nil {
			t.Fatal(err)
		}
		for _, e := range events.Items {
			if e.InvolvedObject.Name == second.Name && e.Reason == reasonSecond && strings.Contains(e.Message, w.ns+"/agent") {
				n++
			}
		}
		return n
	}
	w.eventually("an event", func() error {
		if n := count(); n != 1 {
			return fmt.Errorf("%d events", n)
		}
		return nil
	})
	smcr := newSMCRNode(node)
	w.never("it writes nothing", 3*coalesce, func() error {
		if err := w.get(smcr); err != nil {
			return err
		}
		if hasCondition(smcr.Status.Conditions, "AgentAlive", metav1.ConditionTrue, reasonAgentReady) == nil {
			return fmt.Errorf("conditions %v", smcr.Status.Conditions)
		}
		return nil
	})
	if n := count(); n != 1 {
		t.Errorf("%d events, want one", n)
	}
	if err := w.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	w.eventually("it begins", func() error {
		if err := w.get(smcr); err != nil {
			return err
		}
		return hasCondition(smcr.Status.Conditions, "AgentAlive", metav1.ConditionTrue, reasonAgentReady)
	})
}
