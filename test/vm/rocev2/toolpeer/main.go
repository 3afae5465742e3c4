// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
	"github.com/smcr-io/kube-smcr/test/vm/rocev2/rdmatools"
)

// dialEvery is the pause between two attempts to reach a program that is starting.
const dialEvery = 100 * time.Millisecond

func main() {
	var c rdmatools.Config
	addr := flag.String("addr", "10.0.0.1", "address of the software device")
	tool := flag.String("tool", string(rdmatools.PingPong), "program whose other end to play")
	to := flag.String("to", "", "be the client of the server at this address; empty: be the server")
	mtu := flag.Int("mtu", 0, "path MTU in bytes; 0: the device's")
	psn := flag.Uint("psn", 0, "first PSN")
	segment := flag.Bool("segment", true, "let the kernel cut what is sent into packets")
	timeout := flag.Duration("timeout", time.Minute, "give up after this time")
	flag.IntVar(&c.Iters, "n", 100, "iterations")
	flag.IntVar(&c.SizeBytes, "s", 4096, "bytes of a message")
	flag.Parse()
	c.Tool, c.PSN, c.Client = rdmatools.Tool(*tool), rdma.PSN(*psn), *to != ""
	ctx, cancel := context.WithTimeout(context.Background(), *timeout)
	defer cancel()
	err := run(ctx, soft.Config{Name: "soft0", NoSegmentation: !*segment}, *addr, *to, *mtu, c)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, device soft.Config, addr, to string, mtu int, c rdmatools.Config) (err error) {
	if device.Addr, err = netip.ParseAddr(addr); err != nil {
		return fmt.Errorf("address of the device: %w", err)
	}
	for m := rdma.MTU256; m <= rdma.MTU4096; m++ {
		if m.Bytes() == mtu {
			c.MTU = m
		}
	}
	if mtu != 0 && c.MTU == 0 {
		return fmt.Errorf("path MTU %d: want 256, 512, 1024, 2048 or 4096", mtu)
	}
	dev, err := soft.Open(device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	conn, err := connect(ctx, to)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	c.Linger = untilInputEnds
	report, err := rdmatools.Run(ctx, conn, dev, c)
	out := struct {
		rdmatools.Report
		Device soft.Stats
	}{report, dev.Stats()}
	return errors.Join(err, json.NewEncoder(os.Stdout).Encode(out))
}

// untilInputEnds lets whoever started the other program say that it has ended.
func untilInputEnds(ctx context.Context) {
	ended := make(chan struct{})
	go func() { // ends with the process if nobody closes the input
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
}

// connect dials the server, or waits for the one client after it has said so.
func connect(ctx context.Context, to string) (net.Conn, error) {
	port := strconv.Itoa(rdmatools.Port)
	if to == "" {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", ":"+port)
		if err != nil {
			return nil, err
		}
		defer func() { _ = l.Close() }()
		stop := context.AfterFunc(ctx, func() { _ = l.Close() })
		defer stop()
		if _, err := fmt.Fprintln(os.Stdout, "listening"); err != nil {
			return nil, err
		}
		return l.Accept()
	}
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(to, port))
		if err == nil {
			return conn, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("dial: %w (last: %w)", context.Cause(ctx), err)
		case <-time.After(dialEvery):
		}
	}
}
