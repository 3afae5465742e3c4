// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

func TestMetrics(t *testing.T) {
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	m := newMetrics(slog.New(slog.DiscardHandler))
	expect := func(name, want string) {
		t.Helper()
		if err := testutil.CollectAndCompare(m, strings.NewReader(want), name); err != nil {
			t.Error(err)
		}
	}
	const leader = `
# HELP kube_smcr_controller_leader 1 on the replica that leads. Only it has the other metrics.
# TYPE kube_smcr_controller_leader gauge
`
	expect("kube_smcr_controller_leader", leader+"kube_smcr_controller_leader 0\n")

	ready := newPolicy("shop", "a")
	ready.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue}}
	pods := []*corev1.Pod{
		newPod("shop", "enabled", "n", "10.0.0.1"), newPod("shop", "fallback", "n", "10.0.0.2"), newPod("shop", "out", "n", "10.0.0.3"),
		newPod("shop", "host", "n", "192.0.2.1"), newPod("other", "none", "n", "10.0.0.4"),
		newPod("other", "claims", "n", "10.0.0.5"), newPod("shop", "host-kernel", "n", "192.0.2.1"), newPod("shop", "host-asks", "n", "192.0.2.1"),
		newPod("other", "copied", "n", "10.0.0.6"), newPod("shop", "junk", "n", "10.0.0.7"),
	}
	optedIn("Enabled")(pods[0])
	optedIn("Fallback: NO_OPTION")(pods[1])
	pods[2].Annotations[v1alpha1.AnnotationEnabled] = "false"
	for _, i := range []int{3, 6, 7} {
		pods[i].Spec.HostNetwork = true
	}
	optedIn(v1alpha1.PodStatusKernel)(pods[6])
	optedIn("")(pods[7])                                       // and its policies do not
	claims("Fallback: NOSMCDEV")(pods[5])                      // of its agent, which knows of the claim
	pods[8].Annotations[v1alpha1.AnnotationStatus] = "Enabled" // of nobody: the pod has no claim
	optedIn("Fallback: \xff")(pods[9])                         // of nobody
	down := newLink("b", "n", "shop", "x")
	down.Status.State, down.Status.Redundancy = v1alpha1.LinkDown, v1alpha1.RedundancyNone
	b := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"}}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}},
		ready, newPolicy("shop", "b"), newLink("a", "n", "shop", "x"), newLink("c", "n", "shop", "x"), down, newSMCRNode("n"),
		judged("gone", reasonAgentSilent), judged("left", reasonAgentLeft),
	)
	for _, p := range pods {
		b.WithObjects(p)
	}
	m.lead(b.Build())
	expect("kube_smcr_controller_leader", leader+"kube_smcr_controller_leader 1\n")
	expect("kube_smcr_controller_policies", `
# HELP kube_smcr_controller_policies SMCRPolicies by the status of their condition Ready.
# TYPE kube_smcr_controller_policies gauge
kube_smcr_controller_policies{ready="False"} 0
kube_smcr_controller_policies{ready="True"} 1
kube_smcr_controller_policies{ready="Unknown"} 1
`)
	expect("kube_smcr_controller_links", `
# HELP kube_smcr_controller_links SMCRLinks, one per link group and side, by state and redundancy.
# TYPE kube_smcr_controller_links gauge
kube_smcr_controller_links{redundancy="None",state="Down"} 1
kube_smcr_controller_links{redundancy="Symmetric",state="Active"} 2
`)
	expect("kube_smcr_controller_nodes", `
# HELP kube_smcr_controller_nodes SMCRNodes by whether their agent is alive, or Left them on purpose, and connections can be on SMC-R.
# TYPE kube_smcr_controller_nodes gauge
kube_smcr_controller_nodes{accelerating="Unknown",agent_alive="False"} 1
kube_smcr_controller_nodes{accelerating="Unknown",agent_alive="Left"} 1
kube_smcr_controller_nodes{accelerating="Unknown",agent_alive="Unknown"} 1
`)
	expect("kube_smcr_controller_pods", `
# HELP kube_smcr_controller_pods Opted-in running pods by status and, of those on plain TCP, reason.
# TYPE kube_smcr_controller_pods gauge
kube_smcr_controller_pods{reason="",status="Enabled"} 2
kube_smcr_controller_pods{reason="NOSMCDEV",status="Fallback"} 1
kube_smcr_controller_pods{reason="NO_OPTION",status="Fallback"} 1
kube_smcr_controller_pods{reason="UNKNOWN",status="Fallback"} 1
`)
}

// TestMetrics_reasons: whoever writes the annotation of his pods does not decide how many series there are.
func TestMetrics_reasons(t *testing.T) {
	scheme, err := NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	b := fake.NewClientBuilder().WithScheme(scheme)
	for i := range 1000 {
		p := newPod("shop", fmt.Sprintf("p%d", i), "n", "10.0.0.1")
		optedIn(fmt.Sprintf("Fallback: X%d", i))(p)
		b.WithObjects(p)
	}
	hex, own := newPod("shop", "hex", "n", "10.0.0.1"), newPod("shop", "own", "n", "10.0.0.1")
	optedIn("Refused: 0x03050001")(hex)
	optedIn("Fallback: NO_AGENT")(own)
	m := newMetrics(slog.New(slog.DiscardHandler))
	m.lead(b.WithObjects(hex, own).Build())
	const want = `
# HELP kube_smcr_controller_pods Opted-in running pods by status and, of those on plain TCP, reason.
# TYPE kube_smcr_controller_pods gauge
kube_smcr_controller_pods{reason="",status="Enabled"} 0
kube_smcr_controller_pods{reason="NO_AGENT",status="Fallback"} 1
kube_smcr_controller_pods{reason="UNKNOWN",status="Fallback"} 1000
kube_smcr_controller_pods{reason="UNKNOWN",status="Refused"} 1
`
	if err := testutil.CollectAndCompare(m, strings.NewReader(want), "kube_smcr_controller_pods"); err != nil {
		t.Error(err)
	}
}

// judged is the SMCRNode of a node without an agent.
func judged(name, because string) *v1alpha1.SMCRNode {
	n := newSMCRNode(name)
	n.Status.Conditions = append(n.Status.Conditions, condition(v1alpha1.ConditionAgentAlive, metav1.ConditionFalse, because, ""))
	return n
}

// TestMetrics_guarded: the rights of the controller are enough to ask who may get
// its metrics.
func TestMetrics_guarded(t *testing.T) {
	w := newWorld(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	w.run(w.asController(), func(c *Config) { c.MetricsAddress, c.MetricsAuth = address, true })
	apiserver.MetricsAreGuarded(t, w.config, w.ns, address)
}
