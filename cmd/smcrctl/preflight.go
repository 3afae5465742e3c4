// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli"
	"github.com/smcr-io/kube-smcr/internal/preflight"
)

func printPreflight(w io.Writer, r preflight.Report) error {
	rows := []string{cli.Row("CHECK", "RESULT", "DETAIL")}
	for _, c := range r.Checks {
		rows = append(rows, cli.Row(c.Name, c.Result, strings.ReplaceAll(c.Detail, "\n", "; ")))
		for _, s := range []string{c.Means, c.Advice} {
			if s != "" {
				rows = append(rows, "\t\t-> "+cli.Line(s))
			}
		}
	}
	return cli.Table(w, rows...)
}

// machine is this machine. If an agent answers, machine knows the agent's devices, too: then the
// RoCE port is taken by the agent and not by another program, and only devices that the agent
// uses can be missing.
func machine(ctx context.Context, o *options) preflight.Machine {
	m := preflight.This()
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	c := agentapi.NewClient(o.socket)
	defer c.Close()
	s, err := c.Status(ctx)
	if err != nil {
		return m // no agent answers, as before the installation
	}
	d, err := c.Devices(ctx)
	return m.Beside(s, err != nil || len(d.Devices) > 0)
}

// agentTimeout is how long preflight waits for the agent.
const agentTimeout = 2 * time.Second
