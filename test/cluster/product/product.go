// SPDX-License-Identifier: Apache-2.0

package product

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
)

// Names of what the chart makes.
const (
	Namespace  = "kube-smcr"
	Release    = "kube-smcr"
	Agent      = "kube-smcr-agent"
	Controller = "kube-smcr-controller"
)

// A Product is kube-smcr on a cluster.
type Product struct {
	Lab *lab.Cluster
	// Client has the administrator's rights.
	Client client.Client
	// Clientset is for what Client has not: logs.
	Clientset kubernetes.Interface

	images *Images
}

// New prepares to install images on a cluster, whose nodes have them.
func New(c *lab.Cluster, images *Images) (*Product, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("read the cluster's kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = 200, 400
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	cl, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	set, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("make a client: %w", err)
	}
	return &Product{Lab: c, Client: cl, Clientset: set, images: images}, nil
}

// values are what the lab needs: two cores stand for two nodes and all that
// runs on them.
func values() []string {
	return []string{
		"image.repository=" + image.ProductRepository,
		"image.pullPolicy=Never",
		"agent.resources.cpu=600m",
		"agent.resources.memory=768Mi",
		"agent.budgets.node.memory=384MiB",
		"agent.budgets.node.sockets=128MiB",
		"agent.budgets.pod.memory=192MiB",
		"controller.resources.requests.cpu=10m",
	}
}

// Install installs the chart with the image's tag, or upgrades to it, and waits
// for its pods. The values are those of helm's --set, besides our own.
func (p *Product) Install(ctx context.Context, tag string, set ...string) error {
	args := []string{
		"upgrade", "--install", Release, p.images.Chart, "--namespace", Namespace, "--create-namespace",
		"--wait", "--timeout", "6m",
	}
	_, err := p.Lab.Helm(ctx, append(args, with(tag, set)...)...)
	return err
}

// with are the arguments of helm for the values of an image's tag and others.
func with(tag string, set []string) (args []string) {
	for _, v := range slices.Concat(values(), []string{"image.tag=" + tag}, set) {
		args = append(args, "--set", v)
	}
	return args
}

// Render returns the chart's objects as Install would make them, without the hooks: what
// tools apply that are not Helm.
func (p *Product) Render(ctx context.Context, tag string, set ...string) (string, error) {
	version, err := p.Clientset.Discovery().ServerVersion()
	if err != nil {
		return "", fmt.Errorf("ask for the version: %w", err)
	}
	args := []string{"template", Release, p.images.Chart, "--namespace", Namespace, "--no-hooks", "--kube-version", version.GitVersion}
	return p.Lab.Helm(ctx, append(args, with(tag, set)...)...)
}

// TryInstall makes a release of any name, without waiting for its pods, and returns what
// Helm printed.
func (p *Product) TryInstall(ctx context.Context, name, tag string, timeout time.Duration, set ...string) (string, error) {
	args := []string{"upgrade", "--install", name, p.images.Chart, "--namespace", Namespace, "--create-namespace", "--timeout", timeout.String()}
	return p.Lab.Helm(ctx, append(args, with(tag, set)...)...)
}

// Uninstall uninstalls the release, if there is one.
func (p *Product) Uninstall(ctx context.Context) (string, error) {
	return p.Lab.Helm(ctx, "uninstall", Release, "--namespace", Namespace, "--ignore-not-found", "--wait", "--timeout", "6m")
}

// pollInterval is how often a condition is looked at.
const pollInterval = 100 * time.Millisecond

// Eventually looks at a condition until it returns nil.
func Eventually(ctx context.Context, what string, timeout time.Duration, condition func() error) error {
	return EventuallyEvery(ctx, pollInterval, what, timeout, condition)
}

// EventuallyEvery is Eventually with a pause of the caller's between two looks, for conditions that are dear to
// look at.
func EventuallyEvery(ctx context.Context, pause time.Duration, what string, timeout time.Duration, condition func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		err := condition()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait %v for %s: %w", timeout, what, err)
		case <-time.After(pause):
		}
	}
}

// readyTimeout is for an agent to start on a busy machine.
const readyTimeout = 3 * time.Minute

// WaitReady waits until the agents of all nodes say that they accelerate.
func (p *Product) WaitReady(ctx context.Context) error {
	for _, n := range p.Lab.Nodes {
		if err := p.WaitNode(ctx, n.Name); err != nil {
			return err
		}
	}
	return nil
}

// WaitNode waits until the agent of a node says that it accelerates.
func (p *Product) WaitNode(ctx context.Context, node string) error {
	return Eventually(ctx, "the agent of "+node, readyTimeout, func() error {
		for _, c := range []string{v1alpha1.ConditionReady, v1alpha1.ConditionAccelerating, v1alpha1.ConditionCNIInstalled} {
			if err := p.nodeCondition(ctx, node, c); err != nil {
				return err
			}
		}
		return nil
	})
}

func (p *Product) nodeCondition(ctx context.Context, node, condition string) error {
	var n v1alpha1.SMCRNode
	if err := p.Client.Get(ctx, client.ObjectKey{Name: node}, &n); err != nil {
		return err
	}
	c := meta.FindStatusCondition(n.Status.Conditions, condition)
	if c == nil {
		return fmt.Errorf("SMCRNode %s has no condition %s", node, condition)
	}
	if c.Status != "True" {
		return fmt.Errorf("SMCRNode %s: %s=%s: %s: %s", node, condition, c.Status, c.Reason, c.Message)
	}
	return nil
}

// AgentPod is the pod of a node's agent: the youngest that is not being
// deleted.
func (p *Product) AgentPod(ctx context.Context, node string) (*corev1.Pod, error) {
	pods, err := p.AgentPods(ctx, node)
	if err != nil {
		return nil, err
	}
	for _, pod := range slices.Backward(pods) {
		if pod.DeletionTimestamp == nil {
			return &pod, nil
		}
	}
	return nil, fmt.Errorf("no agent on node %s", node)
}

// AgentPods are the pods of a node's agents, the oldest first.
func (p *Product) AgentPods(ctx context.Context, node string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := p.Client.List(ctx, &list, client.InNamespace(Namespace),
		client.MatchingLabels{"app.kubernetes.io/component": "agent"}, client.MatchingFields{"spec.nodeName": node})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	return list.Items, nil
}

// SMCRCtl runs smcrctl beside a node's agent and returns what it printed.
func (p *Product) SMCRCtl(ctx context.Context, node string, args ...string) (string, error) {
	pod, err := p.AgentPod(ctx, node)
	if err != nil {
		return "", err
	}
	return p.Lab.Kubectl(ctx, append([]string{"exec", "-n", Namespace, pod.Name, "-c", "agent", "--", "/usr/bin/smcrctl"}, args...)...)
}

// Ask runs smcrctl beside a node's agent and decodes its JSON into out.
func (p *Product) Ask(ctx context.Context, node string, out any, args ...string) error {
	text, err := p.SMCRCtl(ctx, node, append(args, "-o", "json")...)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(text), out)
}

// KubectlSMCR runs the kubectl plugin as users do, and returns what it printed.
// Its exit code 4, "not on SMC-R", is an answer and no error.
func (p *Product) KubectlSMCR(ctx context.Context, args ...string) (string, error) {
	cmd := p.Lab.Command(ctx, "kubectl", append([]string{"smcr"}, args...)...)
	for i, v := range cmd.Env {
		if len(v) > 5 && v[:5] == "PATH=" {
			cmd.Env[i] = "PATH=" + p.images.bin + string(filepath.ListSeparator) + v[5:]
		}
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var ee *exec.ExitError
	if errors.As(err, &ee) && ee.ExitCode() == 4 {
		err = nil
	}
	if err != nil {
		return string(out), fmt.Errorf("kubectl smcr %v: %w\n%s", args, err, stderr.Bytes())
	}
	return string(out), nil
}

// Diagnose writes what somebody needs who looks for what went wrong.
func (p *Product) Diagnose(ctx context.Context) string {
	var out bytes.Buffer
	show := func(title string, text string, err error) {
		fmt.Fprintf(&out, "--- %s\n%s", title, text)
		if err != nil {
			fmt.Fprintf(&out, "%v\n", err)
		}
	}
	for _, args := range [][]string{
		{"get", "nodes,pods,daemonsets,deployments,jobs", "-A", "-o", "wide"},
		{"get", "smcrpolicies,smcrlinks,smcrnodes", "-A", "-o", "wide"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"get", "smcrnodes,smcrpolicies", "-A", "-o", "yaml", "--show-managed-fields=false"},
		{"logs", "-n", Namespace, "-l", "app.kubernetes.io/component=controller", "--tail=40", "--prefix"},
		{"logs", "-n", Namespace, "-l", "app.kubernetes.io/component=agent", "--tail=60", "--prefix"},
		{"logs", "-n", Namespace, "-l", "app.kubernetes.io/component=agent", "--tail=40", "--prefix", "--previous"},
	} {
		text, err := p.Lab.Kubectl(ctx, args...)
		show("kubectl "+fmt.Sprint(args), text, err)
	}
	for _, n := range p.Lab.Nodes {
		for _, command := range []string{"status", "attachments", "links", "conns"} {
			text, err := p.SMCRCtl(ctx, n.Name, command)
			show(n.Name+": smcrctl "+command, text, err)
		}
	}
	show("logs of the cluster: "+p.Lab.Logs()+"\n", "", nil)
	return out.String()
}

// PodNetNS is the name of a pod's network namespace on its node.
func (p *Product) PodNetNS(ctx context.Context, node *lab.Node, ip string) (string, error) {
	dir, err := node.Path(ctx, "/run/netns")
	if err != nil {
		return "", err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		out, err := node.Run(ctx, "ip", "-n", e.Name(), "-o", "addr", "show")
		if err == nil && bytes.Contains([]byte(out), []byte(" "+ip+"/")) {
			return e.Name(), nil
		}
	}
	return "", fmt.Errorf("no namespace of %s has the address %s", node.Name, ip)
}
