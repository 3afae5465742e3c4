// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"

	"github.com/smcr-io/kube-smcr/test/vm/afsmc"
	"github.com/smcr-io/kube-smcr/test/vm/kernelpath/sockets"
)

func main() {
	err := afsmc.WithoutPreemption()
	if err == nil {
		err = run(os.Args[1:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sockprobe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("usage: sockprobe serve|probe [flags]")
	}
	f := flag.NewFlagSet("sockprobe "+args[0], flag.ContinueOnError)
	switch args[0] {
	case "serve":
		port := f.Int("port", 7000, "first port")
		if err := f.Parse(args[1:]); err != nil {
			return err
		}
		return sockets.Serve(*port, func() { _, _ = fmt.Fprintln(os.Stdout, "listening") })
	case "probe":
		var p sockets.Prober
		f.TextVar(&p.Server, "server", netip.AddrPort{}, "where the server listens")
		f.TextVar(&p.Six, "six", netip.Addr{}, "its address for IPv6")
		f.IntVar(&p.Want, "protocol", 6, "of connections: 6, or 256 on SMC-R")
		if err := f.Parse(args[1:]); err != nil {
			return err
		}
		rows, err := p.Run()
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(rows)
	}
	return fmt.Errorf("%q: want serve or probe", args[0])
}
