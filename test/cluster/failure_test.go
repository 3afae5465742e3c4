// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cni"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/product"
)

// pair starts a server on the first node and a client on the second one, both
// opted in, and waits until connections between them are on SMC-R.
func (c *cluster) pair(command string) (server, client pod) {
	c.Helper()
	ns := c.namespace(optedIn())
	server = c.start(ns, podSpec{name: "server", node: c.n[0]})[0]
	c.status(server, v1alpha1.PodStatusEnabled, soon)
	client = c.start(ns, podSpec{name: "client", node: c.n[1], args: []string{command, server.address()}})[0]
	c.status(client, v1alpha1.PodStatusEnabled, soon)
	c.onSMCR(client, server.address())
	return server, client
}

// killAgents kills the agents of a node, and not their containers' runtime.
func (c *cluster) killAgents(n *lab.Node) {
	c.Helper()
	out, err := n.Run(c.Context(), "pidof", "node-agent")
	c.must(err)
	_, err = n.Run(c.Context(), append([]string{"kill", "-KILL"}, strings.Fields(out)...)...)
	c.must(err)
}

// agentKilled: connections of a killed agent are reset, and new ones go directly until there is an
// agent again.
func agentKilled(c *cluster) {
	server, holder := c.pair("hold")
	l := c.startLoads(server, c.n[1])
	aliveSince := c.aliveSince(c.n[1])
	c.killAgents(c.n[1])
	c.ends(holder, soon)
	c.must(c.p.WaitNode(c.Context(), c.n[1].Name))
	reset := l.end("agent killed")
	c.onSMCR(holder, server.address())
	if s, err := c.last(l.carried); err != nil || s.Failed > reset {
		c.Errorf("connections failed afterwards: %+v, %v", s, err)
	}
	if since := c.aliveSince(c.n[1]); !since.Equal(aliveSince) {
		c.Errorf("an agent that started again at once counted as gone: alive since %v, and before since %v", since, aliveSince)
	}

	// One that is killed whenever it starts is gone, also while it starts again and again.
	stop := c.keepKilled(c.n[1])
	c.agentGone(c.n[1], l.carried, metav1.ConditionUnknown)
	stop()
	crashed, err := c.p.AgentPod(c.Context(), c.n[1].Name)
	c.must(err)
	c.kubectl("delete", "pod", "-n", product.Namespace, crashed.Name) // the next one does not wait until kubelet starts it again
	c.must(c.p.WaitNode(c.Context(), c.n[1].Name))
	c.status(l.carried, v1alpha1.PodStatusEnabled, soon)
}

// keepKilled kills the agents of a node as soon as they start, until stop is called.
func (c *cluster) keepKilled(n *lab.Node) (stop func()) {
	ctx, cancel := context.WithCancel(c.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			_, _ = n.Run(ctx, "sh", "-c", "kill -KILL $(pidof node-agent)") // between two starts there is none
			<-time.After(50 * time.Millisecond)                             // polls the start of an agent
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// aliveSince is since when the agent of a node is alive.
func (c *cluster) aliveSince(n *lab.Node) time.Time {
	c.Helper()
	var o v1alpha1.SMCRNode
	c.must(c.p.Client.Get(c.Context(), key("", n.Name), &o))
	alive := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionAgentAlive)
	if alive == nil || alive.Status != metav1.ConditionTrue {
		c.Fatalf("SMCRNode %s: AgentAlive is %+v", n.Name, alive)
	}
	return alive.LastTransitionTime.Time
}

// bypassed is redirectTTL, and what a busy machine adds.
const bypassed = 3 * time.Second

// records reads the attachment records of a node. One may go away meanwhile, which
// is an error.
func (c *cluster) records(n *lab.Node) ([]cni.Attachment, error) {
	c.Helper()
	dir, err := n.Path(c.Context(), "/run/kube-smcr/attachments")
	c.must(err)
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	c.must(err)
	var records []cni.Attachment
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		r, err := cni.ParseAttachment(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		records = append(records, r)
	}
	return records, nil
}

// sandboxes are the names of the network namespaces of the pods of a node.
func (c *cluster) sandboxes(n *lab.Node) []string {
	c.Helper()
	dir, err := n.Path(c.Context(), "/run/netns")
	c.must(err)
	entries, err := os.ReadDir(dir)
	c.must(err)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// quiesced waits until a node has the networks of its pods and no other, and no
// record of one that is gone. Pods that are older than the installation have
// none.
func (c *cluster) quiesced(n *lab.Node) {
	c.Helper()
	c.eventually("nothing of former pods on "+n.Name, soon, func() error {
		var pods corev1.PodList
		if err := c.p.Client.List(c.Context(), &pods, client.MatchingFields{"spec.nodeName": n.Name}); err != nil {
			return err
		}
		own := slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded })
		if s := c.sandboxes(n); len(s) != len(own) {
			return fmt.Errorf("%d networks of %d pods", len(s), len(own))
		}
		records, err := c.records(n)
		if err != nil {
			return err
		}
		for _, r := range records {
			netns, err := n.Path(c.Context(), r.NetNS)
			if err != nil {
				return err
			}
			if _, err := os.Stat(netns); err != nil {
				return fmt.Errorf("the record of %s of container %s is of a network that is gone", r.IfName, r.ContainerID)
			}
		}
		return nil
	})
}

// delWithoutAgent: pods that end while their agent is away leave nothing. The next agent of the
// node cannot start, as its image is missing: one after which none is to come would leave the
// node clean, with the plugin, see leave.
func delWithoutAgent(c *cluster) {
	ns := c.namespace(optedIn())
	var specs []podSpec
	for i := range 5 {
		specs = append(specs, podSpec{name: fmt.Sprintf("p%d", i), node: c.n[1]})
	}
	pods := c.start(ns, specs...)
	c.quiesced(c.n[1])
	former, err := c.p.AgentPod(c.Context(), c.n[1].Name)
	c.must(err)
	setImage := func(ctx context.Context, ref string) error {
		_, err := c.p.Lab.Kubectl(ctx, "patch", "daemonset", "-n", product.Namespace, product.Agent, "--type=json",
			"-p", fmt.Sprintf(`[{"op":"replace","path":"/spec/template/spec/containers/0/image","value":"%s"}]`, ref))
		return err
	}
	restore := func(ctx context.Context) error { return setImage(ctx, former.Spec.Containers[0].Image) }
	restored := false
	c.Cleanup(func() {
		if !restored {
			_ = restore(context.Background())
		}
	})
	c.must(setImage(c.Context(), image.ProductRepository+":nowhere"))
	c.kubectl("delete", "pod", "-n", product.Namespace, former.Name)
	c.agentGone(c.n[1], pods[0], metav1.ConditionUnknown)
	c.kubectl("delete", "pods", "-n", ns, "--all", "--now")
	c.quiesced(c.n[1])
	// Nor does a pod wait for the agent to start.
	began := time.Now()
	c.start(ns, podSpec{name: "late", node: c.n[1]})
	c.Logf("a pod started without an agent after %v", time.Since(began).Round(10*time.Millisecond))
	c.status(pod{ns: ns, name: "late"}, v1alpha1.PodStatusNoAgent, soon)
	restored = true
	c.must(restore(c.Context()))
	c.must(c.p.WaitReady(c.Context()))
	c.rolledOut()
	c.status(pod{ns: ns, name: "late"}, v1alpha1.PodStatusEnabled, soon)
}

// rolledOut waits until each node has one agent, of the present template.
func (c *cluster) rolledOut() {
	c.Helper()
	c.kubectl("rollout", "status", "daemonset", "-n", product.Namespace, product.Agent, "--timeout=2m")
	for _, n := range c.n {
		c.eventually("the end of the former agent of "+n.Name, soon, func() error {
			pods, err := c.p.AgentPods(c.Context(), n.Name)
			if err == nil && len(pods) != 1 {
				err = fmt.Errorf("there are %d", len(pods))
			}
			return err
		})
	}
}

// podDeletedDuringADD: pods that are deleted while their network is made leave
// nothing.
func podDeletedDuringADD(c *cluster) {
	ns := c.namespace(optedIn())
	n := c.n[1]
	for i := range 9 {
		before := c.sandboxes(n)
		o := podSpec{name: fmt.Sprintf("p%d", i), node: n}.object(ns)
		c.must(c.p.Client.Create(c.Context(), o))
		switch i % 3 {
		case 0: // at once
		case 1: // when it has a network, so that ADD runs
			c.eventually("the network of "+o.Name, soon, func() error {
				isNew := func(name string) bool { return !slices.Contains(before, name) }
				if !slices.ContainsFunc(c.sandboxes(n), isNew) {
					return errors.New("there is no new one")
				}
				return nil
			})
		case 2: // when our plugin was there
			c.eventually("the record of "+o.Name, soon, func() error {
				records, err := c.records(n)
				isIts := func(r cni.Attachment) bool { return r.Pod.Namespace == ns && r.Pod.Name == o.Name }
				if err == nil && !slices.ContainsFunc(records, isIts) {
					err = errors.New("there is none")
				}
				return err
			})
		}
		c.must(c.p.Client.Delete(c.Context(), o))
	}
	c.eventually("the end of the pods", soon, func() error {
		if out := c.kubectl("get", "pods", "-n", ns, "-o", "name"); out != "" {
			return errors.New(out)
		}
		return nil
	})
	c.quiesced(n)
}

// apiServerAway: everything goes on without the API server, also for an agent
// that is restarted meanwhile.
func apiServerAway(c *cluster) {
	server, holder := c.pair("hold")
	loader := c.start(server.ns, podSpec{name: "loader", node: c.n[1], args: []string{"load", server.address()}})[0]
	before := c.grows(loader, sum{}, 5)
	c.must(c.p.Lab.StopAPIServer(c.Context()))
	started := false
	start := func(ctx context.Context) error {
		started = true
		return c.p.Lab.StartAPIServer(ctx)
	}
	c.Cleanup(func() {
		if !started {
			_ = start(context.Background())
		}
	})
	began := time.Now()
	inOutage := c.growsOnNode(loader, before, 50)
	// The server's agent dies. Without the API server the kubelet restarts it,
	// and it has nothing but its file.
	c.killAgents(c.n[0])
	c.eventually("the agent without an API server", soon, func() error {
		var s agentapi.Status
		out, err := c.n[0].Run(c.Context(), "curl", "-s", "--unix-socket", "/run/kube-smcr/agent.sock", "http://agent"+agentapi.PathStatus)
		if err == nil {
			err = json.Unmarshal([]byte(out), &s)
		}
		if err == nil && s.Pods.Ready == 0 {
			err = fmt.Errorf("its pods are %+v", s.Pods)
		}
		return err
	})
	inOutage = c.growsOnNode(loader, inOutage, 200)
	c.must(start(c.Context()))
	c.Logf("the API server was away for %v", time.Since(began).Round(time.Second))
	after := c.grows(loader, inOutage, 20)
	// The client's agent lived; the server's was away for a moment.
	if after.FailingMillis > bypassed.Milliseconds() {
		c.Errorf("connections failed: %+v, before %+v", after, before)
	}
	c.must(c.p.WaitReady(c.Context()))
	c.onSMCR(holder, server.address())
	c.status(server, v1alpha1.PodStatusEnabled, soon)
}

// apiServerHangs: the API server answers nothing, for longer than its clients
// wait (10 s for a call, 45 s until a connection without life is given up).
// Traffic goes on, and what was changed meanwhile, or is changed then, counts.
func apiServerHangs(c *cluster) {
	const hangs = 50 * time.Second
	server, holder := c.pair("hold")
	loader := c.start(server.ns, podSpec{name: "loader", node: c.n[1], args: []string{"load", server.address()}})[0]
	traffic := c.grows(loader, sum{}, 5)
	aliveSince := c.aliveSince(c.n[1])
	c.must(c.p.Lab.PauseAPIServer(c.Context()))
	resumed := false
	resume := func(ctx context.Context) error {
		resumed = true
		return c.p.Lab.ResumeAPIServer(ctx)
	}
	c.Cleanup(func() {
		if !resumed {
			_ = resume(context.Background())
		}
	})
	for began := time.Now(); time.Since(began) < hangs; {
		traffic = c.growsOnNode(loader, traffic, 20)
	}
	c.must(resume(c.Context()))
	c.must(c.p.WaitReady(c.Context()))
	if held := c.grows(holder, sum{}, 1); traffic.Failed > 0 || held.Ended {
		c.Errorf("connections failed meanwhile: %+v and %+v", traffic, held)
	}
	c.eventually("a change to be heard of", soon, func() error {
		if _, err := c.p.Lab.Kubectl(c.Context(), "annotate", "--overwrite", "pod", "-n", holder.ns, holder.name, v1alpha1.AnnotationEnabled+"=false"); err != nil {
			return err
		}
		if t := c.tables(holder); strings.Contains(t, "smcr") {
			return errors.New(t)
		}
		return nil
	})
	c.ends(holder, soon)
	c.status(holder, "", soon)
	c.status(server, v1alpha1.PodStatusEnabled, soon)
	if since := c.aliveSince(c.n[1]); !since.Equal(aliveSince) {
		c.Errorf("the agent counted as gone while the API server hung: alive since %v, and before since %v", since, aliveSince)
	}
}

// growsOnNode is grows without the API server.
func (c *cluster) growsOnNode(p pod, s sum, n int) sum {
	c.Helper()
	dir, err := p.node.Path(c.Context(), "/var/log/pods")
	c.must(err)
	var now sum
	c.eventually(fmt.Sprintf("%d connections of %s", n, p), soon, func() error {
		logs, err := filepath.Glob(filepath.Join(dir, p.ns+"_"+p.name+"_*", "*", "*.log"))
		if err != nil || len(logs) == 0 {
			return fmt.Errorf("its logs are %v: %w", logs, err)
		}
		text, err := os.ReadFile(logs[len(logs)-1])
		if err != nil {
			return err
		}
		// 2026-01-02T03:04:05.678Z stdout F {...}
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		_, object, _ := strings.Cut(lines[len(lines)-1], " F ")
		if err := json.Unmarshal([]byte(object), &now); err != nil {
			return err
		}
		if now.OK < s.OK+n {
			return fmt.Errorf("it has %+v", now)
		}
		return nil
	})
	return now
}

// railLost: each node has two networks; the loss of one costs no connection, and
// Kubernetes says so.
func railLost(c *cluster) {
	_, holder := c.pair("hold")
	c.redundancy(holder, v1alpha1.RedundancySymmetric)
	c.grows(holder, sum{}, 1)
	mend := c.portDown(c.n[1], "eth1")
	l := c.redundancy(holder, v1alpha1.RedundancySingle)
	c.event("", l.Name, "RedundancyLost", "")
	c.eventually("SMCRNode to say that a device is down", soon, func() error {
		var o v1alpha1.SMCRNode
		c.must(c.p.Client.Get(c.Context(), key("", c.n[1].Name), &o))
		if !meta.IsStatusConditionFalse(o.Status.Conditions, v1alpha1.ConditionDevicesHealthy) || o.Status.DeviceSummary != "1/2" {
			return fmt.Errorf("%s: %+v", o.Status.DeviceSummary, o.Status.Conditions)
		}
		return nil
	})
	mend()
	c.redundancy(holder, v1alpha1.RedundancySymmetric)
	c.event("", l.Name, "RedundancyRestored", "")
	after := c.goesOn(holder, 100)
	if after.Failed > 0 || after.Ended {
		c.Errorf("the open connection has %+v", after)
	}
	c.Logf("the open connection stalled for at most %d ms", after.WorstMillis)
}

// noDevice: on nodes without any of the configured devices the agent runs, and
// everything is plain TCP, with the reason where people look.
func noDevice(c *cluster) {
	server, client := c.pair("load")
	c.must(c.p.Install(c.Context(), image.ProductTag, append(slices.Clone(installed),
		"agent.devices[0].soft.interface=rdma8", "agent.devices[1].soft.interface=rdma9")...))
	for _, n := range c.n {
		c.eventually("SMCRNode "+n.Name+" to say that there is no device", soon, func() error {
			var o v1alpha1.SMCRNode
			c.must(c.p.Client.Get(c.Context(), key("", n.Name), &o))
			a := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionAccelerating)
			if a == nil || a.Status != metav1.ConditionFalse || a.Reason != "NoDevices" || !strings.Contains(a.Message, "interface rdma8 is not there") ||
				!meta.IsStatusConditionTrue(o.Status.Conditions, v1alpha1.ConditionReady) || o.Status.DeviceSummary != "0/2" {
				return fmt.Errorf("%s: %+v", o.Status.DeviceSummary, o.Status.Conditions)
			}
			return nil
		})
	}
	c.status(client, v1alpha1.PodStatusFallback+": NOSMCDEV", soon)
	c.must(c.once(client, server.address()))
	c.policy(server.ns, "strict", `{"mode": "Required"}`)
	c.eventually("connections to be refused", soon, func() error {
		if err := c.once(client, server.address()); err == nil {
			return errors.New("one was made")
		}
		return nil
	})
	c.event(client.ns, client.name, "SMCRRefused", "NOSMCDEV")
	c.kubectl("delete", "smcrpolicy", "-n", server.ns, "strict")
	c.must(c.p.Install(c.Context(), image.ProductTag, installed...))
	c.must(c.p.WaitReady(c.Context()))
	c.onSMCR(client, server.address())
}

// spreadControllers sees to it that the controllers are on different nodes. The
// scheduler only prefers that, and what is to be seen here is the loss of a
// node, not of all controllers.
func (c *cluster) spreadControllers() {
	c.Helper()
	c.eventually("controllers on different nodes", soon, func() error {
		var list corev1.PodList
		if err := c.p.Client.List(c.Context(), &list, client.InNamespace(product.Namespace), client.MatchingLabels{"app.kubernetes.io/component": "controller"}); err != nil {
			return err
		}
		nodes := map[string]int{}
		for _, p := range list.Items {
			if p.DeletionTimestamp == nil && p.Spec.NodeName != "" {
				nodes[p.Spec.NodeName]++
			}
		}
		if len(nodes) > 1 {
			return nil
		}
		if len(list.Items) == 2 {
			c.Logf("both controllers are on one node; one is made anew")
			if err := c.p.Client.Delete(c.Context(), &list.Items[0]); err != nil {
				return err
			}
		}
		return fmt.Errorf("they are on %v", nodes)
	})
}

// redundancy waits until the SMCRLink of a pod has it, and returns it.
func (c *cluster) redundancy(p pod, want v1alpha1.Redundancy) (l v1alpha1.SMCRLink) {
	c.Helper()
	c.eventually(fmt.Sprintf("the redundancy %s of %s", want, p), soon, func() error {
		if l = c.active(p); l.Status.Redundancy != want {
			return fmt.Errorf("%s is %s", l.Name, l.Status.Redundancy)
		}
		return nil
	})
	return l
}

// nodeReboot: a node that is switched off and on again. Connections on the node that stays go on, new ones to the
// lost one end as without SMC-R, and those that were open on SMC-R are reset.
func nodeReboot(c *cluster) {
	server, client := c.pair("load")
	c.spreadControllers()
	n := c.n[1]
	lost := c.loseNode(server.ns, n, server.node)
	on := false
	c.Cleanup(func() {
		if !on {
			_ = n.PowerOn(context.Background())
		}
	})
	c.agentGone(n, client, metav1.ConditionUnknown)
	lost()
	c.must(n.PowerOn(c.Context()))
	on = true
	c.must(c.p.WaitNode(c.Context(), n.Name))
	client = c.running(client.ns, client.name, n)
	c.onSMCR(client, server.address())
	c.eventually("the SMCRLinks to name the peers' pods", shown, func() error {
		for l, peer := range map[string]pod{c.active(client).Status.PeerPod: server, c.active(server).Status.PeerPod: client} {
			if l != peer.String() {
				return fmt.Errorf("the pod is %q, want %s", l, peer)
			}
		}
		return nil
	})
	c.quiesced(n)
}

// agentGone waits until all that there is to read says that the agent of a node is gone, and
// makes sure that it took no longer than people are promised. p is a pod there. Ready is
// Unknown, or False if the agent itself said so.
func (c *cluster) agentGone(n *lab.Node, p pod, ready metav1.ConditionStatus) {
	c.Helper()
	const promised = 10 * time.Second
	began := time.Now()
	c.eventually("all to say that the agent of "+n.Name+" is gone", soon, func() error {
		var o v1alpha1.SMCRNode
		c.must(c.p.Client.Get(c.Context(), key("", n.Name), &o))
		if r := meta.FindStatusCondition(o.Status.Conditions, v1alpha1.ConditionReady); r == nil || r.Status != ready || r.Reason != v1alpha1.ReasonAgentGone {
			return fmt.Errorf("SMCRNode: %+v", r)
		}
		var pod corev1.Pod
		c.must(c.p.Client.Get(c.Context(), p.key(), &pod))
		if got := pod.Annotations[v1alpha1.AnnotationStatus]; got != v1alpha1.PodStatusNoAgent {
			return fmt.Errorf("%s is %q", p, got)
		}
		links, err := c.links(p)
		c.must(err)
		if len(links) > 0 {
			return fmt.Errorf("%d SMCRLinks of %s", len(links), p)
		}
		return nil
	})
	if took := time.Since(began); took > promised {
		c.Errorf("to be read %v after its end that the agent of %s is gone, want %v at most", took, n.Name, promised)
	} else {
		c.Logf("to be read %v after its end that the agent of %s is gone", took.Round(100*time.Millisecond), n.Name)
	}
}
