// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/devices/deviceplugin"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

const (
	// applied is how soon a change of a policy or annotation must have reached
	// the connections of running pods.
	applied = 2 * time.Second
	// shown is how soon the controller's status must show it.
	shown = 5 * time.Second
	// soon is for what Kubernetes does on a busy machine.
	soon = 3 * time.Minute

	port = 7000
)

// cluster is one scenario's view of the cluster. Its methods end the scenario
// when something does not work.
type cluster struct {
	*testing.T
	p *product.Product
	n [2]*lab.Node
}

func newCluster(t *testing.T, p *product.Product) *cluster {
	c := &cluster{T: t, p: p, n: [2]*lab.Node{p.Lab.Nodes[0], p.Lab.Nodes[1]}}
	t.Cleanup(func() {
		if t.Failed() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			t.Logf("the cluster now:\n%s", p.Diagnose(ctx))
		}
	})
	return c
}

func (c *cluster) must(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}

// eventually waits until a condition returns nil.
func (c *cluster) eventually(what string, timeout time.Duration, condition func() error) {
	c.Helper()
	c.must(product.Eventually(c.Context(), what, timeout, condition))
}

// portDown takes a port of a node down until mend is called, or the scenario ends.
func (c *cluster) portDown(n *lab.Node, port string) (mend func()) {
	c.Helper()
	c.must(n.SetPort(c.Context(), port, false))
	mended := false
	c.Cleanup(func() {
		if !mended {
			_ = n.SetPort(context.Background(), port, true) // the scenario has failed
		}
	})
	return func() {
		c.Helper()
		mended = true
		c.must(n.SetPort(c.Context(), port, true))
	}
}

func (c *cluster) kubectl(args ...string) string {
	c.Helper()
	out, err := c.p.Lab.Kubectl(c.Context(), args...)
	c.must(err)
	return out
}

func (c *cluster) apply(objects string) {
	c.Helper()
	c.must(c.p.Lab.Apply(c.Context(), objects))
}

// namespace makes a namespace that ends with the scenario.
func (c *cluster) namespace(annotations map[string]string) string {
	c.Helper()
	name := "test-" + strings.ToLower(c.Name()[strings.LastIndexByte(c.Name(), '/')+1:])
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}}
	c.must(c.p.Client.Create(c.Context(), ns))
	c.Cleanup(func() {
		if err := c.p.Client.Delete(context.Background(), ns); err != nil && !apierrors.IsNotFound(err) {
			c.Error(err)
		}
	})
	c.eventually("the service account of "+name, soon, func() error {
		return c.p.Client.Get(c.Context(), client.ObjectKey{Namespace: name, Name: "default"}, &corev1.ServiceAccount{})
	})
	return name
}

// optedIn is the annotation.
func optedIn() map[string]string { return map[string]string{v1alpha1.AnnotationEnabled: "true"} }

// podSpec says what pod to make. Without args it serves.
type podSpec struct {
	name        string
	node        *lab.Node
	args        []string
	annotations map[string]string
	labels      map[string]string
	hostNetwork bool
	// devices is how many it asks kubelet for: then the scheduler places it.
	devices int64
}

// pod is a pod that runs.
type pod struct {
	ns, name string
	node     *lab.Node
	ip       string
}

// String is NAMESPACE/NAME.
func (p pod) String() string { return p.ns + "/" + p.name }

func (p pod) key() client.ObjectKey { return client.ObjectKey{Namespace: p.ns, Name: p.name} }

// address is where it serves.
func (p pod) address() string { return net.JoinHostPort(p.ip, fmt.Sprint(port)) }

func (s podSpec) object(ns string) *corev1.Pod {
	args := s.args
	if len(args) == 0 {
		args = []string{"serve", fmt.Sprintf(":%d", port)}
	}
	grace := int64(0)
	no, yes := false, true
	o := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: s.name, Annotations: s.annotations, Labels: s.labels},
		Spec: corev1.PodSpec{
			NodeName: s.node.Name, HostNetwork: s.hostNetwork, TerminationGracePeriodSeconds: &grace,
			DNSPolicy: corev1.DNSDefault, AutomountServiceAccountToken: &no, RestartPolicy: corev1.RestartPolicyAlways,
			Containers: []corev1.Container{{
				Name: "traffic", Image: product.Traffic, ImagePullPolicy: corev1.PullNever, Args: args,
				SecurityContext: &corev1.SecurityContext{
					RunAsNonRoot: &yes, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
	if s.devices > 0 {
		o.Spec.NodeName, o.Spec.NodeSelector = "", map[string]string{corev1.LabelHostname: s.node.Name}
		o.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
			deviceplugin.ResourceShared: *resource.NewQuantity(s.devices, resource.DecimalSI),
		}
	}
	return o
}

// start makes pods and waits until they run.
func (c *cluster) start(ns string, specs ...podSpec) []pod {
	c.Helper()
	for _, s := range specs {
		c.must(c.p.Client.Create(c.Context(), s.object(ns)))
	}
	pods := make([]pod, len(specs))
	for i, s := range specs {
		pods[i] = c.running(ns, s.name, s.node)
	}
	return pods
}

// running waits for a pod to run.
func (c *cluster) running(ns, name string, node *lab.Node) pod {
	c.Helper()
	p := pod{ns: ns, name: name, node: node}
	c.eventually("pod "+p.String(), soon, func() error {
		var o corev1.Pod
		if err := c.p.Client.Get(c.Context(), p.key(), &o); err != nil {
			return err
		}
		ready := slices.ContainsFunc(o.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		})
		if !ready || o.Status.PodIP == "" {
			return fmt.Errorf("%s is %s: %+v", p, o.Status.Phase, o.Status.ContainerStatuses)
		}
		p.ip = o.Status.PodIP
		return nil
	})
	return p
}

// status waits until the agent's annotation of a pod begins with want; "" for
// no annotation.
func (c *cluster) status(p pod, want string, timeout time.Duration) {
	c.Helper()
	c.eventually(fmt.Sprintf("the annotation %s=%s of %s", v1alpha1.AnnotationStatus, want, p), timeout, func() error {
		var o corev1.Pod
		if err := c.p.Client.Get(c.Context(), p.key(), &o); err != nil {
			return err
		}
		got, ok := o.Annotations[v1alpha1.AnnotationStatus]
		if want == "" && !ok || want != "" && strings.HasPrefix(got, want) {
			return nil
		}
		return fmt.Errorf("it is %q", got)
	})
}

// event waits for an event of an object whose message contains text.
func (c *cluster) event(ns, name, reason, text string) {
	c.Helper()
	c.eventually(fmt.Sprintf("the event %s of %s with %q", reason, name, text), soon, func() error {
		var list corev1.EventList
		if err := c.p.Client.List(c.Context(), &list, client.InNamespace(ns)); err != nil {
			return err
		}
		var seen []string
		for _, e := range list.Items {
			if e.InvolvedObject.Name != name {
				continue
			}
			if e.Reason == reason && strings.Contains(e.Message, text) {
				return nil
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("there are %q", seen)
	})
}

// once makes a connection from a pod and returns what the application there
// says: nil if it worked.
func (c *cluster) once(from pod, address string) error {
	_, err := c.p.Lab.Kubectl(c.Context(), "exec", "-n", from.ns, from.name, "--", "/usr/bin/traffic", "once", address)
	return err
}

// sum is a line of the command traffic.
type sum struct {
	OK          int            `json:"ok"`
	Failed      int            `json:"failed"`
	Reset       int            `json:"reset"` // of those that failed: after they were connected
	Errors      map[string]int `json:"errors"`
	WorstMillis int64          `json:"worstMillis"`
	// FailingMillis is the time from the first failure to the last.
	FailingMillis int64 `json:"failingMillis"`
	Ended         bool  `json:"ended"`
}

// last is the last line of a pod's log.
func (c *cluster) last(p pod) (sum, error) {
	one := int64(1)
	text, err := c.p.Clientset.CoreV1().Pods(p.ns).GetLogs(p.name, &corev1.PodLogOptions{TailLines: &one}).DoRaw(c.Context())
	if err != nil {
		return sum{}, err
	}
	var s sum
	if err := json.Unmarshal(bytes.TrimSpace(text), &s); err != nil {
		return sum{}, fmt.Errorf("log of %s: %q: %w", p, text, err)
	}
	return s, nil
}

// grows waits until a client has done n more than s, and returns its new sum.
func (c *cluster) grows(p pod, s sum, n int) sum {
	c.Helper()
	var now sum
	c.eventually(fmt.Sprintf("%d connections of %s", n, p), soon, func() error {
		var err error
		if now, err = c.last(p); err == nil && now.OK < s.OK+n {
			err = fmt.Errorf("it has %+v", now)
		}
		return err
	})
	return now
}

// goesOn waits until a client has done n more than its log says now, and returns its new sum. What the
// log says now may be a second old, and so of before what the scenario did last.
func (c *cluster) goesOn(p pod, n int) sum {
	c.Helper()
	s, err := c.last(p)
	c.must(err)
	return c.grows(p, s, n)
}

// onSMCR waits until the agent of a pod's node says that its connections to
// address are on SMC-R, making connections.
func (c *cluster) onSMCR(from pod, address string) {
	c.Helper()
	c.eventually(fmt.Sprintf("%s to %s on SMC-R", from, address), soon, func() error {
		if err := c.once(from, address); err != nil {
			return err
		}
		e, err := c.explain(from, address)
		if err == nil && e.Code != agentapi.CodeOK {
			err = fmt.Errorf("%s: %s", e.Code, e.Verdict)
		}
		return err
	})
}

// explain asks the agent of the pod's node.
func (c *cluster) explain(from pod, address string) (agentapi.Explanation, error) {
	var e agentapi.Explanation
	text, err := c.p.SMCRCtl(c.Context(), from.node.Name, "explain", "-o", "json", from.String(), address)
	if text == "" {
		return e, err // exit code 4 is "not on SMC-R", with an answer
	}
	return e, json.Unmarshal([]byte(text), &e)
}

// links are the SMCRLinks of a pod.
func (c *cluster) links(p pod) ([]v1alpha1.SMCRLink, error) {
	var list v1alpha1.SMCRLinkList
	if err := c.p.Client.List(c.Context(), &list); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(l v1alpha1.SMCRLink) bool { return l.Status.Pod != p.String() }), nil
}

// active waits for an active SMCRLink of a pod, and returns it.
func (c *cluster) active(p pod) v1alpha1.SMCRLink {
	c.Helper()
	var found v1alpha1.SMCRLink
	c.eventually("an active SMCRLink of "+p.String(), soon, func() error {
		links, err := c.links(p)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(links, func(l v1alpha1.SMCRLink) bool { return l.Status.State == v1alpha1.LinkActive })
		if i < 0 {
			return fmt.Errorf("it has %d that are not", len(links))
		}
		found = links[i]
		return nil
	})
	return found
}

// condition waits for a condition of a policy.
func (c *cluster) condition(ns, policy, condition, status string) {
	c.Helper()
	c.eventually(fmt.Sprintf("%s=%s of policy %s", condition, status, policy), shown, func() error {
		var o v1alpha1.SMCRPolicy
		if err := c.p.Client.Get(c.Context(), client.ObjectKey{Namespace: ns, Name: policy}, &o); err != nil {
			return err
		}
		got := meta.FindStatusCondition(o.Status.Conditions, condition)
		if got == nil || string(got.Status) != status || got.ObservedGeneration != o.Generation {
			return fmt.Errorf("it is %+v in generation %d", got, o.Generation)
		}
		return nil
	})
}

// contains fails unless text has a line with all words.
func (c *cluster) contains(text string, words ...string) {
	c.Helper()
	for line := range strings.Lines(text) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return
		}
	}
	c.Errorf("no line with %q in:\n%s", words, text)
}
