// SPDX-License-Identifier: Apache-2.0

// Command kubectl-smcr is the kubectl plugin "kubectl smcr": it asks the agents of
// a cluster what they do and why. See package internal/cli/kubectl.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/smcr-io/kube-smcr/api/v1alpha1"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli"
	"github.com/smcr-io/kube-smcr/internal/cli/kubectl"
)

// Exit codes, as in the help text.
const (
	exitOK      = 0
	exitError   = 1
	exitUsage   = 2
	exitNoAgent = 3
	exitNot     = 4 // explain: not on SMC-R; preflight: something fails
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr, connect)
	stop()
	os.Exit(code)
}

// errNot ends a command that has printed the answer "no".
var errNot = errors.New("the answer is no")

// errPart ends a command that has printed its answers, some of which are missing.
var errPart = errors.New("some agents did not answer")

// options are the flags of all commands.
type options struct {
	kubeconfig string
	overrides  clientcmd.ConfigOverrides
	socket     string
	output     string
	out        io.Writer
	connect    func(*options) (*kubectl.Cluster, error)
}

// connect connects to the cluster that kubectl would use.
func connect(o *options) (*kubectl.Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = o.kubeconfig
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &o.overrides)
	namespace, _, err := loaded.Namespace()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	c, err := loaded.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	return kubectl.NewCluster(c, namespace)
}

func (o *options) cluster() (*kubectl.Cluster, error) {
	c, err := o.connect(o)
	if err == nil {
		c.Socket = o.socket
	}
	return c, err
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer, connect func(*options) (*kubectl.Cluster, error)) int {
	cmd := newRoot(&options{out: stdout, connect: connect})
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errNot):
		return exitNot
	}
	fmt.Fprintf(stderr, "kubectl smcr: %s\n", cli.Line(err.Error()))
	switch {
	case errors.As(err, new(cli.UsageError)), kubectl.IsUsage(err):
		return exitUsage
	case errors.Is(err, kubectl.ErrNoAgent):
		return exitNoAgent
	}
	return exitError
}

func newRoot(o *options) *cobra.Command {
	root := &cobra.Command{
		Use:   "kubectl-smcr",
		Short: "Ask the agents of the cluster what they do and why",
		Long: `kubectl smcr asks the kube-smcr agents of the cluster what they do and why. It runs
smcrctl in their pods, so it takes the right to exec there.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 no agent runs there,
4 the answer is no (explain: not on SMC-R; preflight: something fails).`,
		Example: `  kubectl smcr status
  kubectl smcr links --node node-a
  kubectl smcr explain shop/web-0 redis.shop:6379`,
		Version:     cli.Version(),
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl smcr"},
	}
	cli.Strict(root, "kubectl smcr", &o.output)
	f := root.PersistentFlags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file, if not that of kubectl")
	clientcmd.BindOverrideFlags(&o.overrides, f, clientcmd.RecommendedConfigOverrideFlags(""))
	f.StringVar(&o.socket, "socket", "", "the agents' API socket, if not "+agentapi.DefaultSocket)
	root.AddCommand(
		newNodes(o, question[agentapi.Status]{
			verb: "status", short: "What the agents do, and what keeps connections off SMC-R", table: cli.PrintStatus,
		}),
		newNodes(o, question[agentapi.Links]{
			verb: "links", short: "Link groups and their links", table: cli.PrintLinks, keep: keepLinks,
		}),
		newNodes(o, question[agentapi.Conns]{
			verb: "conns", short: "Connections that the agents carry now", table: cli.PrintConns, keep: keepConns,
		}),
		newNodes(o, question[agentapi.Attachments]{
			verb: "attachments", short: "Attached pods, and destinations that are not diverted for a while", table: cli.PrintAttachments, keep: keepAttachments,
		}),
		newNodes(o, question[preflight]{
			verb: "preflight", short: "What nodes have and lack for SMC-R", table: printPreflight, isNo: failed,
		}),
		newExplain(o),
		newLeave(o),
	)
	return root
}

func args(check cobra.PositionalArgs) cobra.PositionalArgs { return cli.Args("kubectl smcr", check) }

// nodesAnswer is the JSON output of commands about nodes.
type nodesAnswer[T any] struct {
	APIVersion string                  `json:"apiVersion"`
	Nodes      []kubectl.NodeAnswer[T] `json:"nodes"`
}

// A question is one that the agents of nodes are asked.
type question[T any] struct {
	verb, short string // of the command, and verb of smcrctl's
	table       func(io.Writer, T) error
	keep        func(answer *T, pod string) // drops what does not belong to a pod; nil: there is no flag --pod
	isNo        func(T) bool                // whether an answer means "no"; nil: none does
}

// newNodes makes the command of a question, which asks the agents of some nodes, or of all.
func newNodes[T any](o *options, q question[T]) *cobra.Command {
	var nodes []string
	var pod string
	cmd := &cobra.Command{
		Use:     q.verb,
		Short:   q.short,
		Example: fmt.Sprintf("  kubectl smcr %s\n  kubectl smcr %s --node node-a -o json", q.verb, q.verb),
		Args:    args(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return q.ask(cmd.Context(), o, nodes, pod) },
	}
	cmd.Flags().StringSliceVar(&nodes, "node", nil, "ask about this node only; may be repeated")
	if q.keep != nil {
		cmd.Flags().StringVar(&pod, "pod", "", "show what belongs to this pod, [NAMESPACE/]NAME, only")
		cmd.MarkFlagsMutuallyExclusive("node", "pod")
	}
	return cmd
}

// ask asks the agents of these nodes, or of a pod's node, or of all, and prints the answers.
func (q question[T]) ask(ctx context.Context, o *options, nodes []string, pod string) error {
	c, err := o.cluster()
	if err != nil {
		return err
	}
	if pod != "" {
		name, node, err := c.PodNode(ctx, pod)
		if err != nil {
			return err
		}
		pod, nodes = name, []string{node}
	}
	answers, err := askNodes[T](ctx, c, nodes, q.verb, pod)
	if err != nil {
		return err
	}
	var result error
	for _, a := range answers {
		switch {
		case a.Answer == nil && len(answers) == 1:
			return a.Err
		case a.Answer == nil:
			result = errPart
		case pod != "":
			q.keep(a.Answer, pod)
		case q.isNo != nil && q.isNo(*a.Answer) && result == nil:
			result = errNot
		}
	}
	err = cli.Show(o.out, o.output, nodesAnswer[T]{kubectl.APIVersion, answers}, func(w io.Writer, a nodesAnswer[T]) error {
		return kubectl.PrintNodes(w, a.Nodes, q.table)
	})
	if err != nil {
		return err
	}
	return result
}

// askNodes asks the agents of some nodes, or of all. An agent shows a bounded number of connections, so that it is asked for those of
// a pod, if it knows how.
func askNodes[T any](ctx context.Context, c *kubectl.Cluster, nodes []string, verb, pod string) ([]kubectl.NodeAnswer[T], error) {
	if verb == "conns" && pod != "" {
		answers, err := kubectl.AskNodes[T](ctx, c, nodes, verb, "--pod", pod)
		isOld := func(a kubectl.NodeAnswer[T]) bool { return errors.Is(a.Err, kubectl.ErrNotUnderstood) }
		if err != nil || !slices.ContainsFunc(answers, isOld) {
			return answers, err
		}
	}
	return kubectl.AskNodes[T](ctx, c, nodes, verb)
}

// keepLinks drops the link groups that the pod has no part in. A pod has part in its own, in those
// that the pods of its namespace share (NAMESPACE/*), and in those of its node's kernel.
func keepLinks(l *agentapi.Links, pod string) {
	kept := []agentapi.LinkGroup{}
	namespace, _, _ := strings.Cut(pod, "/")
	for _, g := range l.LinkGroups {
		if g.Pod == pod || g.Pod == namespace+"/*" || g.Datapath == string(v1alpha1.DatapathKernel) {
			kept = append(kept, g)
		}
	}
	l.LinkGroups = kept
}

func keepConns(c *agentapi.Conns, pod string) { c.Keep(pod) }

// keepAttachments drops what is not of the pod.
func keepAttachments(a *agentapi.Attachments, pod string) {
	a.Attachments = slices.DeleteFunc(a.Attachments, func(x agentapi.Attachment) bool { return x.Pod != pod })
	a.Bypasses = slices.DeleteFunc(a.Bypasses, func(x agentapi.Bypass) bool { return x.Pod != pod })
}

// preflight is the part of smcrctl preflight's output that is shown here. It is a type of
// its own because package preflight is for Linux only, and this program is not.
type preflight struct {
	APIVersion string `json:"apiVersion"`
	Kernel     string `json:"kernel,omitempty"`
	Worst      string `json:"worst"`
	Checks     []struct {
		Name   string `json:"name"`
		Result string `json:"result"`
		Detail string `json:"detail,omitempty"`
		Reason string `json:"reason,omitempty"`
		Means  string `json:"means,omitempty"`
		Advice string `json:"advice,omitempty"`
	} `json:"checks"`
}

func failed(p preflight) bool { return p.Worst == "FAIL" }

func printPreflight(w io.Writer, p preflight) error {
	rows := []string{cli.Row("CHECK", "RESULT", "DETAIL")}
	for _, c := range p.Checks {
		rows = append(rows, cli.Row(c.Name, c.Result, strings.ReplaceAll(c.Detail, "\n", "; ")))
		for _, text := range []string{c.Means, c.Advice} {
			if text != "" {
				rows = append(rows, "\t\t-> "+cli.Line(text))
			}
		}
	}
	return cli.Table(w, rows...)
}

func newExplain(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "explain SRC DST:PORT",
		Short: "Why connections are, or are not, on SMC-R",
		Long: `explain says why connections from the pod SRC to DST:PORT are, or are not, on
SMC-R, and asks the agents of both ends.

SRC is [NAMESPACE/]NAME of a pod, pod/NAME, or its address. DST is an address,
[svc/]SERVICE[.NAMESPACE], or a pod as pod/NAME, NAMESPACE/NAME or, of a
StatefulSet, POD.SERVICE[.NAMESPACE]; PORT a number, or of a Service a name. Both
may be deploy/NAME, sts/NAME and so on, which stand for their pods. Names without a
namespace are in that of SRC. The exit code is 0 if they are on SMC-R, 4 if not,
and 1 or 3 if that could not be found out.`,
		Example: `  kubectl smcr explain shop/web-0 redis.shop:6379
  kubectl smcr explain pod/web-0 10.2.0.9:6379 -n shop
  kubectl smcr explain deploy/web redis-0.redis.shop:6379
  kubectl smcr explain web-0 pod/redis-0:6379 -o json`,
		Args: args(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, a []string) error {
			c, err := o.cluster()
			if err != nil {
				return err
			}
			answer, err := c.Explain(cmd.Context(), a[0], a[1])
			if err != nil {
				return err
			}
			if err := cli.Show(o.out, o.output, answer, kubectl.PrintAnswer); err != nil {
				return err
			}
			switch {
			case answer.Code == kubectl.CodeUnknown:
				return answer.Source.Err
			case !answer.Accelerated():
				return errNot
			}
			return nil
		},
	}
}

func newLeave(o *options) *cobra.Command {
	var undo bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "leave NODE",
		Short: "Take kube-smcr off a node, and leave the node clean",
		Long: `leave gives the node the label smcr.io/leave=true, which ends its agent, and waits
until that has left the node clean: without the CNI plugin, rules in pods, and records.
Connections on SMC-R have a few seconds to end, and are reset then; new ones are plain
TCP. The SMCRNode says that the node was left, and pods say NO_AGENT, until --undo takes
the label off: before, no agent comes to the node.`,
		Example: "  kubectl smcr leave node-a\n  kubectl smcr leave node-a --undo",
		Args:    args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			c, err := o.cluster()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			if undo {
				if err := c.Return(ctx, a[0]); err != nil {
					return err
				}
				_, err := fmt.Fprintf(o.out, "agents may run on node %s again\n", a[0])
				return err
			}
			if err := c.Leave(ctx, a[0]); err != nil {
				return err
			}
			_, err = fmt.Fprintf(o.out, "node %s is clean; no agent runs there until: kubectl smcr leave %[1]s --undo\n", a[0])
			return err
		},
	}
	cmd.Flags().BoolVar(&undo, "undo", false, "let agents run on the node again")
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long to wait")
	return cmd
}
