// SPDX-License-Identifier: Apache-2.0

// The vm command runs guests with RDMA devices and the kernel's SMC-R on this
// machine.
//
//	go run ./tools/vm run     run a package's tests, or a program, in new guests
//	go run ./tools/vm up      start guests and say how to use them
//	go run ./tools/vm exec    run a command in one of them
//	go run ./tools/vm list    say which guests there are
//	go run ./tools/vm down    end them and remove everything
//	go run ./tools/vm image   build what guests boot, once; print the directory
//
// Package lab says what such guests are.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
	"github.com/smcr-io/kube-smcr/test/vm/lab/image"
	"github.com/smcr-io/kube-smcr/tools/labcmd"
)

// defaultName is the name of guests that were given none.
const defaultName = "local"

func main() {
	if err := labcmd.Run(command()); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(exitCode(err))
	}
}

// exitCode returns the exit code of the command in the guest, if it was the command that failed.
func exitCode(err error) int {
	var exit *lab.ExitError
	switch {
	case !errors.As(err, &exit):
		return 1
	case exit.Signal != 0:
		return 128 + exit.Signal
	default:
		return exit.Code
	}
}

func command() *cobra.Command {
	return labs().Root("vm", "Guests with RDMA devices and the kernel's SMC-R", labcmd.Texts{
		List: "Say which guests there are",
		Down: "End guests, or what is left of them, and remove everything",
		Name: "name of the guests together", All: "all guests of this user",
	}, imageCommand(), upCommand(), execCommand(), runCommand())
}

func imageCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "image",
		Short: "Build what guests boot, once, for each kernel, and print the directories",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, kernel := range []image.Kernel{image.SMC, image.NetNS} {
				files, err := image.Get(cmd.Context(), kernel, cmd.ErrOrStderr())
				if err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), filepath.Dir(files.Kernel))
			}
			qemu, err := image.GetIGB(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), qemu.Program)
			siw, err := image.GetSIW(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), filepath.Dir(siw.Plain))
			rxe, err := image.GetRXE(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), filepath.Dir(rxe))
			return nil
		},
	}
}

// guests are guests as the flags say.
type guests struct {
	cfg lab.Config
	rxe bool
	vfs int

	kernels []string
}

func (w *guests) flags(cmd *cobra.Command) {
	cfg, f := &w.cfg, cmd.Flags()
	f.IntVar(&cfg.Guests, "guests", 2, "how many")
	f.IntVar(&cfg.NICs, "nics", 2, "how many NICs each has")
	f.StringSliceVar(&w.kernels, "kernel", []string{string(image.SMC)}, "release of the kernel, or those of the guests; soft RoCE in network namespaces has "+string(image.NetNS))
	f.IntVar(&cfg.PFs, "pfs", 0, "how many igb NICs each has besides, for virtual functions")
	f.IntVar(&w.vfs, "vfs", 0, "how many virtual functions to make of each of those")
	f.BoolVar(&cfg.NUMA, "numa", false, "two NUMA nodes, and the igb NICs on both")
	f.IntVar(&cfg.MTU, "mtu", 9000, "MTU of the NICs")
	f.IntVar(&cfg.MemoryMiB, "memory", 1024, "memory of each, in MiB")
	f.StringSliceVar(&cfg.Modules, "module", nil, "kernel module to load in the boot (several)")
	f.BoolVar(&w.rxe, "rxe", true, "make a soft RoCE device of each NIC: rxe0, rxe1")
}

// start starts them.
func (w *guests) start(ctx context.Context) (*lab.Lab, error) {
	for _, kernel := range w.kernels {
		w.cfg.Kernels = append(w.cfg.Kernels, image.Kernel(kernel))
	}
	l, err := lab.Up(ctx, w.cfg)
	if err != nil {
		return nil, err
	}
	for i := range l.Guests() {
		if err := w.devices(ctx, l.Guest(i)); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	if w.cfg.PFs > 0 {
		if _, err := l.BuildCNIPlugins(ctx); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	return l, nil
}

// devices makes the devices of a guest.
func (w *guests) devices(ctx context.Context, g *lab.Guest) error {
	if w.vfs > 0 {
		for pf := range w.cfg.PFs {
			if _, err := g.MakeVFs(ctx, g.PF(pf), w.vfs); err != nil {
				return err
			}
		}
	}
	if !w.rxe {
		return nil
	}
	var nics []int
	for n := range w.cfg.NICs {
		nics = append(nics, n)
	}
	return g.AddRXE(ctx, nics...)
}

func upCommand() *cobra.Command {
	w := guests{cfg: lab.Config{Detach: true}}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start guests and say how to use them",
		Example: `  go run ./tools/vm up --name a
  go run ./tools/vm exec --name a g0 -- ibv_devinfo
  KUBE_SMCR_TEST_VM=a go test ./test/vm/kernel   # with these guests, which stay
  go run ./tools/vm down --name a
  go run ./tools/vm up --name b --pfs 2 --vfs 2 --numa`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			w.cfg.Log = cmd.ErrOrStderr()
			l, err := w.start(cmd.Context())
			if err != nil {
				return err
			}
			defer l.Forget()
			fmt.Fprintf(cmd.OutOrStdout(), `
To use them:

  go run ./tools/vm exec --name %[1]s g0 -- bash -c 'rdma link; ip address'
  %[2]s=%[1]s go test ./test/vm/...   # one package at a time

Files for them (/host there): %[3]s
To end them: go run ./tools/vm down --name %[1]s
`, l.Name(), lab.TestEnv, l.Share())
			return nil
		},
	}
	cmd.Flags().StringVar(&w.cfg.Name, "name", defaultName, "name of the guests together")
	w.flags(cmd)
	return cmd
}

func execCommand() *cobra.Command {
	var name string
	var input bool
	cmd := &cobra.Command{
		Use:   "exec GUEST -- COMMAND...",
		Short: "Run a command in a guest, and end with its exit code",
		Example: `  go run ./tools/vm exec g1 -- ping -c1 10.0.0.1
  go run ./tools/vm exec -i g0 -- bash <script`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := lab.Open(name)
			if err != nil {
				return err
			}
			defer l.Forget()
			g, err := guestNamed(l, args[0])
			if err != nil {
				return err
			}
			p, err := g.Start(cmd.Context(), args[1:]...)
			if err != nil {
				return err
			}
			if !input {
				return p.Stream(nil, cmd.OutOrStdout(), cmd.ErrOrStderr())
			}
			return p.Stream(cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVar(&name, "name", defaultName, "name of the guests together")
	cmd.Flags().BoolVarP(&input, "stdin", "i", false, "give the command this one's standard input")
	return cmd
}

func guestNamed(l *lab.Lab, name string) (*lab.Guest, error) {
	var names []string
	for i := range l.Guests() {
		if l.Guest(i).Name() == name {
			return l.Guest(i), nil
		}
		names = append(names, l.Guest(i).Name())
	}
	return nil, fmt.Errorf("no guest %q; there are %s", name, strings.Join(names, ", "))
}

// labs are the laboratories of this user.
func labs() labcmd.Labs {
	return labcmd.Labs{
		Default: defaultName, Names: lab.List, Down: lab.Down, Sweep: lab.Sweep,
		Columns: []string{"GUESTS", "FILES", "CONSOLES"},
		Row: func(_ context.Context, name string) ([]string, error) {
			l, err := lab.Open(name)
			if err != nil {
				return nil, err
			}
			defer l.Forget()
			consoles := filepath.Join(filepath.Dir(l.Share()), "g*", "console.log")
			return []string{strconv.Itoa(l.Guests()), l.Share(), consoles}, nil
		},
	}
}
