// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
)

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "driver:", err)
		os.Exit(1)
	}
}

// options are the flags of all commands.
type options struct {
	conf, container, netns, ifName, pod string
	device, devices, dataDir            string
	command, recover                    string
	lease, server                       string
	pods, parallel                      int
	rivals                              int
	check                               bool
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("no command; there are call, churn, crash, dhcpd and host")
	}
	var o options
	f := flag.NewFlagSet(args[0], flag.ContinueOnError)
	f.StringVar(&o.conf, "conf", "", "file of the network's configuration list")
	f.StringVar(&o.container, "container", "pod", "id of the container, and prefix of those of several")
	f.StringVar(&o.netns, "netns", "", "the pod's network namespace, if not /run/netns/CONTAINER")
	f.StringVar(&o.ifName, "if", "net1", "the pod's interface")
	f.StringVar(&o.pod, "pod", "", "the pod's name, if not the container's")
	f.StringVar(&o.device, "device", "", "deviceID, if any")
	f.StringVar(&o.devices, "devices", "", "deviceIDs that pods take in turns, with commas")
	f.StringVar(&o.dataDir, "data-dir", "/run/smcr", "what the plugins remember is there")
	f.StringVar(&o.command, "command", "add", "which call is killed: add or del")
	f.StringVar(&o.recover, "recover", "del", "what brings the machine back, in turns: del, gc, del-without-netns and del-without-journal, with commas")
	f.StringVar(&o.lease, "lease", "", "address that dhcpd gives away, with its prefix")
	f.StringVar(&o.server, "server", "", "address of dhcpd itself")
	f.IntVar(&o.pods, "pods", 1, "how many pods")
	f.IntVar(&o.parallel, "parallel", 1, "how many at a time")
	f.IntVar(&o.rivals, "rivals", 0, "one of so many pods has a rival that asks for its device, and must not get it")
	f.BoolVar(&o.check, "check", false, "call CHECK for each pod")
	if err := f.Parse(args[1:]); err != nil {
		return err
	}
	var result any
	var err error
	switch args[0] {
	case "call":
		result, err = o.call(ctx, f.Arg(0))
	case "churn":
		result, err = o.churn(ctx)
	case "crash":
		result, err = o.crash(ctx)
	case "dhcpd":
		result, err = o.dhcpd(ctx)
	case "host":
		result, err = host(o.dataDir)
	default:
		return fmt.Errorf("no command %q", args[0])
	}
	if err != nil {
		return fmt.Errorf("%s: %w", strings.Join(args, " "), err)
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}
