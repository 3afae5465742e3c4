// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/vf/report"
)

const (
	// measuredPFs with measuredVFs each, the most that igb has, are enough for
	// many pods at a time.
	measuredPFs, measuredVFs = 3, 7
	manyAtATime              = 20
)

// ipam is the same for both plugins.
const ipam = `"ipam": {"type": "host-local", "dataDir": "/run/ipam", "ranges": [[{"subnet": "10.1.0.0/24"}]]}`

// measured are the plugins: the reference plugin that moves a device, and ours.
var measured = [...]struct{ name, conf string }{
	{"host-device", `{"type": "host-device", "capabilities": {"deviceID": true}, ` + ipam + `}`},
	{"smcr-cni move", `{"type": "smcr-cni", "mode": "move", "capabilities": {"deviceID": true}, ` + ipam + `}`},
	{"smcr-cni ipvlan", `{"type": "smcr-cni", "mode": "ipvlan", "capabilities": {"deviceID": true}, ` + ipam + `}`},
}

// times prints how long ADD and DEL take with each plugin, on the same VFs and
// without RDMA devices, of which the reference plugin knows nothing.
func (d *demo) times(ctx context.Context, pods int) error {
	d.Title("One node with %d VFs", measuredPFs*measuredVFs)
	if err := d.up(ctx, lab.Config{Guests: 1, PFs: measuredPFs}, measuredVFs); err != nil {
		return err
	}
	g := d.lab.Guest(0)
	out, err := g.Shell(ctx, "mkdir -p "+dataDir+"; for v in /sys/class/net/pf?/device/virtfn*; do basename $(readlink $v); done")
	if err != nil {
		return err
	}
	devices := strings.Fields(out)
	d.Check("there is a VF for each of the pods that come at a time", len(devices) >= manyAtATime, "%d VFs of %d PFs", len(devices), measuredPFs)
	for _, parallel := range []int{1, manyAtATime} {
		d.Title("%d pods, %d at a time", pods, parallel)
		if err := d.compare(ctx, devices, pods, parallel); err != nil {
			return err
		}
	}
	return nil
}

// compare runs the plugins one after another, and prints a table.
func (d *demo) compare(ctx context.Context, devices []string, pods, parallel int) error {
	var churns [len(measured)]report.Churn
	for i, m := range measured {
		name := strings.ReplaceAll(m.name, " ", "-")
		if err := d.network(name, m.conf); err != nil {
			return err
		}
		c, err := decode[report.Churn](d.lab.Guest(0).Run(
			ctx, "driver", "churn", "-conf", "/host/"+name+".conflist", "-container", name, "-data-dir", dataDir+"/devices",
			"-devices", strings.Join(devices, ","), "-pods", strconv.Itoa(pods), "-parallel", strconv.Itoa(parallel),
		))
		if err != nil {
			return err
		}
		detail := "interfaces, VFs, RDMA devices"
		if wrong := append(c.Errors, c.Differences...); len(wrong) > 0 {
			detail = fmt.Sprintf("%d times, first: %s", len(wrong), wrong[0])
		}
		d.Check(m.name+" wires all pods and leaves nothing behind", len(c.Errors)+len(c.Differences) == 0, "%s", detail)
		churns[i] = c
	}
	w := tabwriter.NewWriter(d.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nCALL\tPLUGIN\tP50\tP99\tP50 BY HOST-DEVICE'S\tP99 BY HOST-DEVICE'S")
	for _, command := range []string{"ADD", "DEL"} {
		of := func(i int, q float64) float64 {
			if command == "ADD" {
				return report.Quantile(churns[i].Add, q)
			}
			return report.Quantile(churns[i].Del, q)
		}
		for i, m := range measured {
			p50, p99 := of(i, 0.5), of(i, 0.99)
			fmt.Fprintf(w, "%s\t%s\t%.0f ms\t%.0f ms\t%.2f\t%.2f\n", command, m.name, p50*1000, p99*1000, p50/of(0, 0.5), p99/of(0, 0.99))
		}
	}
	return w.Flush()
}
