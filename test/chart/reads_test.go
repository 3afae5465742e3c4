// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// TestAttack_readOthersPods: the account of an agent reads the pods of its node, and
// no other ones, and gets nothing else by being its node.
func TestAttack_readOthersPods(t *testing.T) {
	ctx, root := t.Context(), admin(t)
	install(t, root)
	ensure(t, root, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
	agentOf(t, root, "node-a")
	agentOf(t, root, "node-b")
	newPod(t, root, "shop", "reads-a", "node-a", "default")
	newPod(t, root, "shop", "reads-b", "node-b", "default")
	ensure(t, root, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "password"}})
	var agent corev1.Pod
	must(t, root.Get(ctx, types.NamespacedName{Namespace: namespace, Name: "kube-smcr-agent-node-a"}, &agent))
	token := withToken(t, &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: agent.Name, UID: agent.UID})
	as := func(user string, groups ...string) kubernetes.Interface {
		c := rest.CopyConfig(token)
		c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
		cs, err := kubernetes.NewForConfig(c)
		must(t, err)
		return cs
	}
	const own, other = "spec.nodeName=node-a", "spec.nodeName=node-b"
	list := func(c kubernetes.Interface, selector string) error {
		pods, err := c.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: selector})
		if err != nil {
			return err
		}
		var names []string
		for _, p := range pods.Items {
			if p.Spec.NodeName != "node-a" {
				t.Errorf("pod %s of node %s", p.Name, p.Spec.NodeName)
			}
			names = append(names, p.Name)
		}
		if !strings.Contains(strings.Join(names, " "), "reads-a") {
			t.Errorf("pods %v, want reads-a among them", names)
		}
		return nil
	}
	node := as("system:node:node-a")
	for _, tt := range []struct {
		name string
		do   func() error
		ok   bool
	}{
		{"own pods, as the node", func() error { return list(node, own) }, true},
		{"own pods, watched", func() error {
			w, err := node.CoreV1().Pods("").Watch(ctx, metav1.ListOptions{FieldSelector: own})
			if err == nil {
				w.Stop()
			}
			return err
		}, true},
		{"all pods, as itself", func() error { return list(as(""), "") }, false},
		{"own pods, as itself", func() error { return list(as(""), own) }, false},
		{"all pods, as the node", func() error { return list(node, "") }, false},
		{"pods of another node, as the node", func() error { return list(node, other) }, false},
		{"pods of another node, as that", func() error { return list(as("system:node:node-b"), other) }, false},
		{"own pods, as another node", func() error { return list(as("system:node:node-b"), own) }, false},
		{"as an administrator", func() error { return list(as("admin", "system:masters"), "") }, false},
		{"as all nodes", func() error { return list(as("system:node:node-a", "system:nodes"), own) }, false},
		{"one pod, as the node", func() error {
			_, err := node.CoreV1().Pods("shop").Get(ctx, "reads-a", metav1.GetOptions{})
			return err
		}, false},
		{"a Secret, as the node", func() error {
			_, err := node.CoreV1().Secrets("shop").Get(ctx, "password", metav1.GetOptions{})
			return err
		}, false},
		{"deletion of a pod, as the node", func() error { return node.CoreV1().Pods("shop").Delete(ctx, "reads-a", metav1.DeleteOptions{}) }, false},
		{"status of a pod, as the node", func() error {
			_, err := node.CoreV1().Pods("shop").UpdateStatus(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "reads-a"}}, metav1.UpdateOptions{})
			return err
		}, false},
		{"the node itself, as the node", func() error {
			return node.CoreV1().Nodes().Delete(ctx, "node-a", metav1.DeleteOptions{})
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.do()
			if tt.ok && err != nil || !tt.ok && !apierrors.IsForbidden(err) {
				t.Errorf("%v, want allowed: %v", err, tt.ok)
			}
		})
	}
}

// TestPodsAsNode: by itself the chart gives a right on all pods only where there is
// no other way.
func TestPodsAsNode(t *testing.T) {
	for _, tt := range []struct {
		name, version, value string
		asNode               bool
	}{
		{"an API server that can", "1.36.0", "auto", true},
		{"a build of one that can", "1.36.0-eks-1", "auto", true},
		{"an API server that cannot", "1.35.4", "auto", false},
		{"switched on", "1.35.4", "true", true},
		{"switched off", "1.37.0", "false", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rendered := template(t, "--kube-version", tt.version, "--set", "podsAsNode="+tt.value)
			all, node, told := false, false, strings.Contains(rendered, "podsAsNode: true")
			for _, right := range rolesOf(t, rendered)["ClusterRole kube-smcr-agent"] {
				all = all || right == " pods list *"
				node = node || right == "authentication.k8s.io nodes impersonate:associated-node *"
			}
			if all == tt.asNode || node != tt.asNode || told != tt.asNode {
				t.Errorf("right on all pods %v, right to be the node %v, agents told so %v", all, node, told)
			}
		})
	}
}
