// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The server's other ports, above the first one, which is for IPv4: for both families, and with
// TCP_DEFER_ACCEPT.
const (
	portSix = 1 + iota
	portDeferring
	// Ports is how many ports the server has.
	Ports
)

// backlog is the backlog of each listener.
const backlog = 16

// deferSeconds is longer than the client waits for an accept that is not deferred.
const deferSeconds = 30

// A server does what its clients tell it.
type server struct {
	release chan struct{} // of capacity 1: what holds goes on
}

// Serve listens on the ports from first on, calls ready, and serves until accept fails.
func Serve(first int, ready func()) error {
	srv := server{release: make(chan struct{}, 1)}
	listeners := make([]int, Ports)
	for i := range listeners {
		var err error
		if listeners[i], err = listen(i, first+i); err != nil {
			return fmt.Errorf("listen on port %d: %w", first+i, err)
		}
	}
	ready()
	failed := make(chan error, len(listeners))
	for i, l := range listeners {
		go func() { failed <- srv.accept(l, i) }()
	}
	return <-failed
}

// listen opens the listener of a kind.
func listen(kind, port int) (int, error) {
	family, addr := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: port})
	if kind == portSix {
		family, addr = unix.AF_INET6, &unix.SockaddrInet6{Port: port}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	switch kind {
	case portDeferring:
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, deferSeconds))
	case portSix:
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0))
	default:
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SAVE_SYN, 1))
	}
	if err := errors.Join(err, unix.Bind(fd, addr), unix.Listen(fd, backlog)); err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

func (srv *server) accept(listener, kind int) error {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
			continue
		case err != nil:
			return fmt.Errorf("accept: %w", err)
		}
		s := sock{fd: fd}
		go func() {
			defer s.close()
			if err := s.bound(); err != nil {
				return
			}
			if kind == portDeferring {
				if s.say("accepted") == nil {
					_, _ = s.all()
				}
				return
			}
			if command, err := s.line(); err == nil {
				srv.serve(s, command)
			}
		}()
	}
}

// serve does what a client wants. An error is one that the client sees, too.
func (srv *server) serve(s sock, command string) {
	word, argument, _ := strings.Cut(command, " ")
	n, _ := strconv.Atoi(argument)
	switch word {
	case "nothing": // until there is another line
		_, _ = s.line()
		return
	case "options":
		if all, err := applyAll(s.fd); err == nil {
			text, _ := json.Marshal(all)
			_ = s.say(string(text))
		}
	case "say":
		if s.write([]byte("abcdef" + strings.Repeat("x", n))[:n]) != nil {
			return
		}
	case "echo":
		b, err := s.read(n)
		if err != nil || s.write(b) != nil {
			return
		}
	case "sink":
		if n, err := s.all(); err == nil {
			_ = s.say(strconv.Itoa(n))
		}
	case "saved":
		syn, err := unix.GetsockoptString(s.fd, unix.IPPROTO_TCP, unix.TCP_SAVED_SYN)
		result, _ := nameOfError(err)
		if err == nil && syn != "" {
			result = "there"
		}
		_ = s.say(result)
	case "urgent":
		if s.write([]byte("ab")) != nil || sendUrgent(s, 'X') != nil || s.write([]byte("cd")) != nil {
			return
		}
	case "hold":
		<-srv.release
	case "release":
		srv.release <- struct{}{}
	case "reset", "unread":
		_, _ = s.poll(unix.POLLIN, patience) // something that is not read
		if word == "reset" {
			_ = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
		return
	}
	_, _ = s.all()
}

// sendUrgent sends a byte of urgent data.
func sendUrgent(s sock, b byte) error {
	_, err := unix.SendmsgN(s.fd, []byte{b}, nil, nil, unix.MSG_OOB|unix.MSG_NOSIGNAL)
	return err
}
