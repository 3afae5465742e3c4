// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// closedPort is one on which nobody listens.
	closedPort = 1
	// timeout is the timeout of operations that shall time out.
	timeout = 500 * time.Millisecond
	// atOnce bounds what ought to be there without waiting, for a slow peer.
	atOnce = 3 * time.Second
	// wakeTime bounds the wake of a thread that waits in accept: a machine may stand still meanwhile.
	wakeTime = 10 * time.Second
)

// connects are trials of how connections are made.
func connects() []trial {
	return []trial{
		{"connect, the second time", "", (*Prober).connectTwice},
		{"connect to a port on which nobody listens", "", (*Prober).refused},
		{"connect with SO_SNDTIMEO to nobody", "programs that bound connect so: it takes as long as it takes TCP to give up", (*Prober).connectTimesOut},
		{"connect without blocking", "", (*Prober).connectLater},
		{"connect without blocking to a port on which nobody listens: events", "none that is known: programs look at ERR and HUP, or ask SO_ERROR", (*Prober).refusedLater},
		{"sendto with MSG_FASTOPEN", "none: such clients work, and never on SMC-R", (*Prober).fastOpen},
		{"an IPv6 socket to an IPv4-mapped address", "Java's clients, and others whose sockets are IPv6's for both families", (*Prober).mapped},
		{"an IPv6 socket to an IPv6 address", "pods whose peers have IPv6 addresses", (*Prober).six},
		{"a listener for both families, its client's being IPv4", "", (*Prober).dualStack},
		{"TCP_DEFER_ACCEPT: accept waits for the first byte", "none that is known: servers that set it read from connections that have nothing yet", (*Prober).deferAccept},
		{"TCP_SAVED_SYN of what was accepted", "", (*Prober).savedSYN},
		{"SO_REUSEPORT: two listeners on one port", "", (*Prober).reusePort},
		{"shutdown of a listener wakes accept", "servers that end so: it waits until the next connection", (*Prober).wakeAccept},
		{"ss -p finds the program", "operators, and programs that look for the owner of a connection", (*Prober).findOwner},
	}
}

func (p *Prober) connectTwice() (string, error) {
	s, err := p.dial("nothing")
	if err != nil {
		return "", err
	}
	return nameOfError(s.connect(p.address(0)))
}

// closed is where nobody listens.
func (p *Prober) closed() unix.Sockaddr {
	return &unix.SockaddrInet4{Port: closedPort, Addr: p.Server.Addr().As4()}
}

func (p *Prober) refused() (string, error) {
	s, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return "", err
	}
	return nameOfError(s.connect(p.closed()))
}

// connectTimesOut connects to an address of the server's network that nobody has.
func (p *Prober) connectTimesOut() (string, error) {
	s, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return "", err
	}
	tv := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv); err != nil {
		return "", err
	}
	nobody := p.Server.Addr().As4()
	nobody[3] = 254
	return nameOfError(s.connect(&unix.SockaddrInet4{Port: int(p.Server.Port()), Addr: nobody}))
}

// connectLater connects without blocking, waits for the event, and asks twice how it went.
func (p *Prober) connectLater() (string, error) {
	s, err := p.open(unix.AF_INET, unix.SOCK_NONBLOCK)
	if err != nil {
		return "", err
	}
	first, err := nameOfError(unix.Connect(s.fd, p.address(0)))
	if err != nil {
		return "", err
	}
	events, err := s.poll(unix.POLLOUT, patience)
	if err != nil {
		return "", err
	}
	code, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return "", err
	}
	second, err := nameOfError(unix.Connect(s.fd, p.address(0)))
	if err != nil {
		return "", err
	}
	third, err := nameOfError(unix.Connect(s.fd, p.address(0)))
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s, then %s, SO_ERROR %d; connect again: %s, %s", first, eventNames(events), code, second, third), s.say("nothing")
}

func (p *Prober) refusedLater() (string, error) {
	s, err := p.open(unix.AF_INET, unix.SOCK_NONBLOCK)
	if err != nil {
		return "", err
	}
	first, err := nameOfError(unix.Connect(s.fd, p.closed()))
	if err != nil {
		return "", err
	}
	events, err := s.poll(unix.POLLIN|unix.POLLOUT, patience)
	if err != nil {
		return "", err
	}
	code, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s, then %s, SO_ERROR %s", first, eventNames(events), nameOf(unix.Errno(code))), nil
}

// greeted has a connection echo, and says that it does.
func (s sock) greeted() (string, error) {
	if err := errors.Join(s.bound(), s.say("echo 3"), s.write([]byte("abc"))); err != nil {
		return "", err
	}
	b, err := s.read(3)
	if err == nil && string(b) != "abc" {
		err = fmt.Errorf("the server said %q", b)
	}
	return "works", err
}

func (p *Prober) fastOpen() (string, error) {
	s, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return "", err
	}
	if err := unix.Sendto(s.fd, []byte("echo 3\nabc"), unix.MSG_FASTOPEN, p.address(0)); err != nil {
		return "", err
	}
	if err := s.bound(); err != nil {
		return "", err
	}
	b, err := s.read(3)
	return quoted(b), err
}

// dialSix connects a socket of IPv6.
func (p *Prober) dialSix(to unix.Sockaddr) (string, error) {
	s, err := p.open(unix.AF_INET6, 0)
	if err != nil {
		return "", err
	}
	if err := s.connect(to); err != nil {
		return "", err
	}
	return s.greeted()
}

func (p *Prober) mapped() (string, error) {
	return p.dialSix(&unix.SockaddrInet6{Port: int(p.Server.Port()), Addr: p.Server.Addr().As16()})
}

func (p *Prober) six() (string, error) {
	if !p.Six.IsValid() {
		return "", errNotHere
	}
	return p.dialSix(&unix.SockaddrInet6{Port: int(p.Server.Port()) + portSix, Addr: p.Six.As16()})
}

func (p *Prober) dualStack() (string, error) {
	s, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return "", err
	}
	if err := s.connect(p.address(portSix)); err != nil {
		return "", err
	}
	return s.greeted()
}

// deferAccept finds out whether a server has the connection before it has a byte of it: it would say so.
func (p *Prober) deferAccept() (string, error) {
	s, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return "", err
	}
	if err := s.connect(p.address(portDeferring)); err != nil {
		return "", err
	}
	early, err := s.poll(unix.POLLIN, atOnce)
	if err != nil {
		return "", err
	}
	if err := s.write([]byte("x")); err != nil {
		return "", err
	}
	line, err := s.line()
	if err == nil && line != "accepted" {
		err = fmt.Errorf("the server said %q", line)
	}
	return yesOrNo(early&unix.POLLIN == 0), err
}

func yesOrNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

func (p *Prober) savedSYN() (string, error) {
	s, err := p.dial("saved")
	if err != nil {
		return "", err
	}
	return s.line()
}

// listener makes one of its own.
func (p *Prober) listener(port int, options ...int) (sock, int, error) {
	s, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return s, 0, err
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, o, 1); err != nil {
			return s, 0, err
		}
	}
	if err := errors.Join(unix.Bind(s.fd, &unix.SockaddrInet4{Port: port}), unix.Listen(s.fd, backlog)); err != nil {
		return s, 0, err
	}
	port, err = s.localPort()
	return s, port, err
}

func (s sock) localPort() (int, error) {
	name, err := unix.Getsockname(s.fd)
	if err != nil {
		return 0, err
	}
	four, ok := name.(*unix.SockaddrInet4)
	if !ok {
		return 0, fmt.Errorf("the socket's address is %T", name)
	}
	return four.Port, nil
}

func (p *Prober) reusePort() (string, error) {
	_, port, err := p.listener(0, unix.SO_REUSEPORT)
	if err != nil {
		return "", err
	}
	_, _, err = p.listener(port, unix.SO_REUSEPORT)
	return nameOfError(err)
}

func (p *Prober) wakeAccept() (string, error) {
	s, port, err := p.listener(0)
	if err != nil {
		return "", err
	}
	woken := make(chan error, 1)
	go func() {
		fd, _, err := unix.Accept(s.fd)
		if err == nil {
			unix.Close(fd)
		}
		woken <- err
	}()
	// It may be shut down before it accepts, which makes no difference.
	shut, err := nameOfError(unix.Shutdown(s.fd, unix.SHUT_RDWR))
	if err != nil {
		return "", err
	}
	select {
	case err := <-woken:
		accepted, err := nameOfError(err)
		return fmt.Sprintf("shutdown: %s; accept: %s", shut, accepted), err
	case <-time.After(wakeTime):
	}
	// A connection wakes it.
	c, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return "", err
	}
	if err := c.connect(&unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return "", err
	}
	err = <-woken
	p.opened = p.opened[:len(p.opened)-1] // on this machine nothing is on SMC-R
	c.close()
	return fmt.Sprintf("shutdown: %s; accept: waits", shut), err
}

func (p *Prober) findOwner() (string, error) {
	s, err := p.dial("nothing")
	if err != nil {
		return "", err
	}
	port, err := s.localPort()
	if err != nil {
		return "", err
	}
	out, err := exec.Command("ss", "-Htnp", "sport = :"+strconv.Itoa(port)).Output()
	if err != nil {
		return "", fmt.Errorf("ss: %v", err) //nolint:errorlint // it is no result of a trial
	}
	if !strings.Contains(string(out), "ESTAB") {
		return "", fmt.Errorf("ss does not find the connection: %q", out)
	}
	return yesOrNo(strings.Contains(string(out), "users:")), nil
}
