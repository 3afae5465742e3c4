// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/controller"
	"github.com/smcr-io/kube-smcr/internal/testenv/apiserver"
)

var server apiserver.Shared

func TestMain(m *testing.M) { os.Exit(server.Main(m)) }

const (
	system      = "kube-smcr"
	namespaces  = 10
	podsPerNode = 10
	linksPerPod = 1
	churnFor    = 10 * time.Second
	churnRate   = 100 // pods replaced per second
	restFor     = 10 * time.Second
	writers     = 24
	// convergePoll is seldom: to look is to read thousands of objects.
	convergePoll = 500 * time.Millisecond
)

// The bounds are generous: they are for a loaded machine of two cores, and catch
// what grows with the square of something.
const (
	maxConverge  = 3 * time.Minute
	maxRSSMiB    = 300
	maxRestCPU   = 0.25 // cores, at rest
	maxRestRate  = 1.5  // writes per second, at rest: the renewal of the lease, every second
	maxChurnCPU  = 1.0  // cores, while 100 pods per second are replaced
	maxChurnRate = 50.0 // writes per second, in churn
)

// cluster is the large one.
type cluster struct {
	client.Client
	t     *testing.T
	nodes int
	serve *process // the controller

	mu   sync.Mutex
	pods []*corev1.Pod
}

func TestScale(t *testing.T) {
	c := newCluster(t)
	began := time.Now()
	c.fill()
	t.Logf("made %d nodes, %d pods and %d SMCRLinks in %v", c.nodes, len(c.pods), c.links(), time.Since(began).Round(time.Second))

	c.serve = startController(t, server.Config(t))
	took := c.converge("start", func() error { return errors.Join(c.policiesAreRight(), c.agentsAre(c.nodes, 0)) })
	m := c.serve.measure()
	t.Logf("start: converged %v after the controller started: %.1f CPU s, RSS %d MiB, %.0f API writes", took, m.cpu.Seconds(), m.rssMiB, m.writes)
	c.bound("RSS in MiB after the start", float64(m.rssMiB), maxRSSMiB)

	before := c.quiesce()
	d := c.rest(before)
	t.Logf("at rest for %v: %.3f cores, %.2f API writes/s", restFor, d.cores(), d.rate())
	c.bound("cores at rest", d.cores(), maxRestCPU)
	c.bound("API writes/s at rest", d.rate(), maxRestRate)

	before = c.serve.measure()
	replaced := c.churn()
	d = c.serve.measure().since(before)
	took = c.converge("churn", c.policiesAreRight)
	m = c.serve.measure()
	t.Logf("churn: %d pods replaced in %v: %.3f cores, %.1f API writes/s, RSS %d MiB; converged %v after the last one",
		replaced, d.wall.Round(time.Second), d.cores(), d.rate(), m.rssMiB, took)
	c.bound("cores in churn", d.cores(), maxChurnCPU)
	c.bound("API writes/s in churn", d.rate(), maxChurnRate)
	c.bound("RSS in MiB after the churn", float64(m.rssMiB), maxRSSMiB)

	before = c.quiesce()
	dead := c.nodes / 10
	c.killAgents(dead)
	took = c.converge("death of agents", func() error {
		return errors.Join(c.agentsAre(c.nodes-dead, dead), c.linksAre(v1alpha1.LinkActive, (c.nodes-dead)*podsPerNode*linksPerPod), c.policiesAreDegraded())
	})
	d = c.serve.measure().since(before)
	t.Logf("%d nodes lost their agent: all %d links gone and policies Degraded %v after the last one (3 s of it are grace): %.1f CPU s, %.0f API writes",
		dead, dead*podsPerNode*linksPerPod, took, d.cpu.Seconds(), d.writes)
}

// bound fails the test if a figure is beyond its bound.
func (c *cluster) bound(what string, got, most float64) {
	c.t.Helper()
	if got > most {
		c.t.Errorf("%s: %.2f, want %.2f at most", what, got, most)
	}
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	config := server.Config(t)
	config.QPS, config.Burst = 5000, 5000
	scheme, err := controller.NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	cl, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{Client: cl, t: t, nodes: 500}
	if n, err := strconv.Atoi(os.Getenv("SCALE_NODES")); err == nil && n > 0 {
		c.nodes = n
	}
	startKwok(t, config)
	return c
}

// fill makes the cluster. Pods are made by whoever makes pods, run by kwok, and
// annotated by their agents, which also write SMCRNodes and SMCRLinks.
func (c *cluster) fill() {
	c.each(1, func(int) error { return c.make(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: system}}) })
	c.each(namespaces, func(i int) error {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name: namespace(i), Labels: map[string]string{"half": strconv.Itoa(i % 2)}, Annotations: map[string]string{v1alpha1.AnnotationEnabled: "true"},
		}}
		svc := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: "db"},
			Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "db"}, Ports: []corev1.ServicePort{{Port: 5432}}},
		}
		return errors.Join(c.make(ns), c.make(svc), c.make(policy(i)))
	})
	c.each(c.nodes, func(i int) error {
		return errors.Join(
			c.make(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node(i), Annotations: map[string]string{"kwok.x-k8s.io/node": "fake"}}}),
			c.make(agentPod(i)), c.make(smcrNode(i)),
		)
	})
	c.pods = make([]*corev1.Pod, c.nodes*podsPerNode)
	c.each(len(c.pods), func(i int) error {
		c.pods[i] = pod(i, 0)
		return errors.Join(c.make(c.pods[i]), c.make(link(i, c.pods[i])))
	})
	c.converge("kwok", func() error {
		var l corev1.PodList
		if err := c.List(c.t.Context(), &l, client.MatchingFields{"status.phase": string(corev1.PodPending)}); err != nil {
			return err
		}
		if n := len(l.Items); n > 0 {
			return fmt.Errorf("%d pods do not run", n)
		}
		return nil
	})
}

func (c *cluster) links() int { return len(c.pods) * linksPerPod }

// make makes an object, whoever else did already.
func (c *cluster) make(obj client.Object) error {
	if err := c.Create(c.t.Context(), obj); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make %T %s: %w", obj, obj.GetName(), err)
	}
	return nil
}

// each calls f for 0 to n-1, several at a time.
func (c *cluster) each(n int, f func(i int) error) {
	c.t.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(writers, n) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && c.t.Context().Err() == nil; i = int(next.Add(1)) - 1 {
				if err := f(i); err != nil {
					c.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if c.t.Failed() {
		c.t.FailNow()
	}
}

func namespace(i int) string { return fmt.Sprintf("shop-%d", i) }
func node(i int) string      { return fmt.Sprintf("node-%03d", i) }

// apps are spread evenly over the pods; peers are selected by them.
func app(i int) string { return []string{"web", "db", "cache", "job"}[i/namespaces%4] }

func policy(i int) *v1alpha1.SMCRPolicy {
	p := &v1alpha1.SMCRPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace(i), Name: "policy"}}
	switch db := map[string]v1alpha1.LabelValue{"app": "db"}; i {
	case 0: // the databases of all namespaces
		p.Spec.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{
			NamespaceSelector: &v1alpha1.LabelSelector{}, PodSelector: &v1alpha1.LabelSelector{MatchLabels: db},
		}}}
	case 1: // all pods of half of the namespaces
		p.Spec.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{
			NamespaceSelector: &v1alpha1.LabelSelector{MatchLabels: map[string]v1alpha1.LabelValue{"half": "0"}},
		}}}
	case 2, 3: // the own databases
		p.Spec.Peers = &v1alpha1.PolicyPeers{Selectors: []v1alpha1.PeerSelector{{PodSelector: &v1alpha1.LabelSelector{MatchLabels: db}}}}
	}
	return p
}

func container() corev1.PodSpec {
	no := false
	return corev1.PodSpec{AutomountServiceAccountToken: &no, Containers: []corev1.Container{{Name: "c", Image: "i"}}}
}

func pod(i, generation int) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace(i % namespaces), Name: fmt.Sprintf("pod-%04d-%d", i, generation), Labels: map[string]string{"app": app(i)},
			Annotations: map[string]string{v1alpha1.AnnotationStatus: v1alpha1.PodStatusEnabled},
		},
		Spec: container(),
	}
	p.Spec.NodeName = node(i / podsPerNode)
	return p
}

func agentPod(i int) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: system, Name: "agent-" + node(i),
			Labels: map[string]string{"app.kubernetes.io/part-of": "kube-smcr", "app.kubernetes.io/component": "agent"},
		},
		Spec: container(),
	}
	p.Spec.NodeName, p.Spec.HostNetwork = node(i), true
	return p
}

func smcrNode(i int) *v1alpha1.SMCRNode {
	n := &v1alpha1.SMCRNode{ObjectMeta: metav1.ObjectMeta{Name: node(i), Labels: map[string]string{v1alpha1.LabelNode: node(i)}}}
	n.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Running", LastTransitionTime: metav1.Now()}}
	for d := range 2 {
		n.Status.Devices = append(n.Status.Devices, v1alpha1.NodeDevice{Name: fmt.Sprintf("mlx5_%d", d), Transport: v1alpha1.TransportHardware, Port: "Active"})
	}
	return n
}

func link(i int, p *corev1.Pod) *v1alpha1.SMCRLink {
	l := &v1alpha1.SMCRLink{ObjectMeta: metav1.ObjectMeta{
		Name: fmt.Sprintf("link-%05d", i), Labels: map[string]string{v1alpha1.LabelNode: p.Spec.NodeName, v1alpha1.LabelNamespace: p.Namespace},
	}}
	l.Status = v1alpha1.SMCRLinkStatus{
		Node: p.Spec.NodeName, Peer: node(0), Namespace: p.Namespace, Pod: p.Namespace + "/" + p.Name, Role: "Client",
		State: v1alpha1.LinkActive, Redundancy: v1alpha1.RedundancySymmetric, Devices: "mlx5_0,mlx5_1", Version: 2, MTUBytes: 4096,
	}
	for id := range int32(2) {
		l.Status.Links = append(l.Status.Links, v1alpha1.LinkStatus{ID: id, State: v1alpha1.LinkActive, Device: fmt.Sprintf("mlx5_%d", id), LocalQPN: int64(i)})
	}
	return l
}

// churn replaces pods, as fast as churnRate and the machine allow. It returns
// how many.
func (c *cluster) churn() int {
	ctx, cancel := context.WithTimeout(c.t.Context(), churnFor)
	defer cancel()
	tick := time.NewTicker(time.Second / churnRate)
	defer tick.Stop()
	var replaced atomic.Int64
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				i := int(replaced.Add(1)) - 1
				old := c.pods[i%len(c.pods)]
				p := pod(i%len(c.pods), 1+i/len(c.pods))
				if err := errors.Join(c.Delete(c.t.Context(), old, client.GracePeriodSeconds(0)), c.make(p)); err != nil {
					c.t.Errorf("replace pod %s: %v", old.Name, err)
					return
				}
				c.mu.Lock()
				c.pods[i%len(c.pods)] = p
				c.mu.Unlock()
			}
		})
	}
	wg.Wait()
	return int(replaced.Load())
}

// killAgents lets the agents of the first nodes be not ready.
func (c *cluster) killAgents(n int) {
	patch := []byte(`{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`)
	c.each(n, func(i int) error {
		return c.Status().Patch(c.t.Context(), agentPod(i), client.RawPatch(types.StrategicMergePatchType, patch))
	})
}

// converge waits until check is content, and returns how long that took.
func (c *cluster) converge(what string, check func() error) time.Duration {
	c.t.Helper()
	began := time.Now()
	var err error
	for time.Since(began) < maxConverge {
		if err = check(); err == nil {
			return time.Since(began).Round(10 * time.Millisecond)
		}
		time.Sleep(convergePoll) // polls the API server
	}
	c.t.Fatalf("%s: not converged within %v: %v", what, maxConverge, err)
	return 0
}

// quiesce waits until the controller does nothing any more.
func (c *cluster) quiesce() measurement {
	c.t.Helper()
	last := c.serve.measure()
	for deadline := time.Now().Add(maxConverge); time.Now().Before(deadline); {
		time.Sleep(3 * time.Second) // polls the controller
		m := c.serve.measure()
		if m.since(last).rate() < 1 {
			return m
		}
		last = m
	}
	c.t.Fatal("the controller goes on writing though nothing happens")
	return last
}

// rest is what the controller does when nothing happens. It is looked at once a
// second, so that its end is seen at once.
func (c *cluster) rest(before measurement) (d measurement) {
	c.t.Helper()
	for d.wall < restFor {
		time.Sleep(time.Second) // polls the controller
		d = c.serve.measure().since(before)
	}
	return d
}

// policiesAreRight compares the status of each policy with what the test made.
// Pods that were replaced have no link any more.
func (c *cluster) policiesAreRight() error {
	var l v1alpha1.SMCRPolicyList
	if err := c.List(c.t.Context(), &l); err != nil {
		return err
	}
	if len(l.Items) != namespaces {
		return fmt.Errorf("%d policies, want %d", len(l.Items), namespaces)
	}
	pods, databases := map[string]int32{}, map[string]int32{}
	c.mu.Lock()
	for _, p := range c.pods {
		pods[p.Namespace]++
		if p.Labels["app"] == "db" {
			databases[p.Namespace]++
		}
	}
	c.mu.Unlock()
	for i := range l.Items {
		p := &l.Items[i]
		s := p.Status
		peers := int32(0)
		switch p.Namespace {
		case namespace(0):
			for i := range namespaces {
				peers += databases[namespace(i)] + 1 // and the Service
			}
		case namespace(1):
			for i := 0; i < namespaces; i += 2 {
				peers += pods[namespace(i)] + 1
			}
		case namespace(2), namespace(3):
			peers = databases[p.Namespace] + 1
		}
		if n := pods[p.Namespace]; s.Pods.OptedIn != n || s.Pods.Accelerated != n || s.PeerAddresses != peers {
			return fmt.Errorf("%s: %+v and %d peers, want %d pods and %d peers", p.Namespace, s.Pods, s.PeerAddresses, n, peers)
		}
		if !meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReady) {
			return fmt.Errorf("%s: not ready", p.Namespace)
		}
	}
	return nil
}

func (c *cluster) policiesAreDegraded() error {
	var l v1alpha1.SMCRPolicyList
	if err := c.List(c.t.Context(), &l); err != nil {
		return err
	}
	for i := range l.Items {
		if !meta.IsStatusConditionTrue(l.Items[i].Status.Conditions, v1alpha1.ConditionDegraded) {
			return fmt.Errorf("the policy of %s is not degraded", l.Items[i].Namespace)
		}
	}
	return nil
}

func (c *cluster) agentsAre(alive, dead int) error {
	var l v1alpha1.SMCRNodeList
	if err := c.List(c.t.Context(), &l); err != nil {
		return err
	}
	n := map[metav1.ConditionStatus]int{}
	for i := range l.Items {
		if cond := meta.FindStatusCondition(l.Items[i].Status.Conditions, v1alpha1.ConditionAgentAlive); cond != nil {
			n[cond.Status]++
		}
	}
	if n[metav1.ConditionTrue] != alive || n[metav1.ConditionFalse] != dead {
		return fmt.Errorf("agents alive: %v, want %d and %d not", n, alive, dead)
	}
	return nil
}

func (c *cluster) linksAre(state v1alpha1.LinkState, want int) error {
	var l v1alpha1.SMCRLinkList
	if err := c.List(c.t.Context(), &l); err != nil {
		return err
	}
	n := 0
	for i := range l.Items {
		if l.Items[i].Status.State == state {
			n++
		}
	}
	if n != want {
		return fmt.Errorf("%d links are %s, want %d", n, state, want)
	}
	return nil
}
