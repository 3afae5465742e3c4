// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// TestPathsOfTheNode: the agent sees the directories of the node that it uses, and may write only
// into those where it has to. A directory that the node lacks is made at once: if the container
// runtime made the directory with its first pod, say, the agent would not see the new one.
func TestPathsOfTheNode(t *testing.T) {
	always := map[string]string{
		"/run/kube-smcr": "written", "/run/netns": "read, new mounts", "/var/lib/cni/results": "read",
		"/opt/cni/bin": "written", "/etc/cni/net.d": "written",
	}
	for _, tt := range []struct {
		name, set string
		also      map[string]string
		not       []string
	}{
		{name: "default"},
		{name: "somebody else installs the plugin", set: "agent.cni.install=false", not: []string{"/opt/cni/bin", "/etc/cni/net.d"}},
		{name: "device plugin", set: "devicePlugin.enabled=true", also: map[string]string{"/var/lib/kubelet/device-plugins": "written", "/var/lib/kubelet/pod-resources": "read"}},
		{name: "claims", set: "dra.enabled=true", also: map[string]string{"/var/lib/kubelet/plugins/roce.smcr.io": "written", "/var/lib/kubelet/plugins_registry": "written"}},
		{name: "device files", set: "hardware.enabled=true", also: map[string]string{"/dev/infiniband": "written"}},
		{name: "the kernel's datapath", set: "kernelPath.enabled=true", also: map[string]string{"/sys/fs/bpf": "written, new mounts"}},
		{name: "device files by a plugin", set: "hardware.enabled=true,hardware.resource=rdma/hca"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := maps.Clone(always)
			maps.Copy(want, tt.also)
			maps.DeleteFunc(want, func(path, _ string) bool { return slices.Contains(tt.not, path) })
			spec := find[*appsv1.DaemonSet](t, template(t, "--set", tt.set), "-agent").Spec.Template.Spec
			got := map[string]string{}
			for _, v := range spec.Volumes {
				if v.HostPath == nil {
					continue
				}
				if *v.HostPath.Type != corev1.HostPathDirectoryOrCreate {
					t.Errorf("%s is of the type %s: on a node that does not have it no agent starts, or none sees it later", v.HostPath.Path, *v.HostPath.Type)
				}
				for _, m := range spec.Containers[0].VolumeMounts {
					if m.Name == v.Name {
						got[v.HostPath.Path] = use(m)
					}
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("directories of the node (-want +got):\n%s", diff)
			}
		})
	}
}

func use(m corev1.VolumeMount) string {
	use := "written"
	if m.ReadOnly {
		use = "read"
	}
	if m.MountPropagation != nil && *m.MountPropagation == corev1.MountPropagationHostToContainer {
		use += ", new mounts"
	}
	return use
}

// The directories of the runtime are where the agent looks for them.
func TestPathsOfTheRuntime(t *testing.T) {
	text, err := os.ReadFile("../../internal/kube/limits.go")
	if err != nil {
		t.Fatal(err)
	}
	rendered := template(t)
	for _, name := range []string{"namespaceDir", "sandboxDir"} {
		m := regexp.MustCompile(name + ` += "(/[^"]+)"`).FindStringSubmatch(string(text))
		if m == nil {
			t.Fatalf("no %s in internal/kube/limits.go", name)
		}
		if !strings.Contains(rendered, "mountPath: "+m[1]+"\n") || !strings.Contains(rendered, "path: "+m[1]+"\n") {
			t.Errorf("the node's %s is not at this path in the agent's container", m[1])
		}
	}
}
