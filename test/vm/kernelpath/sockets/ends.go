// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// ends are trials of how connections end.
func ends() []trial {
	return []trial{
		{"the peer closes: events, recv", "", (*Prober).closedByPeer},
		{"the peer closes: send, later", "programs that tell by EPIPE, or are ended by SIGPIPE: they get another error", (*Prober).sendAfterClose},
		{"half close", "", (*Prober).halfClose},
		{"shutdown of both directions: recv, send", "", (*Prober).shutBoth},
		{"the peer closes with SO_LINGER 0: recv", "protocols that tell a cut answer by the reset", func(p *Prober) (string, error) { return p.ended("reset") }},
		{"the peer closes with unread data: recv", "protocols that tell a cut answer by the reset", func(p *Prober) (string, error) { return p.ended("unread") }},
	}
}

func (p *Prober) closedByPeer() (string, error) {
	s, err := p.dial("nothing")
	if err != nil {
		return "", err
	}
	if err := s.say("close"); err != nil { // ends what the server waits for
		return "", err
	}
	var events int16
	for end := time.Now().Add(patience); events&unix.POLLRDHUP == 0; {
		if events, err = s.poll(unix.POLLIN|unix.POLLRDHUP, time.Until(end)); err != nil {
			return "", err
		}
		if time.Now().After(end) {
			break
		}
	}
	received, err := s.received()
	return eventNames(events) + "; " + received, err
}

// received is what recv says at the end of a connection.
func (s sock) received() (string, error) {
	n, err := unix.Read(s.fd, make([]byte, 1))
	switch {
	case err != nil:
		return nameOfError(err)
	case n > 0:
		return "data", nil
	}
	return "end of stream", nil
}

// sendUntilError sends until that fails, as it does when the peer's answer to what was sent first is there.
func (s sock) sendUntilError() (string, error) {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(pollEvery) {
		if _, err := unix.SendmsgN(s.fd, []byte("x"), nil, nil, unix.MSG_NOSIGNAL); err != nil {
			return nameOfError(err)
		}
	}
	return "ok", nil
}

func (p *Prober) sendAfterClose() (string, error) {
	s, err := p.dial("nothing")
	if err != nil {
		return "", err
	}
	if err := s.say("close"); err != nil {
		return "", err
	}
	if _, err := s.all(); err != nil {
		return "", err
	}
	return s.sendUntilError()
}

func (p *Prober) halfClose() (string, error) {
	s, err := p.dial("sink")
	if err != nil {
		return "", err
	}
	if err := s.write(make([]byte, manyBytes)); err != nil {
		return "", err
	}
	return s.sunk()
}

func (p *Prober) shutBoth() (string, error) {
	s, err := p.dial("say 0")
	if err != nil {
		return "", err
	}
	if err := unix.Shutdown(s.fd, unix.SHUT_RDWR); err != nil {
		return "", err
	}
	received, err := s.received()
	if err != nil {
		return "", err
	}
	_, err = unix.SendmsgN(s.fd, []byte("x"), nil, nil, unix.MSG_NOSIGNAL)
	sent, err := nameOfError(err)
	return fmt.Sprintf("%s, %s", received, sent), err
}

// ended has the server end a connection in a way of its own.
func (p *Prober) ended(how string) (string, error) {
	s, err := p.dial(how)
	if err != nil {
		return "", err
	}
	if err := s.say("unread"); err != nil {
		return "", err
	}
	return s.received()
}
