// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// protocolSMC is the protocol of a socket of TCP's families that is SMC's.
const protocolSMC = 256

// A Row is what came of a trial.
type Row struct {
	Name   string `json:"name"`
	Result string `json:"result"`
}

// A trial is something that programs do with sockets.
type trial struct {
	name string
	// matters says to which programs, or why.
	matters string
	// try returns what came of it. An error of the system is a result, too.
	try func(*Prober) (string, error)
}

// A Prober tries what programs do, with a server of [Serve].
type Prober struct {
	// Server is where the server listens, for IPv4. Six is its address for IPv6; without one what needs it
	// is left out.
	Server netip.AddrPort
	Six    netip.Addr
	// Want is the protocol that connections of the server's port are to have: unix.IPPROTO_TCP, also of sockets
	// of SMC that fall back, or 256. A connection with another one is a defect of the set-up.
	Want int

	opened  []sock               // by the trial that runs
	plain   bool                 // it has a connection that fell back
	options map[string][2]string // see connectedOptions
}

// Run tries everything.
func (p *Prober) Run() ([]Row, error) {
	var rows []Row
	for _, t := range trials() {
		result, err := t.try(p)
		p.close()
		var errno unix.Errno
		switch {
		case errors.As(err, &errno):
			result = nameOf(errno)
		case errors.Is(err, errNotHere):
			continue
		case err != nil:
			return nil, fmt.Errorf("%s: %w", t.name, err)
		}
		if p.plain && p.Want == protocolSMC {
			result += ", on plain TCP"
		}
		rows = append(rows, Row{t.name, result})
	}
	return rows, nil
}

// errNotHere means that a trial cannot be made with this server.
var errNotHere = errors.New("needs another server")

// trials are all that is tried, in the order of the table.
func trials() (all []trial) {
	for _, o := range options() {
		all = append(all, trial{o.name, o.matters, o.try})
	}
	all = append(all, connects()...)
	all = append(all, transfers()...)
	return append(all, ends()...)
}

// matters is why a trial is made.
func matters(name string) string {
	for _, t := range trials() {
		if t.name == name {
			return t.matters
		}
	}
	return ""
}

// close closes what a trial opened, and notes what became of it.
func (p *Prober) close() {
	p.plain = false
	for _, s := range p.opened {
		if s.smc && s.protocol() == unix.IPPROTO_TCP {
			p.plain = true
		}
		s.close()
	}
	p.opened = nil
}

// open makes a socket, which is closed after the trial.
func (p *Prober) open(family, flags int) (sock, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|flags, 0)
	if err != nil {
		return sock{}, err
	}
	s := sock{fd: fd}
	s.smc = s.protocol() == protocolSMC
	p.opened = append(p.opened, s)
	return s, nil
}

// connected connects to the server, which waits for a command.
func (p *Prober) connected() (sock, error) {
	s, err := p.open(unix.AF_INET, 0)
	if err != nil {
		return s, err
	}
	if err := s.connect(p.address(0)); err != nil {
		return s, fmt.Errorf("connect to the server: %v", err) //nolint:errorlint // it is no result of a trial
	}
	if got := s.protocol(); got != p.Want {
		return s, fmt.Errorf("a connection has protocol %d, want %d", got, p.Want)
	}
	return s, nil
}

// dial connects to the server, and tells it what it is to do.
func (p *Prober) dial(command string) (sock, error) {
	s, err := p.connected()
	if err != nil {
		return s, err
	}
	if err := s.say(command); err != nil {
		return s, fmt.Errorf("tell the server: %v", err) //nolint:errorlint // likewise
	}
	return s, nil
}

// address is one of the server's.
func (p *Prober) address(offset int) unix.Sockaddr {
	return &unix.SockaddrInet4{Port: int(p.Server.Port()) + offset, Addr: p.Server.Addr().As4()}
}

// nameOf is how programs call an error.
func nameOf(err unix.Errno) string {
	if err == unix.EAGAIN {
		return "EAGAIN" // which has two names
	}
	return unix.ErrnoName(err)
}

// nameOfError is nameOf, or "ok".
func nameOfError(err error) (string, error) {
	var errno unix.Errno
	switch {
	case err == nil:
		return "ok", nil
	case errors.As(err, &errno):
		return nameOf(errno), nil
	}
	return "", err
}
