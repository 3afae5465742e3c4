// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/smcr-io/kube-smcr/internal/smcnl"
	"github.com/smcr-io/kube-smcr/test/vm/peer/report"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // the kernel refused
	exitUsage  = 2
)

var errUsage = errors.New("usage: kernelsmc [ueid add|del NAME | ueid flush|list | pnet add NAME NETDEV DEVICE PORT | pnet flush|list]")

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	err := command(args, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernelsmc:", err)
	}
	switch {
	case errors.Is(err, errUsage):
		return exitUsage
	case err != nil:
		return exitFailed
	default:
		return exitOK
	}
}

// command prints what the kernel's SMC says, or changes its settings.
func command(args []string, w io.Writer) error {
	if len(args) == 0 {
		return printKernel(w)
	}
	word := func(i int) string {
		if i < len(args) {
			return args[i]
		}
		return ""
	}
	switch word(0) + " " + word(1) {
	case "ueid add":
		return smcnl.AddUEID(word(2))
	case "ueid del":
		return smcnl.RemoveUEID(word(2))
	case "ueid flush":
		return smcnl.FlushUEIDs()
	case "ueid list":
		return printLines(w, smcnl.UEIDs)
	case "pnet list":
		return printLines(w, func() (lines []string, err error) {
			all, err := smcnl.PNets()
			for _, p := range all {
				lines = append(lines, fmt.Sprintf("%s %s %s %d", p.Name, p.NetDev, p.Device, p.Port))
			}
			return lines, err
		})
	case "pnet flush":
		return smcnl.FlushPNets()
	case "pnet add":
		port, err := strconv.ParseUint(word(5), 10, 8)
		if err != nil {
			return fmt.Errorf("port %q: %w; %w", word(5), err, errUsage)
		}
		return smcnl.AddPNet(smcnl.PNet{Name: word(2), NetDev: word(3), Device: word(4), Port: uint8(port)})
	}
	return errUsage
}

// printLines prints what list returns, one a line.
func printLines(w io.Writer, list func() ([]string, error)) error {
	all, err := list()
	for _, line := range all {
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return err
}

func printKernel(w io.Writer) error {
	var k report.Kernel
	var err error
	if k.Counters, err = smcnl.ReadCounters(); err != nil {
		return err
	}
	if k.System, err = smcnl.ReadSystem(); err != nil {
		return err
	}
	if k.Groups, err = smcnl.Groups(); err != nil {
		return err
	}
	if k.Sockets, err = smcnl.Sockets(nil); err != nil {
		return err
	}
	if k.UEIDs, err = smcnl.UEIDs(); err != nil {
		return err
	}
	if k.PNets, err = smcnl.PNets(); err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(k)
}
