// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
)

// foreign are the kinds of other projects, whose Go types this project does not have.
var foreign = []string{"ServiceMonitor", "PrometheusRule", "NetworkAttachmentDefinition", "CustomResourceDefinition"}

// typed reads an object into its Go type, which must have all fields of the object.
func typed(t *testing.T, doc string) runtime.Object {
	t.Helper()
	strict := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, json.SerializerOptions{Yaml: true, Strict: true})
	o, _, err := strict.Decode([]byte(doc), nil, nil)
	if err != nil {
		t.Fatalf("%v\n%s", err, doc)
	}
	return o
}

// podTemplate returns the pods that an object makes, or nil.
func podTemplate(o runtime.Object) *corev1.PodTemplateSpec {
	switch o := o.(type) {
	case *appsv1.DaemonSet:
		return &o.Spec.Template
	case *appsv1.Deployment:
		return &o.Spec.Template
	case *batchv1.Job:
		return &o.Spec.Template
	}
	return nil
}

// programsOf are the programs that the containers of a pod run.
func programsOf(spec *corev1.PodSpec) []string {
	var out []string
	for _, c := range spec.Containers {
		out = append(out, c.Command[0])
		for _, p := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
			if p != nil && p.Exec != nil {
				out = append(out, p.Exec.Command[0])
			}
		}
	}
	return out
}

func TestObjectsAreOfTheirTypes(t *testing.T) {
	for _, r := range renderings(t) {
		t.Run(r.name, func(t *testing.T) {
			for _, doc := range documents(template(t, r.args...)) {
				o := parse(t, doc)
				if !slices.Contains(foreign, o.GetKind()) {
					typed(t, doc)
				}
				if o.GetLabels()["app.kubernetes.io/part-of"] != "kube-smcr" {
					t.Errorf("%s %s: no label app.kubernetes.io/part-of: kube-smcr", o.GetKind(), o.GetName())
				}
			}
		})
	}
}

func TestContainersAreConfined(t *testing.T) {
	for _, r := range renderings(t) {
		t.Run(r.name, func(t *testing.T) {
			pods := 0
			for _, doc := range documents(template(t, r.args...)) {
				if slices.Contains(foreign, parse(t, doc).GetKind()) {
					continue
				}
				o := typed(t, doc)
				tmpl := podTemplate(o)
				if tmpl == nil {
					continue
				}
				pods++
				_, agent := o.(*appsv1.DaemonSet)
				checkPod(t, &tmpl.Spec, agent)
				// OpenShift's restricted-v2 refuses pods that name a user.
				if user := tmpl.Spec.Containers[0].SecurityContext.RunAsUser; !agent && (user == nil) != (r.name == "profile-openshift") {
					t.Errorf("%s runs as a user of the chart: %t", parse(t, doc).GetName(), user != nil)
				}
			}
			if pods < 3 {
				t.Errorf("%d objects make pods, want agent, controller and a hook at least", pods)
			}
		})
	}
}

// certificate is a volume of programs that have no files of the node. Without the Secret a program serves no
// metrics, and does everything else.
func certificate(v corev1.Volume) bool {
	return v.Name == "metrics-tls" && v.Secret != nil && v.Secret.Optional != nil && *v.Secret.Optional
}

// Only an agent that ends connections on the kernel's SMC-R sees the node's processes.
func TestRevokes(t *testing.T) {
	for set, want := range map[string]bool{
		"kernelPath.enabled=false":                        false,
		"kernelPath.enabled=true":                         true,
		"kernelPath.enabled=true,kernelPath.revoke=false": false,
		"kernelPath.enabled=false,kernelPath.revoke=true": false,
		"kernelPath.enabled=true,hardware.enabled=true":   true,
	} {
		spec := find[*appsv1.DaemonSet](t, template(t, "--set", set), "-agent").Spec.Template.Spec
		checkPod(t, &spec, true)
		if spec.HostPID != want {
			t.Errorf("%s: the agent is in the node's PID namespace: %v, want %v", set, spec.HostPID, want)
		}
	}
}

func checkPod(t *testing.T, spec *corev1.PodSpec, agent bool) {
	t.Helper()
	if spec.HostPID && !agent || spec.HostIPC || spec.HostNetwork != agent {
		t.Errorf("hostPID %v, hostIPC %v, hostNetwork %v", spec.HostPID, spec.HostIPC, spec.HostNetwork)
	}
	if len(spec.InitContainers) != 0 || len(spec.Containers) != 1 {
		t.Fatalf("%d init containers and %d containers, want one container", len(spec.InitContainers), len(spec.Containers))
	}
	c := &spec.Containers[0]
	if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
		t.Errorf("%s: resources %v, want requests of cpu and memory, and a limit of memory", c.Name, c.Resources)
	}
	s := c.SecurityContext
	// Only an agent that gets device files without a device plugin is privileged.
	files := agent && slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == "infiniband" })
	if files != (s.Privileged != nil && *s.Privileged) || !files && *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("%s: not confined: %v", c.Name, s)
	}
	if !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("%s: capabilities %v are dropped, want ALL", c.Name, s.Capabilities.Drop)
	}
	if !strings.HasPrefix(c.Command[0], "/usr/bin/") {
		t.Errorf("%s: command %q is not one of the image", c.Name, c.Command)
	}
	// On a node that waits for its agent all other pods of the chart must run: they remove the
	// taint, or have to come before the agents.
	if !slices.ContainsFunc(spec.Tolerations, func(t corev1.Toleration) bool {
		return t.Operator == corev1.TolerationOpExists && t.Effect == "" && t.Key == v1alpha1.TaintAgentNotReady
	}) {
		t.Errorf("%s: the start-up taint keeps it off", c.Name)
	}
	if !agent {
		files := slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return !certificate(v) && v.ConfigMap == nil })
		if !*s.RunAsNonRoot || len(s.Capabilities.Add) != 0 || files {
			t.Errorf("%s: root %v, capabilities %v, volumes %v: want none of them", c.Name, !*s.RunAsNonRoot, s.Capabilities.Add, spec.Volumes)
		}
		return
	}
	if slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Secret != nil && !certificate(v) }) {
		t.Error("an agent that waits for a Secret does not carry connections")
	}
	if len(c.Ports) != 0 {
		t.Errorf("ports %v: with hostNetwork they keep the new agent of an update off the node", c.Ports)
	}
	if diff := cmp.Diff(c.Resources.Requests, c.Resources.Limits); diff != "" {
		t.Errorf("the agent is not Guaranteed (-requests +limits):\n%s", diff)
	}
	want := []corev1.Capability{"NET_ADMIN", "SYS_ADMIN"}
	if hardware(spec) {
		want = append(want, "IPC_LOCK")
	}
	if spec.HostPID { // see TestRevokes
		want = append(want, "SYS_PTRACE")
	}
	if slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == "cni-bin" }) {
		want = append(want, "DAC_OVERRIDE")
	}
	if diff := cmp.Diff(want, s.Capabilities.Add); diff != "" {
		t.Errorf("capabilities (-want +got):\n%s", diff)
	}
}

// hardware says whether an agent is to use RDMA devices of the kernel. It gets their device files as a volume, or
// by a device plugin.
func hardware(spec *corev1.PodSpec) bool {
	if slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == "infiniband" }) {
		return true
	}
	for name := range spec.Containers[0].Resources.Limits {
		if strings.Contains(string(name), "/") {
			return true
		}
	}
	return false
}

// find returns the object of a kind whose name has this suffix.
func find[T runtime.Object](t *testing.T, rendered, suffix string) T {
	t.Helper()
	for _, doc := range documents(rendered) {
		o := parse(t, doc)
		if slices.Contains(foreign, o.GetKind()) || !strings.HasSuffix(o.GetName(), suffix) {
			continue
		}
		if found, ok := typed(t, doc).(T); ok {
			return found
		}
	}
	var none T
	t.Fatalf("no %T with a name like %s", none, suffix)
	return none
}

func TestUpdateOfTheAgent(t *testing.T) {
	for _, tt := range []struct {
		name, drain string
		want        int64
	}{
		{"default", "30s", 45},
		{"parts", "1m30s", 105},
		{"less than a second", "500ms", 16},
		{"none", "0s", 15},
		{"longest", "1h", 3615},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ds := find[*appsv1.DaemonSet](t, template(t, "--set", "agent.drainTimeout="+tt.drain), "-agent")
			got := *ds.Spec.Template.Spec.TerminationGracePeriodSeconds
			if d, err := time.ParseDuration(tt.drain); err != nil || time.Duration(got)*time.Second <= d {
				t.Errorf("grace period %d s does not outlast drainTimeout %v (%v)", got, d, err)
			}
			if got != tt.want {
				t.Errorf("grace period %d s, want %d s", got, tt.want)
			}
		})
	}

	before := find[*appsv1.DaemonSet](t, template(t), "-agent").Spec.Template.Annotations["checksum/config"]
	after := find[*appsv1.DaemonSet](t, template(t, "--set", "agent.logLevel=debug"), "-agent").Spec.Template.Annotations["checksum/config"]
	other := find[*appsv1.DaemonSet](t, template(t, "--set", "controller.logLevel=debug"), "-agent").Spec.Template.Annotations["checksum/config"]
	if before == after || before != other || before == "" {
		t.Errorf("checksum/config %q, with another setting %q, with another one of the controller %q", before, after, other)
	}
}

// A share of the nodes at a time may be updated.
func TestUpdateOfAShare(t *testing.T) {
	ds := find[*appsv1.DaemonSet](t, template(t, "--set", "agent.update.maxSurge=10%"), "-agent")
	if got := ds.Spec.UpdateStrategy.RollingUpdate.MaxSurge.String(); got != "10%" {
		t.Errorf("maxSurge is %s, want 10%%", got)
	}
}

// GOMEMLIMIT comes from the part of the container's memory that the node's budgets leave.
func TestMemoryOfTheAgent(t *testing.T) {
	ds := find[*appsv1.DaemonSet](t, template(t, "--set", "agent.resources.memory=3Gi", "--set", "agent.budgets.node.memory=2GiB"), "-agent")
	for _, env := range ds.Spec.Template.Spec.Containers[0].Env {
		if env.Name == "GOMEMLIMIT" {
			if env.Value != "691MiB" {
				t.Errorf("GOMEMLIMIT %s, want 691MiB", env.Value)
			}
			return
		}
	}
	t.Error("no GOMEMLIMIT")
}

// What agent.extraEnv says of Go's runtime is instead of what the chart does, and not beside it: an API server refuses a
// variable that is there twice, if it is applied there.
func TestEnvironmentOfTheAgent(t *testing.T) {
	env := func(extra string) map[string]string {
		ds := find[*appsv1.DaemonSet](t, template(t, "--set-json", "agent.extraEnv="+extra), "-agent")
		values := map[string]string{}
		for _, v := range ds.Spec.Template.Spec.Containers[0].Env {
			if _, twice := values[v.Name]; twice {
				t.Errorf("extraEnv %s: %s is there twice", extra, v.Name)
			}
			values[v.Name] = v.Value
		}
		return values
	}
	chart := env("[]")
	own := env(`[{"name":"GOMAXPROCS","value":"3"},{"name":"GOMEMLIMIT","value":"100MiB"},{"name":"GODEBUG","value":"x=1"}]`)
	want := maps.Clone(chart)
	want["GOMAXPROCS"], want["GOMEMLIMIT"], want["GODEBUG"] = "3", "100MiB", "x=1"
	if diff := cmp.Diff(want, own); diff != "" || chart["GOMEMLIMIT"] == "" {
		t.Errorf("the environment (-want +got):\n%s", diff)
	}
}

// What the agent needs for itself grows with its budgets: 16 KiB for each of 16384 connections, 144 KiB for each of 4096 relays,
// and 64 MiB. A container that has a MiB less is refused.
func TestMemoryOfTheAgent_largeBudgets(t *testing.T) {
	const budgets, memory = "agent.budgets.node.memory=8GiB,agent.budgets.node.sockets=4GiB,agent.resources.memory=%dMi", 12288 + 256 + 576 + 64
	template(t, "--set", fmt.Sprintf(budgets, memory))
	_, complaint := helm(t, "template", release, chartDir, "--set", fmt.Sprintf(budgets, memory-1))
	if want := "and 896MiB for the agent itself do not fit into agent.resources.memory (13183Mi)"; !strings.Contains(complaint, want) {
		t.Errorf("a MiB less: %q, want %q", complaint, want)
	}
}

func TestCRDsAreThoseOfTheRepository(t *testing.T) {
	const source = "../../config/crd"
	want, err := filepath.Glob(filepath.Join(source, "*.yaml"))
	if err != nil || len(want) == 0 {
		t.Fatalf("list %s: %d files, %v", source, len(want), err)
	}
	rendered := map[string]string{}
	for _, doc := range documents(template(t, "--set", "crds.install=Template")) {
		if o := parse(t, doc); o.GetKind() == "CustomResourceDefinition" {
			if o.GetAnnotations()["helm.sh/resource-policy"] != "keep" {
				t.Errorf("%s: helm uninstall would delete it, and all objects of its kind", o.GetName())
			}
			spec, err := yaml.Marshal(o.Object["spec"])
			if err != nil {
				t.Fatal(err)
			}
			rendered[o.GetName()] = string(spec)
		}
	}
	hook := find[*batchv1.Job](t, template(t), "-crds")
	if got := hook.Annotations["helm.sh/hook"]; got != "pre-install,pre-upgrade" {
		t.Errorf("the Job with the CRDs runs at %q", got)
	}
	// An older release's CRDs would lack fields that objects have; its settings may be wrong for the cluster by now.
	check := find[*batchv1.Job](t, template(t), "-check")
	if got := check.Annotations["helm.sh/hook"]; got != "pre-install,pre-upgrade,pre-rollback" {
		t.Errorf("the Job that checks the settings runs at %q", got)
	}
	for _, file := range want {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		copied, err := os.ReadFile(filepath.Join(chartDir, "files/crds", filepath.Base(file)))
		if err != nil {
			t.Fatal(err)
		}
		if string(source) != string(copied) {
			t.Errorf("%s is not that of the chart: cp config/crd/*.yaml charts/kube-smcr/files/crds/", file)
		}
		o := parse(t, string(source))
		spec, err := yaml.Marshal(o.Object["spec"])
		if err != nil {
			t.Fatal(err)
		}
		if rendered[o.GetName()] != string(spec) {
			t.Errorf("%s: the chart renders another spec", o.GetName())
		}
	}
	if len(rendered) != len(want) {
		t.Errorf("the chart has %d CRDs, config/crd %d", len(rendered), len(want))
	}
}
