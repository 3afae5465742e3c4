// SPDX-License-Identifier: Apache-2.0

// Command node-agent carries the TCP connections of attached pods over SMC-R.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/smcr-io/kube-smcr/internal/agent"
	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli"
	"github.com/smcr-io/kube-smcr/internal/config"
	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/pkg/rdma/verbs"
)

const help = `node-agent carries the TCP connections of attached pods over SMC-R (RFC 7609).

Usage:
  node-agent --config FILE [--check]
  node-agent --config FILE --kubernetes [--kubeconfig FILE] [--check]
  node-agent --config FILE --kubernetes --check --any-node
  node-agent --version

Examples:
  node-agent --config /etc/kube-smcr/node-agent.yaml
  node-agent --config node-agent.yaml --check    say what is wrong with a file
  kill -HUP $(pidof node-agent)                  take over changed policies

With --kubernetes the SMCRPolicy objects and the annotations of pods and
namespaces say what to carry, and the file has no policies. NODE_NAME and NODE_IP
in the environment are the node's name and address, POD_NAMESPACE and POD_NAME
the agent's own pod. DAEMONSET is the name of the DaemonSet that makes the agents:
one that ends leaves the node clean if that is gone or does not select the node
any more. --any-node checks what holds on every node, wherever it
runs: the chart does before it changes anything.

It runs as root (CAP_NET_ADMIN, CAP_SYS_ADMIN and CAP_BPF); "smcrctl preflight"
says what a node lacks. SIGTERM ends it: new connections go directly to their
destination at once, carried ones may end until node.drainTimeout. A second
SIGTERM resets them.

Exit codes: 0 ended in order, 1 error, 2 wrong usage or configuration.

Flags:
`

// keepQueues is the argument of the process that the agent starts to keep the queues of held SYNs.
const keepQueues = "keep-queues"

const (
	exitError = 1
	exitUsage = 2
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// options are the flags.
type options struct {
	file, kubeconfig                   string
	inCluster, check, anyNode, version bool
}

// errUsage is the error of parse. The user has been told what is wrong.
var errUsage = errors.New("wrong usage")

// parse reads the flags. The error is flag.ErrHelp after --help, and errUsage after a mistake.
func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	fs := flag.NewFlagSet("node-agent", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), help)
		fs.PrintDefaults()
	}
	fs.StringVar(&o.file, "config", "", "configuration `FILE`, see config/samples/node-agent.yaml")
	fs.BoolVar(&o.inCluster, "kubernetes", false, "do what the objects of the cluster want")
	fs.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server, `FILE`; default: as the pod's service account")
	fs.BoolVar(&o.check, "check", false, "only check the configuration")
	fs.BoolVar(&o.anyNode, "any-node", false, "with --check: for all nodes of a cluster, and not for this machine")
	fs.BoolVar(&o.version, "version", false, "print the version")
	if err := fs.Parse(args); errors.Is(err, flag.ErrHelp) {
		return o, err
	} else if err != nil {
		return o, errUsage
	}
	mistake := ""
	switch {
	case o.version:
	case o.file == "" || fs.NArg() > 0:
		mistake = "want --config FILE and nothing else; --help shows examples"
	case o.kubeconfig != "" && !o.inCluster:
		mistake = "--kubeconfig needs --kubernetes"
	case o.anyNode && (!o.inCluster || !o.check):
		mistake = "--any-node needs --kubernetes and --check"
	}
	if mistake != "" {
		fmt.Fprintln(stderr, "node-agent:", mistake)
		return o, errUsage
	}
	return o, nil
}

func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 1 && args[0] == keepQueues {
		return keep(stderr)
	}
	o, err := parse(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return exitUsage
	case o.version:
		printVersion(stdout)
		return 0
	}
	machine := config.Machine{Cluster: true, Any: true}
	if !o.anyNode {
		if machine, err = thisMachine(o.inCluster, os.Getenv); err != nil {
			fmt.Fprintln(stderr, "node-agent:", err)
			return exitUsage
		}
	}
	load := func() (*config.Node, error) { return loadConfig(machine, o.file) }
	node, err := load()
	if err != nil {
		fmt.Fprintln(stderr, err)
		return exitUsage
	}
	if o.check {
		printGood(stdout, o, node)
		return 0
	}
	leaveProcessors()
	if err := serve(node, load, runnerFor(o.inCluster, o.kubeconfig, machine, load), stderr); err != nil {
		fmt.Fprintf(stderr, "node-agent: %v\n", err)
		return exitError
	}
	return 0
}

func printVersion(w io.Writer) {
	with := "with hardware verbs"
	if !verbs.Built {
		with = "without hardware verbs: only the software device can be used"
	}
	fmt.Fprintf(w, "node-agent %s, %s\n", cli.Version(), with)
}

// printGood says that --check found no mistake.
func printGood(w io.Writer, o options, node *config.Node) {
	policies := fmt.Sprintf("%d policies", len(node.Policies))
	if node.InCluster() {
		policies = "policies of the cluster"
	}
	name := "node " + node.Name
	if o.anyNode {
		name = "any node"
	}
	fmt.Fprintf(w, "%s: good: %s, %s\n", o.file, name, policies)
}

// keep keeps the queues of held SYNs, in a process of its own. The agent gives the process one end of a
// socket as descriptor 3.
func keep(stderr io.Writer) int {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP) // the process ends after the agent, which drains after a SIGTERM
	report := func(err error) { fmt.Fprintf(stderr, "node-agent: %v\n", err) }
	if err := linux.KeepQueues(os.NewFile(3, "agent"), report); err != nil {
		report(err)
		return exitError
	}
	return 0
}

// keeper is the command that starts the process of keep.
func keeper() *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", keepQueues)
	cmd.Args[0] = "node-agent"
	cmd.Env = []string{"GOMAXPROCS=1"}
	cmd.Stderr = os.Stderr
	return cmd
}

// leaveProcessors leaves half of the node's processors to the pods, unless GOMAXPROCS is
// set. With fewer threads the Go runtime also hands small pieces of work to another thread
// less often, which costs more than the work itself.
func leaveProcessors() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)/2))
	}
}

func loadConfig(m config.Machine, file string) (*config.Node, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return config.ParseOn(m, file, b)
}

// serve runs the agent. The first SIGTERM or SIGINT makes it drain and end, the second one
// ends the drain, and SIGHUP makes it reload.
func serve(node *config.Node, load func() (*config.Node, error), run runner, stderr io.Writer) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var (
		level  slog.LevelVar
		reload = make(chan struct{}, 1)
		hurry  = make(chan struct{})
		sigs   = make(chan os.Signal, 4)
		done   = make(chan struct{})
	)
	signal.Notify(sigs, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	go func() {
		defer close(done)
		ends := 0
		for s := range sigs {
			switch {
			case s == syscall.SIGHUP:
				select {
				case reload <- struct{}{}:
				default: // a value is waiting already
				}
			case ends == 0:
				ends++
				stop()
			case ends == 1:
				ends++
				close(hurry)
			}
		}
	}()
	defer func() {
		signal.Stop(sigs)
		close(sigs)
		<-done
	}()
	return run(ctx, agent.Config{
		Node: node, Load: load, Reload: reload, Hurry: hurry, Level: &level, Version: cli.Version(),
		Instance: os.Getenv(agentapi.InstanceEnv), Keeper: keeper,
		Log: slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: &level})),
	})
}
