// SPDX-License-Identifier: Apache-2.0

// Command controller keeps the statuses of the objects of kube-smcr up to date. It also
// installs the CRDs, and cleans up before an uninstallation.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/smcr-io/kube-smcr/internal/cli"
	"github.com/smcr-io/kube-smcr/internal/controller"
)

const help = `controller keeps the objects of kube-smcr true: the status of SMCRPolicies, the
addresses of their peers, and what is left of nodes and agents that are gone.

Usage:
  controller [flags]             run until SIGTERM
  controller crds [flags]        apply the definitions of the objects, and wait for them
  controller uninstall [flags]   let all agents leave their nodes clean, and delete
                                 what agents and controllers wrote; policies stay
  controller --version

Examples:
  controller --leader-elect                       one of several replicas
  controller --kubeconfig ~/.kube/config          outside of a cluster
  controller crds --timeout=1m                    before an upgrade
  controller uninstall --namespace=kube-smcr      before the chart is removed

Without --kubeconfig it connects as the pod that it runs in.
Health: /healthz and /readyz of --health-address. Metrics: /metrics of
--metrics-address, by https and with a token unless --metrics-auth=false.

Exit codes: 0 ended in order, 1 error, 2 wrong usage.

Flags:
`

const (
	exitError = 1
	exitUsage = 2
)

// namespaceFile is the file with the namespace of the pod.
const namespaceFile = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// flags are the flags of all commands.
type flags struct {
	controller controller.Config
	kubeconfig string
	level      slog.Level
	timeout    time.Duration
	version    bool
}

func parse(command string, args []string, stderr io.Writer) (*flags, error) {
	f := &flags{}
	fs := flag.NewFlagSet("controller", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), help)
		fs.PrintDefaults()
	}
	fs.StringVar(&f.kubeconfig, "kubeconfig", "", "`FILE` that says how to connect to the API server")
	fs.TextVar(&f.level, "log-level", slog.LevelInfo, "least severe `LEVEL` that is logged: debug, info, warn or error")
	if command != "crds" {
		fs.StringVar(&f.controller.Namespace, "namespace", defaultNamespace(), "`NAMESPACE` that the add-on is installed in")
		fs.StringVar(&f.controller.DaemonSet, "daemonset", "", "`NAME` of the agents' DaemonSet there; default: all agents there are of this installation")
	}
	if command != "" {
		fs.DurationVar(&f.timeout, "timeout", 2*time.Minute, "how long to wait")
	} else {
		c := &f.controller
		fs.StringVar(&c.AgentSelector, "agent-selector", controller.DefaultAgentSelector, "label `SELECTOR` of the node agent's pods")
		fs.BoolVar(&c.LeaderElect, "leader-elect", false, "let only one of several replicas work")
		fs.BoolVar(&c.StartupTaint, "startup-taint", false, "take the taint smcr.io/agent-not-ready off nodes whose agent is ready")
		fs.StringVar(&c.MetricsAddress, "metrics-address", ":8080", "`ADDRESS` that serves metrics, 0 for none")
		fs.BoolVar(&c.MetricsAuth, "metrics-auth", true, "give metrics only over TLS, and to who has the token of an account that may get the non-resource URL /metrics/kube-smcr or /metrics")
		fs.StringVar(&c.MetricsTLS, "metrics-tls", "", "`DIRECTORY` of the certificate, tls.crt and tls.key; default: one that is made now")
		fs.StringVar(&c.HealthAddress, "health-address", ":8081", "`ADDRESS` that serves health endpoints, 0 for none")
		fs.BoolVar(&f.version, "version", false, "print the version")
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		fmt.Fprintf(stderr, "controller: %q is no command: want crds, uninstall or none; --help shows examples\n", strings.Join(fs.Args(), " "))
		return nil, errors.New("no such command")
	}
	return f, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	command := ""
	if len(args) > 0 && (args[0] == "crds" || args[0] == "uninstall") {
		command, args = args[0], args[1:]
	}
	f, err := parse(command, args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return exitUsage // the flag package has printed the error
	case f.version:
		fmt.Fprintln(stdout, "controller", cli.Version())
		return 0
	}
	if command == "" {
		if err := f.controller.Validate(); err != nil {
			fmt.Fprintf(stderr, "controller: %v\n", err)
			return exitUsage
		}
	}
	api, err := connect(f.kubeconfig)
	if err != nil {
		fmt.Fprintf(stderr, "controller: %v\n", err)
		return exitError
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: f.level}))
	// controller-runtime and client-go log through these.
	ctrllog.SetLogger(logr.FromSlogHandler(log.Handler()))
	klog.SetSlogLogger(log)
	if err := carryOut(ctx, command, api, f, stdout, log); err != nil {
		fmt.Fprintf(stderr, "controller: %v\n", err)
		return exitError
	}
	return 0
}

func carryOut(ctx context.Context, command string, api *rest.Config, f *flags, stdout io.Writer, log *slog.Logger) error {
	switch command {
	case "crds":
		ctx, cancel := context.WithTimeout(ctx, f.timeout)
		defer cancel()
		return controller.ApplyCRDs(ctx, api, log)
	case "uninstall":
		left, err := controller.Uninstall(ctx, api, controller.UninstallConfig{
			Namespace: f.controller.Namespace, DaemonSet: f.controller.DaemonSet, Timeout: f.timeout, Log: log,
		})
		if len(left) > 0 {
			fmt.Fprintf(stdout, "NOT CLEAN: %s\n%s\n", strings.Join(left, ", "), controller.NotClean)
		}
		return err
	default:
		log.Info("starting", "version", cli.Version(), "namespace", f.controller.Namespace)
		c := f.controller
		c.Log = log
		return controller.Run(ctx, api, c)
	}
}

func connect(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		api, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("connect to the API server (outside of a pod, give --kubeconfig FILE): %w", err)
		}
		return api, nil
	}
	api, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", kubeconfig, err)
	}
	return api, nil
}

func defaultNamespace() string {
	if ns := os.Getenv("POD_NAMESPACE"); ns != "" {
		return ns
	}
	if b, err := os.ReadFile(namespaceFile); err == nil {
		return strings.TrimSpace(string(b))
	}
	return "kube-smcr"
}
