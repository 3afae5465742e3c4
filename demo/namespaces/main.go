// SPDX-License-Identifier: Apache-2.0

// Command demo shows the main job: applications of the distribution, unchanged,
// in pods without privileges on two nodes, talk over SMC-R.
//
// It builds the nodes from network namespaces (package lab), attaches pods
// through a CNI configuration with smcr-cni in its chain, measures nginx,
// redis and iperf3 without and with the node agents, looks at a capture with
// tshark, takes SMC-R away in several ways, and removes everything again.
// Every statement it makes is a check; one that does not hold ends the demo
// with exit code 1.
//
// With --failover it shows the other main job: connections survive the loss of
// a link. It cuts one link after the other under running applications, in every
// way that a lab knows, and measures how long they stall.
//
// The nodes, what runs on them and where the figures come from are package
// test/netns/twonodes, whose tests check the same; here it is shown.
//
// # Limitations
//
// One machine stands for two, so sender, receiver and both agents share its
// cores, and a ratio to TCP says what the same cores do with and without
// SMC-R. It needs root; make demo installs what else it needs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/smcr-io/kube-smcr/demo/transcript"
	"github.com/smcr-io/kube-smcr/test/netns/twonodes"
)

const (
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// options are the flags.
type options struct {
	output, bin, pcapDir string
	keep, quick, verbose bool
	failover             bool
	repeat               int
}

func run(args []string, stdout, stderr io.Writer) int {
	o, code := parseFlags(args, stderr)
	if code >= 0 {
		return code
	}
	if err := ready(o.bin); err != nil {
		fmt.Fprintf(stderr, "demo: %v\n", err)
		return exitFailed
	}
	ctx, stop, err := transcript.Interruptible()
	if err != nil {
		fmt.Fprintf(stderr, "demo: %v\n", err)
		return exitFailed
	}
	defer stop()
	progress := stdout
	if o.output == "json" {
		progress = stderr
	}
	sh := newShow(o, progress)
	err = sh.story.Run(ctx)
	interrupted := ctx.Err() != nil
	switch {
	case interrupted:
		sh.Progress(fmt.Sprintf("interrupted: %v", context.Cause(ctx)))
	case err != nil:
		sh.Check(twonodes.Check{Name: "the demo is complete", Detail: err.Error()})
	}
	if o.keep && !interrupted {
		sh.keep(ctx)
	}
	sh.story.Close()
	seconds := time.Since(sh.began).Seconds()
	sh.summary(interrupted, seconds)
	if o.output == "json" {
		if err := sh.writeJSON(stdout, seconds); err != nil {
			fmt.Fprintf(stderr, "demo: %v\n", err)
			return exitFailed
		}
	}
	switch {
	case interrupted:
		return exitInterrupted
	case len(sh.failed()) > 0:
		return exitFailed
	}
	return 0
}

// parseFlags returns an exit code of 0 or more if that is all there is to do.
func parseFlags(args []string, stderr io.Writer) (options, int) {
	var o options
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, "demo shows unmodified applications of two pods talking over SMC-R.\n\n"+
			"  make demo\n  make demo-failover        cut one link after the other under the applications\n  make demo ARGS=--quick\n  make demo ARGS=--keep     leave everything running until Ctrl-C\n  make demo ARGS='-o json'\n\n"+
			"Exit codes: 0 all checks hold, 1 one does not, 2 wrong usage, 130 interrupted.\n\n")
		fs.PrintDefaults()
	}
	fs.StringVar(&o.output, "o", "table", "`FORMAT` of the result: table, or json (progress then goes to stderr)")
	fs.StringVar(&o.bin, "bin", "bin", "`DIR` with the programs that make build makes")
	fs.StringVar(&o.pcapDir, "pcap", filepath.Join("out", "demo"), "`DIR` for the captures")
	fs.BoolVar(&o.keep, "keep", false, "keep the pods and agents until Ctrl-C")
	fs.BoolVar(&o.quick, "quick", false, "smaller transfers")
	fs.BoolVar(&o.failover, "failover", false, "cut links of two RNICs per node, and measure how long the applications stall")
	fs.IntVar(&o.repeat, "repeat", 5, "with --failover, how often each fault happens: 1 to 100; 2 with --quick")
	fs.BoolVar(&o.verbose, "v", false, "show the agents' logs")
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return o, 0
	case err != nil:
		return o, exitUsage
	case o.repeat < 1 || o.repeat > 100:
		fmt.Fprintln(stderr, "demo: want 1 to 100 for --repeat; --help shows more")
		return o, exitUsage
	case fs.NArg() > 0 || o.output != "table" && o.output != "json":
		fmt.Fprintln(stderr, "demo: want no arguments, and table or json for -o; --help shows more")
		return o, exitUsage
	}
	return o, -1
}

// ready says what is missing before anything was made.
func ready(bin string) error {
	if os.Geteuid() != 0 {
		return errors.New("needs root, to make network namespaces: sudo make demo")
	}
	var missing []string
	for _, p := range twonodes.Programs() {
		if _, err := exec.LookPath(p); err != nil {
			missing = append(missing, p)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("not on this machine: %s: make deps installs them", strings.Join(missing, ", "))
	}
	for _, p := range twonodes.Binaries() {
		if _, err := os.Stat(filepath.Join(bin, p)); err != nil {
			return fmt.Errorf("%w: make build makes it", err)
		}
	}
	return nil
}
