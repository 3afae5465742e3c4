// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
)

// productLabel selects all pods of any release of the chart, and agentLabels the agents'.
const (
	productLabel = "app.kubernetes.io/part-of=kube-smcr"
	agentLabels  = productLabel + ",app.kubernetes.io/component=agent"
)

// agentContainer is the container of the agent in its pod.
const agentContainer = "agent"

// smcrctl is the path of smcrctl in the agent's image.
const smcrctl = "/usr/bin/smcrctl"

// Exit codes of smcrctl that are answers.
const (
	exitUsage      = 2
	exitNotRunning = 3
	exitNot        = 4
)

// ErrNotUnderstood means that the agent's smcrctl does not know the question as it was asked, as one of another version.
var ErrNotUnderstood = errors.New("the question is not understood")

// ErrNoAgent means that no agent runs on a node.
var ErrNoAgent = errors.New("no kube-smcr agent runs there")

// An executor runs a command in a container of a pod, and returns what it wrote
// and its exit code.
type executor interface {
	exec(ctx context.Context, pod *corev1.Pod, command []string) (stdout, stderr []byte, code int, err error)
}

// Cluster asks the agents of a cluster. It has no state but its connections.
type Cluster struct {
	client    kubernetes.Interface
	exec      executor
	namespace string // the namespace of names that have none
	// Socket is the agents' API socket; "": smcrctl's default.
	Socket string
}

// NewCluster connects to a cluster. namespace is the namespace of names that have none.
func NewCluster(c *rest.Config, namespace string) (*Cluster, error) {
	c = rest.CopyConfig(c)
	if c.QPS == 0 { // client-go would allow 5 a second; a person is waiting
		c.QPS, c.Burst = 50, 100
	}
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return &Cluster{client: client, exec: &remote{config: c, client: client}, namespace: namespace}, nil
}

// remote executes through the API server.
type remote struct {
	config *rest.Config
	client kubernetes.Interface
}

func (r *remote) exec(ctx context.Context, pod *corev1.Pod, command []string) (stdout, stderr []byte, code int, err error) {
	req := r.client.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: agentContainer, Command: command, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	// As kubectl: WebSocket, and SPDY for API servers and proxies without it.
	ws, err := remotecommand.NewWebSocketExecutor(r.config, "GET", req.URL().String())
	if err != nil {
		return nil, nil, 0, err
	}
	spdy, err := remotecommand.NewSPDYExecutor(r.config, "POST", req.URL())
	if err != nil {
		return nil, nil, 0, err
	}
	e, err := remotecommand.NewFallbackExecutor(ws, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return nil, nil, 0, err
	}
	out, errOut := &limited{most: maxAnswerBytes}, &limited{most: maxErrorBytes}
	err = e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: out, Stderr: errOut})
	var exit utilexec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return out.b.Bytes(), errOut.b.Bytes(), exit.ExitStatus(), nil
	}
	if err == nil && out.cut {
		err = fmt.Errorf("the answer has more than %d bytes", maxAnswerBytes)
	}
	return out.b.Bytes(), errOut.b.Bytes(), 0, err
}

// limited keeps the first bytes that are written, up to a limit. It reads and drops the
// rest, so that the other side does not block.
type limited struct {
	b    bytes.Buffer
	most int
	cut  bool
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.most-l.b.Len())
	l.cut = l.cut || n < len(p)
	l.b.Write(p[:n])
	return len(p), nil
}

var _ io.Writer = (*limited)(nil)

// agents returns the agent's pod of each node that has one, or of one node. If a node has several,
// a ready pod comes first, then the newest. Only pods in their node's network count, which Pod
// Security allows only administrators to make. Otherwise everybody who may make pods could give one
// the agents' labels, and answer in an agent's place, or keep a node from being left.
func (c *Cluster) agents(ctx context.Context, node string) (map[string]*corev1.Pod, error) {
	best := map[string]*corev1.Pod{}
	if node == "" {
		return best, c.addAgents(ctx, best, "", "")
	}
	err := c.addAgents(ctx, best, node, "spec.nodeName="+node)
	if err == nil && len(best) == 0 {
		err = c.addAgents(ctx, best, node, "spec.nodeName=") // those that are on no node yet
	}
	return best, err
}

// addAgents adds the agents' pods that a field selector selects to the best ones of their nodes.
func (c *Cluster) addAgents(ctx context.Context, best map[string]*corev1.Pod, node, fields string) error {
	for p, err := range c.list(ctx, metav1.NamespaceAll, metav1.ListOptions{LabelSelector: agentLabels, FieldSelector: fields}) {
		if err != nil {
			return fmt.Errorf("look for the agents' pods: %w", err)
		}
		n := nodeOf(p)
		if n == "" || node != "" && n != node || !p.Spec.HostNetwork {
			continue
		}
		if old := best[n]; old == nil || compareAgents(old, p) < 0 {
			best[n] = p
		}
	}
	return nil
}

// list yields the pods of a namespace that opts selects, listLimit of which are read at a time. An
// error ends it.
func (c *Cluster) list(ctx context.Context, namespace string, opts metav1.ListOptions) iter.Seq2[*corev1.Pod, error] {
	return func(yield func(*corev1.Pod, error) bool) {
		opts.Limit = listLimit
		for {
			pods, err := c.client.CoreV1().Pods(namespace).List(ctx, opts)
			if err != nil {
				yield(nil, err)
				return
			}
			for i := range pods.Items {
				if !yield(&pods.Items[i], nil) {
					return
				}
			}
			if opts.Continue = pods.Continue; opts.Continue == "" {
				return
			}
		}
	}
}

// nodeOf is the node that a pod of a DaemonSet is on or, before it is scheduled, that it is for; "" if
// neither is known.
func nodeOf(p *corev1.Pod) string {
	if p.Spec.NodeName != "" || p.Spec.Affinity == nil || p.Spec.Affinity.NodeAffinity == nil {
		return p.Spec.NodeName
	}
	required := p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if required == nil || len(required.NodeSelectorTerms) != 1 {
		return ""
	}
	for _, f := range required.NodeSelectorTerms[0].MatchFields {
		if f.Key == metav1.ObjectNameField && f.Operator == corev1.NodeSelectorOpIn && len(f.Values) == 1 {
			return f.Values[0]
		}
	}
	return ""
}

// compareAgents is less than 0 if a is the better pod to ask.
func compareAgents(a, b *corev1.Pod) int {
	rank := func(p *corev1.Pod) int {
		switch {
		case p.Status.Phase != corev1.PodRunning:
			return 0
		case p.DeletionTimestamp != nil:
			return 1
		case !ready(p):
			return 2
		}
		return 3
	}
	return cmp.Or(cmp.Compare(rank(a), rank(b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
}

func ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// stuck is why a pod that is not running waits; "" if it is just starting. Either no node can have it,
// or one of its containers waits, for example because its image is missing, or because it ends again
// and again. Init containers are looked at first, as the others wait for them.
func stuck(p *corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return strings.TrimSuffix(c.Reason+": "+c.Message, ": ")
		}
	}
	for _, cs := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		w := cs.State.Waiting
		if w == nil || w.Reason == "" || w.Reason == "ContainerCreating" || w.Reason == "PodInitializing" {
			continue
		}
		text := fmt.Sprintf("image %s: %s", cs.Image, w.Reason)
		if w.Message != "" {
			text += ": " + w.Message
		}
		return text
	}
	return ""
}

// agent returns the agent's pod of a node.
func (c *Cluster) agent(ctx context.Context, node string) (*corev1.Pod, error) {
	agents, err := c.agents(ctx, node)
	if err != nil {
		return nil, err
	}
	return judgeAgent(node, agents[node])
}

// judgeAgent returns the agent's pod, or an error if there is none that can be asked.
func judgeAgent(node string, p *corev1.Pod) (*corev1.Pod, error) {
	switch {
	case p == nil:
		return nil, fmt.Errorf("node %s: %w: does the DaemonSet tolerate the node's taints and match its labels, and may it have pods? kubectl describe daemonset -A -l %s", node, ErrNoAgent, agentLabels)
	case stuck(p) != "":
		return nil, fmt.Errorf("node %s: %w: its pod %s/%s does not start: %s", node, ErrNoAgent, p.Namespace, p.Name, stuck(p))
	case p.Status.Phase != corev1.PodRunning:
		return nil, fmt.Errorf("node %s: %w: its pod %s/%s is %s; kubectl describe pod -n %s %s", node, ErrNoAgent, p.Namespace, p.Name, p.Status.Phase, p.Namespace, p.Name)
	}
	return p, nil
}

// ask runs smcrctl in an agent's pod and returns its output. The exit code for the answer
// "no" is no error.
func (c *Cluster) ask(ctx context.Context, agent *corev1.Pod, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	command := append([]string{smcrctl}, args...)
	if c.Socket != "" {
		command = append(command, "--socket", c.Socket)
	}
	out, errOut, code, err := c.exec.exec(ctx, agent, command)
	where := fmt.Sprintf("ask the agent of node %s (pod %s/%s)", agent.Spec.NodeName, agent.Namespace, agent.Name)
	said := strings.TrimPrefix(strings.TrimSpace(string(errOut)), "smcrctl: ")
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", where, err)
	case code == 0 || code == exitNot && len(out) > 0:
		return out, nil
	case code == exitNotRunning:
		return nil, fmt.Errorf("%s: it does not answer yet: %s", where, said)
	}
	err = fmt.Errorf("%s: smcrctl %s ends with code %d: %s", where, strings.Join(args, " "), code, said)
	if code == exitUsage {
		err = fmt.Errorf("%w: %w", ErrNotUnderstood, err)
	}
	return nil, err
}

// askJSON is ask for an answer as JSON, which it reads into a T.
func askJSON[T any](ctx context.Context, c *Cluster, agent *corev1.Pod, args ...string) (T, error) {
	var v T
	out, err := c.ask(ctx, agent, append(args, "-o", "json")...)
	if err != nil {
		return v, err
	}
	if err := json.Unmarshal(out, &v); err != nil {
		return v, fmt.Errorf("read the answer of the agent of node %s to %s: %w", agent.Spec.NodeName, args[0], err)
	}
	return v, nil
}

// NodeAnswer is the answer of one node's agent, or why there is none.
type NodeAnswer[T any] struct {
	Node   string `json:"node"`
	Agent  string `json:"agent,omitempty"` // NAMESPACE/NAME of its pod
	Answer *T     `json:"answer,omitempty"`
	Error  string `json:"error,omitempty"`
	// Err is Error, for errors.Is.
	Err error `json:"-"`
}

// AskNodes asks the agents of these nodes, or of all, and returns the answers in the order
// of the nodes' names. The error of one agent is in its answer.
func AskNodes[T any](ctx context.Context, c *Cluster, nodes []string, args ...string) ([]NodeAnswer[T], error) {
	only := ""
	if len(nodes) == 1 {
		only = nodes[0]
	}
	agents, err := c.agents(ctx, only)
	if err != nil {
		return nil, err
	}
	if len(nodes) == 0 {
		for n := range agents {
			nodes = append(nodes, n)
		}
		if len(nodes) == 0 {
			if why := c.notStarted(ctx); why != "" {
				return nil, fmt.Errorf("%w: %s", ErrNoAgent, why)
			}
			return nil, fmt.Errorf("%w: no pod of the cluster has the labels %s; is kube-smcr installed?", ErrNoAgent, agentLabels)
		}
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	out := make([]NodeAnswer[T], len(nodes))
	var wg sync.WaitGroup
	slots := make(chan struct{}, maxAsks)
	for i, n := range nodes {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			a := NodeAnswer[T]{Node: n}
			pod, err := judgeAgent(n, agents[n])
			if err == nil {
				var v T
				a.Agent, a.Answer = pod.Namespace+"/"+pod.Name, &v
				v, err = askJSON[T](ctx, c, pod, args...)
			}
			if err != nil {
				a.Answer, a.Err, a.Error = nil, err, err.Error()
			}
			out[i] = a
		})
	}
	wg.Wait()
	return out, nil
}
