// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/smcr-io/kube-smcr/internal/agentapi"
	"github.com/smcr-io/kube-smcr/internal/cli"
	"github.com/smcr-io/kube-smcr/internal/preflight"
)

func newDevices(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "devices",
		Short: "The kernel's RDMA devices, the GID of each port, and what the agent and pods use",
		Long: `devices lists the RDMA devices of the kernel with the GID that the agent takes of
each port unless it is told another, and why; -o json shows all GIDs. Without the
agent it does not say which devices the agent uses, and which ones pods can have
for themselves (VFs, for example) and have. SMC-R needs RoCE.`,
		Example: "  smcrctl devices\n  smcrctl devices -o json",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			inv, err := preflight.TakeInventory(preflight.This())
			if err != nil {
				return err
			}
			c := agentapi.NewClient(o.socket)
			defer c.Close()
			if err := askAgent(cmd.Context(), c, &inv); err != nil && !errors.Is(err, agentapi.ErrNotRunning) {
				inv.Problem = err.Error()
			}
			return cli.Show(o.out, o.output, inv, printDevices)
		},
	}
}

// askAgent enters what the agent and pods use.
func askAgent(ctx context.Context, c *agentapi.Client, inv *preflight.Inventory) error {
	s, err := c.Status(ctx)
	if err != nil {
		return err
	}
	inv.Agent, inv.Verbs = s.Devices, preflight.VerbsOf(s)
	l, err := c.Devices(ctx)
	if err != nil {
		return err
	}
	inv.ForPods, inv.Problem = l.Devices, l.Problem
	return nil
}

func printDevices(w io.Writer, inv preflight.Inventory) error {
	rows := []string{cli.Row("DEVICE", "PORT", "STATE", "DRIVER", "FIRMWARE", "NUMA", "INTERFACE", "MTU", "GBIT/S", "GID")}
	for _, d := range inv.Devices {
		numa := ""
		if d.NUMANode >= 0 {
			numa = fmt.Sprint(d.NUMANode)
		}
		for _, p := range d.Ports {
			rows = append(rows, cli.Row(d.Name, p.Number, p.State, d.Driver, d.Firmware, numa, p.Interface, known(p.MTU), known(p.RateGbps), p.Why))
		}
		if len(d.Ports) == 0 {
			rows = append(rows, cli.Row(d.Name, "", "", d.Driver, d.Firmware, numa, "", "", "", "it has no ports"))
		}
	}
	if len(inv.Devices) == 0 {
		rows = []string{"the kernel has no RDMA devices; the agent's software device needs none"}
	}
	if err := cli.Table(w, rows...); err != nil {
		return err
	}
	rows = nil
	if len(inv.Agent) > 0 {
		rows = append(rows, "", cli.Row("USED BY THE AGENT", "PROVIDER", "PORT", "ADDRESS", "MTU", "WHY"))
	}
	for _, d := range inv.Agent {
		rows = append(rows, cli.Row(d.Name, d.Provider, d.Port, d.Address, known(d.MTU), cmp.Or(d.Missing, d.Choice)))
	}
	rows = append(rows, podDevices(inv.ForPods)...)
	if !inv.Verbs.Built {
		rows = append(rows, "", inv.Verbs.Detail)
	}
	if inv.Problem != "" {
		rows = append(rows, "", "problem: "+cli.Line(inv.Problem))
	}
	return cli.Table(w, rows...)
}

// known is a number as text, "" for 0, which means unknown. For example, the MTU of an
// interface in a pod's namespace is not known here.
func known[T int | float64](n T) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}

// podDevices are the rows of the devices that pods can have.
func podDevices(ds []agentapi.PodDevice) []string {
	if len(ds) == 0 {
		return nil
	}
	number := func(n int) string {
		if n < 0 {
			return ""
		}
		return fmt.Sprint(n)
	}
	rows := []string{"", cli.Row("FOR PODS", "STATE", "POD", "PF", "VF", "RAIL", "NUMA", "INTERFACE", "RDMA", "ADDRESS", "WHY")}
	for _, d := range ds {
		used := cmp.Or(d.Used, &agentapi.Device{})
		pod := strings.Join(d.Pods, ",")
		if len(d.Pods) > 1 {
			pod = fmt.Sprintf("%d pods", len(d.Pods))
		}
		rows = append(rows, cli.Row(d.ID, d.State, pod, d.PF, number(d.VF), number(d.Rail), number(d.NUMANode), d.Interface,
			strings.Join(d.RDMA, ","), used.Address, cmp.Or(used.Missing, used.Choice)))
	}
	return rows
}
