// SPDX-License-Identifier: Apache-2.0

// The cluster command runs a real Kubernetes cluster on this machine.
//
//	go run ./tools/cluster tools   build the programs of a cluster, once; print the directory
//	go run ./tools/cluster up      start a cluster and say how to use it
//	go run ./tools/cluster image   pack images of this project and of applications, without docker
//	go run ./tools/cluster list    say which clusters there are
//	go run ./tools/cluster down    end it and remove everything
//
// Package lab says what such a cluster is.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/smcr-io/kube-smcr/internal/testenv/clustertools"
	"github.com/smcr-io/kube-smcr/test/cluster/lab"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/guest"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/image"
	"github.com/smcr-io/kube-smcr/test/cluster/lab/machine"
	"github.com/smcr-io/kube-smcr/tools/labcmd"
)

const (
	// defaultName is the name of the cluster of make cluster-up.
	defaultName = "local"

	imageDir = "out/images"
)

func main() {
	if machine.IsMachine() {
		exit(machine.Main())
	}
	exit(labcmd.Run(command()))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func command() *cobra.Command {
	return clusters().Root("cluster", "A real Kubernetes cluster on this machine", labcmd.Texts{
		List: "Say which clusters there are",
		Down: "End a cluster, or what is left of it, and remove everything",
		Name: "name of the cluster", All: "all clusters of this user",
	}, toolsCommand(), imageCommand(), loadCommand(), upCommand(), superviseCommand())
}

func toolsCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "tools",
		Short: "Build the programs of a cluster, once, and print their directory",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := clustertools.Dir(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), dir)
			return nil
		},
	}
}

func imageCommand() *cobra.Command {
	var dir string
	var chart bool
	cmd := &cobra.Command{
		Use:   "image [IMAGE...]",
		Short: "Pack images, without docker, and print the files",
		Long: "Pack images as archives that containerd imports: this project's programs, and\n" +
			"applications from the distribution's packages. Without arguments all of them:\n  " +
			strings.Join(image.Refs(), "\n  ") +
			"\n--chart: the first one, under the name that the chart installs by default.",
		RunE: func(cmd *cobra.Command, refs []string) error {
			if chart {
				ref, err := image.ChartRef(cmd.Context())
				if err != nil {
					return err
				}
				refs = append(refs, ref)
			}
			archives, err := image.Build(cmd.Context(), dir, refs...)
			if err != nil {
				return err
			}
			for _, a := range archives {
				fmt.Fprintln(cmd.OutOrStdout(), a)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "out", imageDir, "directory of the files")
	cmd.Flags().BoolVar(&chart, "chart", false, "pack the image that the chart installs by default")
	return cmd
}

func loadCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "load FILE...",
		Short: "Load images into all nodes of a cluster",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, archives []string) error {
			c, err := guest.Open(cmd.Context(), name)
			if err != nil {
				return err
			}
			defer c.Close()
			for _, a := range archives {
				if err := c.LoadImage(cmd.Context(), a); err != nil {
					return err
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&name, "name", defaultName, "name of the cluster")
	return cmd
}

func upCommand() *cobra.Command {
	cfg := guest.Config{Config: lab.Config{Detach: true}}
	var pack bool
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start a cluster and say how to use it",
		Long: `Start a cluster and say how to use it.

--rdma: some nodes are guests, emulated machines with Debian's kernel and two soft RoCE
devices each, rxe0 and rxe1. They take QEMU and 1.6 GiB of memory each, no KVM, and are
ready in a minute on two cores; --nodes is how many others there are, by default one.
--vfs: and two NICs with virtual functions and soft RoCE on these; their kernel has no SMC-R
of its own then, unless --kernel-smc is said, too.
--kernel-smc: and their kernel has the module smc loaded, with the enterprise ID that the
chart gives to agents, so that programs outside of pods can be peers of pods.`,
		Example: `  go run ./tools/cluster up
  go run ./tools/cluster up --rdma               # one node of this machine, two guests
  go run ./tools/cluster up --rdma=3 --nodes 2
  go run ./tools/cluster up --rdma --vfs=4
  go run ./tools/cluster up --rdma --kernel-smc`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if (cfg.VFs > 0 || cfg.KernelSMC) && cfg.Guests == 0 {
				return errors.New("--vfs and --kernel-smc are of guests: say --rdma, too")
			}
			if cfg.Guests > 0 && !cmd.Flags().Changed("nodes") {
				cfg.Nodes = 1
			}
			cfg.Progress = cmd.ErrOrStderr()
			if pack {
				archives, err := image.Build(cmd.Context(), imageDir)
				if err != nil {
					return err
				}
				cfg.Images = append(archives, cfg.Images...)
			}
			c, err := up(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			defer c.Close()
			return describe(cmd.OutOrStdout(), c, pack)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Name, "name", defaultName, "name of the cluster")
	f.IntVar(&cfg.Nodes, "nodes", 2, "how many nodes, besides the control plane and guests")
	f.IntVar(&cfg.Guests, "rdma", 0, "how many guests with RDMA devices are nodes, too (--rdma: 2)")
	f.Lookup("rdma").NoOptDefVal = "2"
	f.IntVar(&cfg.VFs, "vfs", 0, "how many virtual functions each of two NICs of a guest has (--vfs: 4)")
	f.Lookup("vfs").NoOptDefVal = "4"
	f.BoolVar(&cfg.KernelSMC, "kernel-smc", false, "the guests' kernels have SMC-R of their own, too")
	f.BoolVar(&pack, "pack", true, "pack and load the images of this project and of the applications")
	f.StringSliceVar(&cfg.Images, "image", nil, "archive with an image that the nodes shall have (several)")
	f.StringVar(&cfg.LogDir, "logs", "", "directory where the logs stay (default: with the cluster)")
	f.StringVar(&cfg.ProxyMode, "proxy-mode", "iptables", "mode of kube-proxy: iptables or nftables, which it is with guests")
	f.StringVar(&cfg.CNIVersion, "cni-version", "1.0.0", "version of the nodes' CNI configuration list")
	f.BoolVar(&cfg.IPv4Only, "ipv4-only", false, "no IPv6")
	return cmd
}

// up starts a cluster, with guests if there are to be any.
func up(ctx context.Context, cfg guest.Config) (*guest.Cluster, error) {
	if cfg.Guests != 0 {
		return guest.Up(ctx, cfg)
	}
	c, err := lab.Up(ctx, cfg.Config)
	if err != nil {
		return nil, err
	}
	return &guest.Cluster{Cluster: c}, nil
}

// describe says how to use a cluster.
func describe(w io.Writer, c *guest.Cluster, packed bool) error {
	nodes, err := c.Kubectl(context.Background(), "get", "nodes", "-o", "wide")
	if err != nil {
		return err
	}
	loaded := "none"
	if packed {
		loaded = strings.Join(image.Refs(), "\n  ")
	}
	_, err = fmt.Fprintf(w, `
%s
Kubernetes is up. To use it:

  export KUBECONFIG=%s
  export PATH=%s:$PATH
  kubectl get pods -A

Images on the nodes, besides those of --image:
  %s
Logs: %s
%sTo end it: make cluster-down
`, nodes, c.Kubeconfig(), filepath.Dir(c.Tool("kubectl")), loaded, c.Logs(), guests(c))
	return err
}

// guests says how to use the guests of a cluster.
func guests(c *guest.Cluster) string {
	if c.Machines() == nil {
		return ""
	}
	var names []string
	for _, n := range c.Guests {
		names = append(names, n.Guest.Name()+" is "+n.Name)
	}
	return fmt.Sprintf(`A command in a guest (%s):
  go run ./tools/vm exec --name %s %s -- rdma link
`, strings.Join(names, ", "), c.Machines().Name(), c.Guests[0].Guest.Name())
}

// clusters are the clusters of this user.
func clusters() labcmd.Labs {
	return labcmd.Labs{
		Default: defaultName, Names: lab.List, Down: guest.Down, Sweep: func() error { return guest.Sweep(context.Background()) },
		Columns: []string{"NODES", "KUBECONFIG", "LOGS"},
		Row: func(ctx context.Context, name string) ([]string, error) {
			c, err := lab.Open(ctx, name)
			if err != nil {
				return nil, err
			}
			defer c.Close()
			return []string{strconv.Itoa(len(c.Nodes)), c.Kubeconfig(), c.Logs()}, nil
		},
	}
}

// superviseCommand is what package lab runs a cluster in.
func superviseCommand() *cobra.Command {
	var leased bool
	cmd := &cobra.Command{
		Use:    lab.SuperviseCommand + " DIRECTORY",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var lease io.Reader
			if leased {
				lease = os.Stdin
			}
			return lab.Supervise(cmd.Context(), args[0], lease)
		},
	}
	cmd.Flags().BoolVar(&leased, "leased", false, "end when the standard input ends")
	return cmd
}
