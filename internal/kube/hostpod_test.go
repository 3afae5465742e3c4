// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/config"
)

// TestSource_hostNetwork: a pod in the node's network is in force when its own annotation and its policy say so, also before it
// runs: the agent is to choose its cgroup before its programs open sockets.
func TestSource_hostNetwork(t *testing.T) {
	w := newWorld(t)
	inHost := func(p *corev1.Pod) {
		enabled("true")(p)
		p.Spec.HostNetwork = true
	}
	running, waiting := w.pod("running", inHost), w.pod("waiting", inHost)
	running.Status.Phase, running.Status.PodIPs = corev1.PodRunning, []corev1.PodIP{{IP: "192.0.2.7"}}
	running.Status.PodIP, running.Status.HostIP, running.Status.HostIPs = "192.0.2.7", "192.0.2.7", []corev1.HostIP{{IP: "192.0.2.7"}}
	if err := w.client.Status().Update(t.Context(), running); err != nil {
		t.Fatal(err)
	}
	const hash = "d41d8cd98f00b204e9800998ecf8427e"
	static := w.pod("static", func(p *corev1.Pod) {
		inHost(p)
		p.Annotations[annotationHash], p.Annotations[corev1.MirrorPodAnnotationKey] = hash, hash
	})
	pretends := w.pod("pretends", func(p *corev1.Pod) {
		inHost(p)
		p.Annotations[annotationHash] = string(running.UID)
	})
	s := w.source(server.Config(t))
	s.First(t.Context())
	is := func(when string, want ...config.HostPod) {
		t.Helper()
		within(t, prompt, func() string {
			n, _ := s.Load()
			if diff := cmp.Diff(want, n.HostPods); diff != "" {
				return when + " (-want +got):\n" + diff
			}
			return ""
		})
	}
	host := func(p *corev1.Pod, cgroup string) config.HostPod {
		return config.HostPod{Namespace: w.namespace, Name: p.Name, UID: string(p.UID), CgroupUID: cgroup}
	}
	is("without a policy")
	kernel := w.policy("kernel", func(p *v1alpha1.SMCRPolicySpec) {
		p.Datapath, p.Isolation = v1alpha1.DatapathKernel, v1alpha1.IsolationNode
	})
	is("with one", host(pretends, string(pretends.UID)), host(running, string(running.UID)), host(static, hash), host(waiting, string(waiting.UID)))
	if ips := s.podIPs(); len(ips) > 0 {
		t.Errorf("addresses %v, which are the node's", ips)
	}
	w.change(running, func() { delete(running.Annotations, v1alpha1.AnnotationEnabled) })
	w.remove(pretends)
	w.remove(waiting)
	is("not opted in any more, and removed", host(static, hash))
	w.remove(kernel)
	is("without a policy again")
}

// TestSource_static: a static pod in a network of its own is known on the node by its own UID, and not by that of its mirror, which the
// API server has. No pod of another name gets its policies, whatever UID it claims to have.
func TestSource_static(t *testing.T) {
	w := newWorld(t)
	const hash = "d41d8cd98f00b204e9800998ecf8427e"
	mirror := func(p *corev1.Pod) {
		p.Annotations[annotationHash], p.Annotations[corev1.MirrorPodAnnotationKey] = hash, hash
	}
	static := w.pod("static", func(p *corev1.Pod) {
		enabled("true")(p)
		mirror(p)
	})
	w.pod("claims", mirror)
	s := w.source(server.Config(t))
	s.First(t.Context())
	onNode := static.DeepCopy()
	onNode.UID = hash
	w.wait(s, onNode, "by its own UID", byDefault)
	w.wait(s, static, "by that of its mirror", optedOut)
	claims := onNode.DeepCopy()
	claims.Name = "claims"
	w.wait(s, claims, "another name", optedOut)
	id := config.Pod{Namespace: static.Namespace, Name: static.Name, UID: hash}
	if s.Gone(id) || s.Ending(hash) || !s.Ending("") {
		t.Errorf("gone: %v, ending: %v; no pod is ending: %v", s.Gone(id), s.Ending(hash), s.Ending(""))
	}
	w.remove(static)
	w.wait(s, onNode, "removed", optedOut)
	if !s.Gone(id) {
		t.Error("the static pod is not gone")
	}
}

// What is kept of a pod: of its annotations ours, and of a static pod what kubelet calls it.
func TestTrim_pod(t *testing.T) {
	for _, tt := range []struct {
		name      string
		have, all map[string]string
	}{
		{"ours", map[string]string{v1alpha1.AnnotationEnabled: "true", "other": "x"}, map[string]string{v1alpha1.AnnotationEnabled: "true"}},
		{"none", map[string]string{"other": "x"}, nil},
		{
			"of a static pod",
			map[string]string{annotationHash: "d4", corev1.MirrorPodAnnotationKey: "d4", "kubernetes.io/config.source": "file"},
			map[string]string{annotationHash: "d4", corev1.MirrorPodAnnotationKey: "d4"},
		},
		{"of one that is no mirror", map[string]string{annotationHash: "d4"}, nil},
		{"of one that is that of another", map[string]string{annotationHash: "d4", corev1.MirrorPodAnnotationKey: "d5"}, nil},
	} {
		out, err := trim(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: tt.have}, Spec: corev1.PodSpec{HostNetwork: true, Hostname: "h"}})
		if err != nil {
			t.Fatal(err)
		}
		p := out.(*corev1.Pod)
		if diff := cmp.Diff(tt.all, p.Annotations); diff != "" || !p.Spec.HostNetwork || p.Spec.Hostname != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}
