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
				rows = append(rows, "\t\t-> "+s)
			}
		}
	}
	return cli.Table(w, rows...)
}

// machine is this machine, and, if an agent answers, what devices that uses: then its UDP port
// is not another program's, and devices that it does not use are not missing.
func machine(ctx context.Context, o *options) preflight.Machine {
	m := preflight.This()
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	c := agentapi.NewClient(o.socket)
	defer c.Close()
	s, err := c.Status(ctx)
	if err != nil {
		return m // there is none, as before the installation
	}
	d, err := c.Devices(ctx)
	return m.Beside(s, err != nil || len(d.Devices) > 0)
}

// agentTimeout is how long preflight waits for the agent.
const agentTimeout = 2 * time.Second
