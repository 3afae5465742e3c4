// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli"
)

// probeTimeout is how long a probe waits for an answer. It is longer than a busy node
// needs, and shorter than the usual timeout of a Kubernetes probe.
const probeTimeout = 2 * time.Second

// newReady is the readiness probe of the agent's container, newAlive the liveness probe.
func newReady(o *options) *cobra.Command {
	var instance string
	cmd := &cobra.Command{
		Use:   "ready",
		Short: "Whether the agent serves this node: for a readiness probe",
		Long: `ready tells whether the agent serves: it answers, has looked at all attached
pods once, and is not stopping. While one agent takes over from another, the one
that answers may not be the one that is asked for: --instance says which one is
meant, and is the pod's name in a container of the chart. The exit code is 0 if
it is ready and 4 if not.`,
		Example: "  smcrctl ready\n  smcrctl ready --instance kube-smcr-agent-x7k2p",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return probe(o, cmd, func(s agentapi.Status) agentapi.Readiness { return agentapi.ReadinessOf(s, instance) })
		},
	}
	cmd.Flags().StringVar(&instance, "instance", os.Getenv(agentapi.InstanceEnv), "the agent that is meant; empty: any")
	return cmd
}

func newAlive(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "alive",
		Short: "Whether the agent answers within 2 s: for a liveness probe",
		Long: `alive tells whether an agent answers within 2 s. It does not matter which one: an
agent that handed over, or has not taken over yet, must not be killed for it.`,
		Example: "  smcrctl alive",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return probe(o, cmd, func(agentapi.Status) agentapi.Readiness {
				return agentapi.Readiness{APIVersion: agentapi.Version, Ready: true, Detail: "the agent answers"}
			})
		},
	}
}

// probe asks for the agent's status and prints what judge makes of it.
func probe(o *options, cmd *cobra.Command, judge func(agentapi.Status) agentapi.Readiness) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), probeTimeout)
	defer cancel()
	var r agentapi.Readiness
	err := ask(o, cmd, func(_ context.Context, c *agentapi.Client) (agentapi.Readiness, error) {
		s, err := c.Status(ctx)
		if err != nil {
			return r, err
		}
		r = judge(s)
		return r, nil
	}, func(w io.Writer, r agentapi.Readiness) error {
		_, err := fmt.Fprintln(w, cli.Line(r.Detail))
		return err
	})
	if err == nil && !r.Ready {
		return errNot
	}
	return err
}
