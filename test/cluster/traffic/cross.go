// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// cross connects to each of the addresses, from the same port as that of the address, while the
// programs there connect to here: so both open the connection (RFC 9293 §3.5). It does so at one moment, or for
// an address that ends as "/300ms" so much later. It says what that came to, a line each. Who is
// connected says its own address, and is told the peer's.
func cross(ctx context.Context, addresses string, at time.Time, timeout time.Duration, out io.Writer) error {
	all := strings.Split(addresses, ",")
	said, errs := make([]string, len(all)), make([]error, len(all))
	var group sync.WaitGroup
	for i, a := range all {
		group.Go(func() { said[i], errs[i] = crossOne(ctx, a, at, timeout) })
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, strings.Join(said, "\n"))
	return err
}

// crossSlack is how much later than it should a program connects at most: otherwise it says that it is too
// late.
const crossSlack = 250 * time.Millisecond

func crossOne(ctx context.Context, address string, at time.Time, timeout time.Duration) (string, error) {
	address, after, later := strings.Cut(address, "/")
	if later {
		d, err := time.ParseDuration(after)
		if err != nil {
			return "", err
		}
		at = at.Add(d)
	}
	peer, err := netip.ParseAddrPort(address)
	if err != nil {
		return "", err
	}
	pause(ctx, time.Until(at))
	d := net.Dialer{Timeout: timeout, LocalAddr: &net.TCPAddr{Port: int(peer.Port())}}
	began := time.Now()
	if late := began.Sub(at); late > crossSlack {
		return "", fmt.Errorf("connect to %v: %v too late", peer, late)
	}
	conn, err := d.DialContext(ctx, "tcp", peer.String())
	took := time.Since(began)
	what, err := outcome(err)
	if err != nil {
		return "", err
	}
	if conn != nil {
		defer func() { _ = conn.Close() }()
		if err := greet(conn); err != nil {
			what = fmt.Sprintf("connected, and then: %v", err)
		}
	}
	return fmt.Sprintf("%s after %d ms", what, took.Milliseconds()), nil
}

// greet says to the peer which address this end has, and is told the same.
func greet(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(exchangeTimeout)); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(conn, conn.LocalAddr()); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	if line = strings.TrimSuffix(line, "\n"); line != conn.RemoteAddr().String() {
		return fmt.Errorf("%s is who speaks", line)
	}
	return nil
}
