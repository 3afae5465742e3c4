// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// connectBlocking is connect on a socket of a program that waits in connect().
func connectBlocking(address string, mapped bool, timeout time.Duration, out io.Writer) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	fd, sa, err := socket(to, mapped)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	// Signals of Go's runtime would interrupt connect() on this thread, which ends with its goroutine.
	type result struct {
		err  error
		took time.Duration
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		var all unix.Sigset_t
		for i := range all.Val {
			all.Val[i] = ^all.Val[i]
		}
		if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil); err != nil {
			done <- result{err: err}
			return
		}
		began := time.Now()
		err := unix.Connect(fd, sa)
		done <- result{err, time.Since(began)}
	}()
	r := <-done
	what := "connected"
	var errno unix.Errno
	switch {
	case errors.Is(r.err, unix.EINPROGRESS): // what the kernel says after SO_SNDTIMEO
		what = "own timeout"
	case errors.As(r.err, &errno):
		what = errno.Error()
	case r.err != nil:
		return r.err
	}
	_, err = fmt.Fprintf(out, "%s after %d ms\n", what, r.took.Milliseconds())
	return err
}

// socket makes a socket that blocks, and the address for it.
func socket(to netip.AddrPort, mapped bool) (fd int, sa unix.Sockaddr, err error) {
	family := unix.AF_INET6
	sa = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	if to.Addr().Is4() && !mapped {
		family, sa = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	return fd, sa, os.NewSyscallError("socket", err)
}

// full listens with a backlog that is full, so that it does not answer, until ctx ends.
func full(ctx context.Context, address string) error {
	to, err := netip.ParseAddrPort("127.0.0.1" + address)
	if err != nil {
		return err
	}
	l, _, err := socket(to, false)
	if err != nil {
		return err
	}
	defer unix.Close(l)
	if err := errors.Join(unix.Bind(l, &unix.SockaddrInet4{Port: int(to.Port())}), unix.Listen(l, 0)); err != nil {
		return fmt.Errorf("listen on %s: %w", address, err)
	}
	c, sa, err := socket(to, false)
	if err != nil {
		return err
	}
	defer unix.Close(c)
	if err := unix.Connect(c, sa); err != nil { // a backlog of 0 has room for one
		return os.NewSyscallError("connect", err)
	}
	<-ctx.Done()
	return nil
}
