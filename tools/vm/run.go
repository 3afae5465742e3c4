// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/spf13/cobra"

	"github.com/smcr-io/kube-smcr/test/vm/lab"
)

// A runner runs something in guests.
type runner struct {
	guests
	pkg     string
	cgo     bool
	on      []string
	out     string
	capture bool
}

func runCommand() *cobra.Command {
	var r runner
	cmd := &cobra.Command{
		Use:   "run [--package PACKAGE | --on GUEST -- COMMAND...] [-- ARGUMENTS...]",
		Short: "Start guests, run a package's tests or a command there, bring back the logs, end the guests",
		Long: `Start guests, run a package's tests or a command in some of them at the same
time, and end them. The exit code is that of one that failed. Consoles, what was
printed, and a capture of the network are in the directory of --out then.`,
		Example: `  go run ./tools/vm run --package ./pkg/rdma/verbs -- -test.run=TestConformance -test.v
  go run ./tools/vm run --rxe=false -- bash -c 'uname -a; ip address'
  go run ./tools/vm run --on g0,g1 -- bash -c 'if [ $(hostname) = g0 ]; then
      exec ib_write_bw -d rxe0; fi; until ib_write_bw -d rxe0 10.0.0.1; do sleep 1; done'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if r.pkg == "" && len(args) == 0 {
				return errors.New("nothing to run; see: go run ./tools/vm run --help")
			}
			r.cfg.Log = cmd.ErrOrStderr()
			return r.run(cmd.Context(), args, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&r.pkg, "package", "", "Go package whose tests are run; the arguments are those of the test binary")
	f.BoolVar(&r.cgo, "cgo", true, "build it with cgo, which libibverbs needs")
	f.StringSliceVar(&r.on, "on", []string{"g0"}, "guests that run it")
	f.StringVar(&r.out, "out", "out/vm", "directory for logs and capture")
	f.BoolVar(&r.capture, "capture", true, "capture the network")
	r.flags(cmd)
	return cmd
}

func (r *runner) run(ctx context.Context, args []string, stdout io.Writer) (err error) {
	l, err := r.start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.SaveLogs(r.out), l.Close()) }()
	if r.capture {
		stop, err := l.Capture("network")
		if err != nil {
			return err
		}
		defer func() {
			if _, err := stop(); err != nil {
				fmt.Fprintln(r.cfg.Log, "vm:", err) // a guest that ended took the capture with it
			}
		}()
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	var runs sync.WaitGroup
	errs := make([]error, len(r.on))
	for i, name := range r.on {
		g, err := guestNamed(l, name)
		if err != nil {
			return err
		}
		runs.Go(func() { errs[i] = r.runIn(ctx, g, args, stdout) })
	}
	runs.Wait()
	for _, line := range l.Complaints() {
		fmt.Fprintln(r.cfg.Log, "vm: a kernel complained:", line)
	}
	fmt.Fprintln(r.cfg.Log, "vm: logs and captures are in", r.out)
	return errors.Join(errs...)
}

func (r *runner) runIn(ctx context.Context, g *lab.Guest, args []string, stdout io.Writer) (err error) {
	file, err := os.Create(filepath.Join(r.out, g.Name()+".output.log"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	both := io.MultiWriter(stdout, file)
	if r.pkg != "" {
		return g.GoTest(ctx, r.pkg, lab.BuildOptions{CGO: r.cgo}, both, args...)
	}
	p, err := g.Start(ctx, args...)
	if err != nil {
		return err
	}
	return p.Stream(nil, both, both)
}
