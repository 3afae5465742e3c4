// SPDX-License-Identifier: Apache-2.0

// Command smcrctl asks the node agent what it does and why.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli"
	"github.com/smcr-io/kube-smcr/internal/preflight"
)

// Exit codes, as in the help text.
const (
	exitOK         = 0
	exitError      = 1
	exitUsage      = 2
	exitNotRunning = 3
	exitNot        = 4 // explain: not on SMC-R; preflight: something fails; ready: not yet
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// errNot ends a command that has printed the answer "no".
var errNot = errors.New("the answer is no")

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cmd := newRoot(stdout)
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
	fmt.Fprintf(stderr, "smcrctl: %s\n", cli.Line(err.Error()))
	var refused *agentapi.RefusedError
	switch {
	case errors.As(err, new(cli.UsageError)), errors.As(err, &refused) && refused.HTTPStatus == http.StatusBadRequest:
		return exitUsage
	case errors.Is(err, agentapi.ErrNotRunning):
		return exitNotRunning
	}
	return exitError
}

// options are the flags of all commands.
type options struct {
	socket string
	output string
	out    io.Writer
}

func newRoot(stdout io.Writer) *cobra.Command {
	o := &options{out: stdout}
	root := &cobra.Command{
		Use:   "smcrctl",
		Short: "Ask the node agent what it does and why",
		Long: `smcrctl asks the kube-smcr node agent of this machine what it does and why.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 the agent is not running,
4 the answer is no (explain: not on SMC-R; preflight: something fails; ready: not
yet).`,
		Example: `  smcrctl status
  smcrctl links -o json
  smcrctl conns
  smcrctl explain shop/web-1 192.0.2.7:6379
  smcrctl devices
  smcrctl preflight`,
		Version: cli.Version(),
	}
	cli.Strict(root, "smcrctl", &o.output)
	root.PersistentFlags().StringVar(&o.socket, "socket", agentapi.DefaultSocket, "the agent's API socket (node.apiSocket of its configuration)")
	root.AddCommand(newStatus(o), newLinks(o), newConns(o), newAttachments(o), newExplain(o), newDevices(o), newPreflight(o), newReady(o), newAlive(o))
	return root
}

func args(check cobra.PositionalArgs) cobra.PositionalArgs { return cli.Args("smcrctl", check) }

// ask is the body of a command that asks the agent and prints the answer.
func ask[T any](o *options, cmd *cobra.Command, question func(context.Context, *agentapi.Client) (T, error), table func(io.Writer, T) error) error {
	c := agentapi.NewClient(o.socket)
	defer c.Close()
	v, err := question(cmd.Context(), c)
	if err != nil {
		return err
	}
	return cli.Show(o.out, o.output, v, table)
}

func newStatus(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "What the agent does, and what keeps connections off SMC-R",
		Example: "  smcrctl status\n  smcrctl status -o json",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(o, cmd, func(ctx context.Context, c *agentapi.Client) (agentapi.Status, error) { return c.Status(ctx) }, cli.PrintStatus)
		},
	}
}

func newLinks(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "links",
		Short:   "Link groups and their links",
		Example: "  smcrctl links\n  smcrctl links -o json",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(o, cmd, func(ctx context.Context, c *agentapi.Client) (agentapi.Links, error) { return c.Links(ctx) }, cli.PrintLinks)
		},
	}
}

func newConns(o *options) *cobra.Command {
	var pod string
	cmd := &cobra.Command{
		Use:     "conns",
		Short:   "Connections that the agent carries now",
		Example: "  smcrctl conns\n  smcrctl conns --pod shop/web-1\n  smcrctl conns -o json",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(o, cmd, func(ctx context.Context, c *agentapi.Client) (agentapi.Conns, error) {
				if pod == "" {
					return c.Conns(ctx)
				}
				return c.ConnsOf(ctx, pod)
			}, cli.PrintConns)
		},
	}
	cmd.Flags().StringVar(&pod, "pod", "", "show the connections of this pod, NAMESPACE/NAME, only")
	return cmd
}

func newAttachments(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "attachments",
		Short:   "Attached pods, and destinations that are not diverted for a while",
		Example: "  smcrctl attachments",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return ask(o, cmd, func(ctx context.Context, c *agentapi.Client) (agentapi.Attachments, error) { return c.Attachments(ctx) }, cli.PrintAttachments)
		},
	}
}

func newExplain(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "explain SRC DST:PORT",
		Short: "Why connections are, or are not, on SMC-R",
		Long: `explain says why connections from SRC to DST:PORT are, or are not, on SMC-R.
SRC is an address, or NAMESPACE/NAME of a pod of this node. Ask on the node of
either side. The exit code is 0 if they are on SMC-R, and 4 if not.`,
		Example: "  smcrctl explain shop/web-1 192.0.2.7:6379\n  smcrctl explain 192.0.2.5 192.0.2.7:6379 -o json\n  smcrctl explain 2001:db8::5 [2001:db8::7]:6379",
		Args:    args(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, a []string) error {
			var code agentapi.Code
			err := ask(o, cmd, func(ctx context.Context, c *agentapi.Client) (agentapi.Explanation, error) {
				e, err := c.Explain(ctx, a[0], a[1])
				code = e.Code
				return e, err
			}, cli.PrintExplanation)
			if err == nil && code != agentapi.CodeOK {
				return errNot
			}
			return err
		},
	}
}

func newPreflight(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "preflight",
		Short: "What this node has and lacks for SMC-R; works without the agent",
		Long: `preflight tries what the agent needs, without leaving anything behind, and says
what to do about what is missing. Run it as root on the node. FAIL: the agent
does not run. WARN: it runs, with less. NONE: it is not there, and only pods whose
policy asks for it go without. The exit code is 4 if anything fails.`,
		Example: "  smcrctl preflight\n  smcrctl preflight -o json",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r := preflight.Examine(cmd.Context(), machine(cmd.Context(), o))
			if err := cli.Show(o.out, o.output, r, printPreflight); err != nil {
				return err
			}
			if r.Worst == preflight.Fail {
				return errNot
			}
			return nil
		},
	}
}
