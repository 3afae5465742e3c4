// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

// admin returns a client that may do everything.
func admin(t *testing.T) client.Client {
	t.Helper()
	return clientOf(t, server.Config(t))
}

func clientOf(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ensure makes an object unless another test has.
func ensure(t *testing.T, c client.Client, o client.Object) {
	t.Helper()
	if err := c.Create(t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatalf("create %T %s: %v", o, o.GetName(), err)
	}
}

func TestAPIServerTakesEveryObject(t *testing.T) {
	c := admin(t)
	ensure(t, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	ensure(t, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "monitoring"}})
	for _, r := range renderings(t) {
		t.Run(r.name, func(t *testing.T) {
			for _, o := range objects(t, template(t, r.args...)) {
				switch o.GetKind() {
				case "ServiceMonitor", "PrometheusRule", "NetworkAttachmentDefinition", "CustomResourceDefinition":
					continue // kinds that are not there, or there already
				}
				if err := c.Create(t.Context(), o, client.DryRunAll, client.FieldValidation("Strict")); err != nil && !apierrors.IsAlreadyExists(err) {
					t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
				}
			}
		})
	}
}

func TestNotes(t *testing.T) {
	kubeconfig := apiserver.Kubeconfig(t, server.Config(t))
	for _, tt := range []struct {
		name string
		args []string
	}{
		{"default", nil},
		{"warnings", []string{"--set", "confineAgents=false,crds.install=None,agent.cni.install=false,hooks.uninstall=false,agent.wire.filter=false"}},
		{"peers", []string{"--set", "agent.wire.peers={192.0.2.0/24,2001:db8::/32}"}},
		{"hardware", []string{"--set", "dra.enabled=true,dra.ipam.type=dhcp,hardware.enabled=true"}},
		{"plugin", []string{"--set", "devicePlugin.otherResources={vendor.com/rdma_vf}"}},
		{"claims", []string{"--set", "dra.enabled=true"}},
		{"ipam", []string{"--set", "dra.enabled=true,dra.ipam.type=host-local,dra.ipam.subnet=192.0.2.0/24"}},
		{"whereabouts", []string{"--set", "dra.enabled=true,dra.ipam.type=whereabouts,dra.ipam.range=192.0.2.0/24"}},
		{"wire", []string{"--set", "agent.wire.peers={192.0.2.0/24},agent.wire.interfaces={cilium_wg0}"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, complaint := helm(t, append([]string{
				"install", release, chartDir, "--namespace", namespace, "--create-namespace", "--dry-run=server", "--kubeconfig", kubeconfig,
			}, tt.args...)...)
			if complaint != "" {
				t.Fatal(complaint)
			}
			_, notes, found := strings.Cut(out, "\nNOTES:\n")
			if !found {
				t.Fatalf("no notes in\n%s", out)
			}
			golden(t, "notes-"+tt.name+".golden.txt", notes)
		})
	}
}

// An upgrade says what the agents do not take any more, and what to set.
func TestNotes_upgrade(t *testing.T) {
	to := []string{"old", chartDir, "--namespace", "old", "--kubeconfig", apiserver.Kubeconfig(t, server.Config(t)), "--no-hooks"}
	if _, complaint := helm(t, append([]string{"install", "--create-namespace"}, to...)...); complaint != "" {
		t.Fatal(complaint)
	}
	t.Cleanup(func() {
		if _, complaint := helm(t, "uninstall", "old", "--namespace", "old", "--no-hooks", "--kubeconfig", to[5]); complaint != "" {
			t.Error(complaint)
		}
	})
	out, complaint := helm(t, append([]string{"upgrade", "--dry-run=server", "--reuse-values"}, to...)...)
	_, notes, found := strings.Cut(out, "\nNOTES:\n")
	if complaint != "" || !found {
		t.Fatalf("%s, no notes in\n%s", complaint, out)
	}
	golden(t, "notes-upgrade.golden.txt", notes)
}

// install makes the objects of the chart that decide what an agent may do.
func install(t *testing.T, c client.Client) {
	t.Helper()
	ensure(t, c, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	wanted := []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
	for _, o := range objects(t, template(t, "--set", "dra.enabled=true")) {
		if slices.Contains(wanted, o.GetKind()) && slices.Contains([]string{"agent", "controller", "uninstall"}, o.GetLabels()["app.kubernetes.io/component"]) {
			// As helm has made them, which TestNotes asks helm to do.
			notes := o.GetAnnotations()
			if notes == nil {
				notes = map[string]string{}
			}
			notes["meta.helm.sh/release-name"], notes["meta.helm.sh/release-namespace"] = release, namespace
			o.SetAnnotations(notes)
			ensure(t, c, o)
		}
	}
}

// newPod makes a pod that was scheduled to a node.
func newPod(t *testing.T, c client.Client, namespace, name, node, account string) *corev1.Pod {
	t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"a": "b"}},
		Spec:       corev1.PodSpec{NodeName: node, ServiceAccountName: account, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	ensure(t, c, p)
	must(t, c.Get(t.Context(), client.ObjectKeyFromObject(p), p))
	return p
}

// agentOf returns a client with the token of the agent's pod on a node.
func agentOf(t *testing.T, c client.Client, node string) client.Client {
	t.Helper()
	return agentAs(t, c, "kube-smcr-agent-"+node, node)
}

// agentAs returns a client with the token of an agent's pod of that name.
func agentAs(t *testing.T, c client.Client, name, node string) client.Client {
	t.Helper()
	ensure(t, c, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}})
	pod := newPod(t, c, namespace, name, node, "kube-smcr-agent")
	return clientOf(t, withToken(t, &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}))
}

// withToken returns how a pod with the agent's account connects.
func withToken(t *testing.T, bound *authenticationv1.BoundObjectReference) *rest.Config {
	t.Helper()
	return tokenOf(t, "kube-smcr-agent", bound)
}

// tokenOf returns how a pod with an account of the product connects.
func tokenOf(t *testing.T, account string, bound *authenticationv1.BoundObjectReference) *rest.Config {
	t.Helper()
	config := server.Config(t)
	cs, err := kubernetes.NewForConfig(config)
	must(t, err)
	token, err := cs.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound}}, metav1.CreateOptions{})
	must(t, err)
	config = rest.AnonymousClientConfig(config)
	config.BearerToken = token.Status.Token
	return config
}

func smcrObject(kind, name, node string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "smcr.io/v1alpha1", "kind": kind, "status": map[string]any{"node": node},
	}}
	if kind == "SMCRNode" {
		o.Object["status"] = map[string]any{"kernel": "6.12"}
	}
	o.SetName(name)
	if node != "" {
		o.SetLabels(map[string]string{v1alpha1.LabelNode: node})
	}
	return o
}

// lease is a Lease in the namespace of the product.
func lease(name, node string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": map[string]any{"holderIdentity": "x"},
	}}
	o.SetNamespace(namespace)
	o.SetName(name)
	if node != "" {
		o.SetLabels(map[string]string{v1alpha1.LabelNode: node})
	}
	return o
}

// resourceSlice is a slice of devices of ours for a node.
func resourceSlice(name, node, pool string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "spec": map[string]any{
			"driver": v1alpha1.DRADriver, "nodeName": node,
			"pool": map[string]any{"name": pool, "generation": int64(99), "resourceSliceCount": int64(1)},
		},
	}}
	o.SetName(name)
	return o
}

// apply writes an object as the agents do.
func apply(ctx context.Context, c client.Client, o client.Object) error {
	return c.Patch(ctx, o, client.Apply, client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership) //nolint:staticcheck // the agents' objects have no generated apply configuration
}

// patchPod patches a pod's status.
func patchPod(ctx context.Context, c client.Client, p *corev1.Pod, patch string) error {
	return c.Status().Patch(ctx, p.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
}

// Names of SMCRLinks, of the form that agents give them.
const (
	linkOfA = "node-a-00000001"
	linkOfB = "node-b-00000001"
)

func TestAgentsAreConfinedToTheirNode(t *testing.T) {
	ctx, root := t.Context(), admin(t)
	install(t, root)
	ensure(t, root, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
	a, b := agentOf(t, root, "node-a"), agentOf(t, root, "node-b")
	mine, theirs := newPod(t, root, "shop", "web-a", "node-a", "default"), newPod(t, root, "shop", "web-b", "node-b", "default")
	unbound := clientOf(t, withToken(t, nil))

	awaitPolicy(t, a)
	must(t, apply(ctx, b, smcrObject("SMCRNode", "node-b", "node-b")))
	must(t, apply(ctx, b, smcrObject("SMCRLink", linkOfB, "node-b")))
	must(t, apply(ctx, b, lease("kube-smcr-agent-node-b", "node-b")))
	ensure(t, root, lease("kube-smcr-controller", ""))

	for _, tt := range []struct {
		name string
		do   func() error
		want string // "" is allowed
	}{
		{"own node", func() error { return apply(ctx, a, smcrObject("SMCRNode", "node-a", "node-a")) }, ""},
		{"own node again", func() error { return apply(ctx, a, smcrObject("SMCRNode", "node-a", "node-a")) }, ""},
		{"own link", func() error { return apply(ctx, a, smcrObject("SMCRLink", linkOfA, "node-a")) }, ""},
		{"deletion of own link", func() error { return a.Delete(ctx, smcrObject("SMCRLink", linkOfA, "node-a")) }, ""},
		{"status of own pod", func() error {
			return patchPod(ctx, a, mine, `{"metadata":{"annotations":{"smcr.io/status":"Enabled"}}}`)
		}, ""},
		{"removal of that status", func() error { return patchPod(ctx, a, mine, `{"metadata":{"annotations":{"smcr.io/status":null}}}`) }, ""},

		{"deletion of a node of another", func() error { return a.Delete(ctx, smcrObject("SMCRNode", "node-b", "")) }, "may write only the SMCRNode of this name"},
		{"deletion of own node", func() error { return a.Delete(ctx, smcrObject("SMCRNode", "node-a", "node-a")) }, ""},
		{"node of another", func() error { return apply(ctx, a, smcrObject("SMCRNode", "node-b", "node-b")) }, "may write only the SMCRNode of this name"},
		{"node of another under own label", func() error { return apply(ctx, a, smcrObject("SMCRNode", "node-b", "node-a")) }, "may write only the SMCRNode of this name"},
		{"node that is none yet", func() error { return apply(ctx, a, smcrObject("SMCRNode", "node-c", "node-a")) }, "may write only the SMCRNode of this name"},
		{"link of another", func() error { return apply(ctx, a, smcrObject("SMCRLink", linkOfB, "node-b")) }, "only objects with the label smcr.io/node: node-a"},
		{"taking a link of another", func() error { return apply(ctx, a, smcrObject("SMCRLink", linkOfB, "node-a")) }, "only objects with the label smcr.io/node: node-a"},
		{"deletion of a link of another", func() error { return a.Delete(ctx, smcrObject("SMCRLink", linkOfB, "")) }, "only objects with the label smcr.io/node: node-a"},
		{"new link of another", func() error { return apply(ctx, a, smcrObject("SMCRLink", "node-b-00000002", "node-b")) }, "only objects with the label smcr.io/node: node-a"},
		{"link without label", func() error { return apply(ctx, a, smcrObject("SMCRLink", "node-a-00000002", "")) }, "only objects with the label smcr.io/node: node-a"},
		{"link that says another node", func() error {
			o := smcrObject("SMCRLink", "node-a-00000003", "node-a")
			o.Object["status"] = map[string]any{"node": "node-b"}
			return apply(ctx, a, o)
		}, "may write only SMCRLinks of this node"},
		{"link with the name of another's", func() error { return apply(ctx, a, smcrObject("SMCRLink", "node-b-00000003", "node-a")) }, "may write only SMCRLinks of this node"},
		{"link with a name that begins alike", func() error { return apply(ctx, a, smcrObject("SMCRLink", "node-a-b-00000003", "node-a")) }, "may write only SMCRLinks of this node"},
		{"own lease", func() error { return apply(ctx, a, lease("kube-smcr-agent-node-a", "node-a")) }, ""},
		{"own lease again", func() error { return apply(ctx, a, lease("kube-smcr-agent-node-a", "node-a")) }, ""},
		{"lease of another", func() error { return apply(ctx, a, lease("kube-smcr-agent-node-b", "node-b")) }, "only objects with the label smcr.io/node: node-a"},
		{"lease of another under own label", func() error { return apply(ctx, a, lease("kube-smcr-agent-node-b", "node-a")) }, "only objects with the label smcr.io/node: node-a"},
		{"new lease with the name of another's", func() error { return apply(ctx, a, lease("kube-smcr-agent-node-c", "node-a")) }, "may write only the Lease kube-smcr-agent-node-a"},
		{"lease of the controllers", func() error { return apply(ctx, a, lease("kube-smcr-controller", "node-a")) }, "only objects with the label smcr.io/node: node-a"},
		{"lease in another namespace", func() error {
			o := lease("kube-smcr-agent-node-a", "node-a")
			o.SetNamespace("shop")
			return apply(ctx, a, o)
		}, `cannot patch resource "leases"`},
		{"own slice", func() error { return a.Create(ctx, resourceSlice("slice-a", "node-a", "node-a")) }, ""},
		{"slice of another node", func() error { return a.Create(ctx, resourceSlice("slice-b", "node-b", "node-b")) }, "may write only ResourceSlices of roce.smcr.io for this node, in its pool"},
		{"slice in the pool of another node", func() error { return a.Create(ctx, resourceSlice("slice-c", "node-a", "node-b")) }, "may write only ResourceSlices of roce.smcr.io for this node, in its pool"},
		{"deletion of own slice", func() error { return a.Delete(ctx, resourceSlice("slice-a", "node-a", "node-a")) }, ""},
		{"pod of another node", func() error { return patchPod(ctx, a, theirs, `{"metadata":{"annotations":{"smcr.io/status":"x"}}}`) }, "may write only to pods of this node"},
		{"other annotation", func() error { return patchPod(ctx, a, mine, `{"metadata":{"annotations":{"smcr.io/enabled":"true"}}}`) }, "only the annotation smcr.io/status"},
		{"change of an annotation", func() error { return patchPod(ctx, a, mine, `{"metadata":{"annotations":{"a":"c"}}}`) }, "only the annotation smcr.io/status"},
		{"removal of an annotation", func() error { return patchPod(ctx, a, mine, `{"metadata":{"annotations":{"a":null}}}`) }, "only the annotation smcr.io/status"},
		{"label", func() error { return patchPod(ctx, a, mine, `{"metadata":{"labels":{"app":"db"}}}`) }, "only the annotation smcr.io/status"},
		{"finalizer", func() error { return patchPod(ctx, a, mine, `{"metadata":{"finalizers":["example.com/x"]}}`) }, "only the annotation smcr.io/status"},
		{"phase", func() error { return patchPod(ctx, a, mine, `{"status":{"phase":"Failed"}}`) }, "only the annotation smcr.io/status"},
		{"condition", func() error {
			return patchPod(ctx, a, mine, `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`)
		}, "only the annotation smcr.io/status"},
		{"token of no pod", func() error { return apply(ctx, unbound, smcrObject("SMCRNode", "node-a", "node-a")) }, "names no node"},
		{"pod itself", func() error { return a.Delete(ctx, mine.DeepCopy()) }, `cannot delete resource "pods"`},
		{"policy", func() error {
			o := smcrObject("SMCRPolicy", "p", "")
			o.SetNamespace("shop")
			return apply(ctx, a, o)
		}, `cannot patch resource "smcrpolicies"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			judge(t, tt.do(), tt.want)
		})
	}
}

// TestControllerIsConfinedToStatuses: of a pod it, and the hook that uninstalls, may change the
// annotation smcr.io/status, on whatever node, and nothing else.
func TestControllerIsConfinedToStatuses(t *testing.T) {
	install(t, admin(t))
	for _, account := range []string{"kube-smcr-controller", "kube-smcr-uninstall"} {
		t.Run(account, func(t *testing.T) { confinedToStatuses(t, account) })
	}
}

func confinedToStatuses(t *testing.T, account string) {
	ctx, root := t.Context(), admin(t)
	ensure(t, root, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
	p := newPod(t, root, "shop", "web-of-"+account, "node-a", "default")
	c := clientOf(t, tokenOf(t, account, nil))
	const refused = "the controller may change only the annotation smcr.io/status"
	awaitRefusal(t, refused, func() error { return patchPod(ctx, c, p, `{"metadata":{"labels":{"app":"db"}}}`) })
	for _, tt := range []struct{ name, patch, want string }{
		{"status", `{"metadata":{"annotations":{"smcr.io/status":"Fallback: NO_AGENT"}}}`, ""},
		{"other annotation", `{"metadata":{"annotations":{"smcr.io/enabled":"true"}}}`, refused},
		{"removal of an annotation", `{"metadata":{"annotations":{"a":null}}}`, refused},
		{"phase", `{"status":{"phase":"Failed"}}`, refused},
		{"finalizer", `{"metadata":{"finalizers":["example.com/x"]}}`, refused},
	} {
		t.Run(tt.name, func(t *testing.T) { judge(t, patchPod(ctx, c, p, tt.patch), tt.want) })
	}
	if err := c.Patch(ctx, p.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"smcr.io/status":"x"}}}`))); err == nil {
		t.Error("it may write pods themselves")
	}
}

// newClaim makes a claim that has a device of ours and one of another driver on a
// node, and a status for that.
func newClaim(t *testing.T, c client.Client, name, node string) {
	t.Helper()
	o := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
	results := []resourceapi.DeviceRequestAllocationResult{
		{Request: "nic", Driver: v1alpha1.DRADriver, Pool: node, Device: "vf0"},
		{Request: "nic", Driver: v1alpha1.DRADriver, Pool: "elsewhere", Device: "vf0"},
		{Request: "nic", Driver: "gpu.example.com", Pool: node, Device: "gpu0"},
	}
	o.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: v1alpha1.DRADriver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(len(results)),
	}}}
	must(t, c.Create(t.Context(), o))
	o.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: results},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
			{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}},
		}}}},
	}
	o.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "web", UID: "u1"}}
	o.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: "gpu.example.com", Pool: node, Device: "gpu0"}}
	must(t, c.Status().Update(t.Context(), o))
}

// applyClaim writes the status of a claim as the agents do.
func applyClaim(ctx context.Context, c client.Client, name, status string) error {
	o := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
	text := fmt.Sprintf(`{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"namespace": "shop", "name": %q}, "status": %s}`, name, status)
	return c.Status().Patch(ctx, o, client.RawPatch(types.ApplyPatchType, []byte(text)), client.FieldOwner(v1alpha1.ManagerAgent), client.ForceOwnership)
}

// TestAgentsWriteTheirDevicesOfClaims: of the status of a claim, agents write the
// devices that are theirs, and nothing else.
func TestAgentsWriteTheirDevicesOfClaims(t *testing.T) {
	ctx, root := t.Context(), admin(t)
	install(t, root)
	ensure(t, root, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}})
	a := agentOf(t, root, "node-a")
	newClaim(t, root, "mine", "node-a")
	newClaim(t, root, "theirs", "node-b")
	newClaim(t, root, "first", "node-a")
	named := func(ifName, driver, pool, device string) string {
		return fmt.Sprintf(`{"devices": [{"driver": %q, "pool": %q, "device": %q,
			"networkData": {"interfaceName": %q, "ips": ["10.0.2.7/24", "fd97::7/64"], "hardwareAddress": "02:00:00:00:00:07"}}]}`, driver, pool, device, ifName)
	}
	devices := func(driver, pool, device string) string { return named("smcr0", driver, pool, device) }
	// A policy holds a moment after it was made, and for what changes.
	i := 0
	awaitRefusal(t, "ValidatingAdmissionPolicy", func() error {
		i++
		return applyClaim(ctx, a, "first", named(fmt.Sprint("smcr", i), v1alpha1.DRADriver, "elsewhere", "vf0"))
	})
	for _, tt := range []struct {
		name, claim, status string
		want                string // "" is allowed
	}{
		{"own device", "mine", devices(v1alpha1.DRADriver, "node-a", "vf0"), ""},
		{"no device any more", "mine", `{}`, ""},
		{"device of another pool", "mine", devices(v1alpha1.DRADriver, "elsewhere", "vf0"), "may write only devices of roce.smcr.io of this node"},
		{"device of another driver", "mine", devices("gpu.example.com", "node-a", "gpu0"), "resourceclaims/driver"},
		{"device of another node's claim", "theirs", devices(v1alpha1.DRADriver, "node-b", "vf0"), "resourceclaims/driver"},
		{"reservation", "mine", `{"reservedFor": [{"resource": "pods", "name": "other", "uid": "u2"}]}`, "resourceclaims/binding"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := applyClaim(ctx, a, tt.claim, tt.status)
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("%v, want that it is allowed", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("%v, want that it is forbidden: %q", err, tt.want)
			}
		})
	}
	var got resourceapi.ResourceClaim
	must(t, root.Get(ctx, client.ObjectKey{Namespace: "shop", Name: "mine"}, &got))
	if len(got.Status.Devices) != 1 || got.Status.Devices[0].Driver != "gpu.example.com" || len(got.Status.ReservedFor) != 1 {
		t.Errorf("status afterwards: %+v", got.Status)
	}
}
