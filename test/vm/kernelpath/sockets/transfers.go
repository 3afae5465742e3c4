// SPDX-License-Identifier: Apache-2.0

package sockets

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Sizes of what is transferred: more than a buffer, and more than a pipe's first page.
const (
	manyBytes = 1_000_000
	someBytes = 5_000
)

// transfers are trials of how bytes are sent and received.
func transfers() []trial {
	return []trial{
		{"MSG_PEEK, then MSG_WAITALL", "", (*Prober).peek},
		{"MSG_TRUNC discards bytes", "", (*Prober).truncate},
		{"MSG_DONTWAIT with nothing there", "", (*Prober).dontWait},
		{"SO_RCVTIMEO: recv with nothing there", "", (*Prober).receiveTimesOut},
		{"SO_RCVLOWAT: poll waits for more bytes", "programs that set it get an event for fewer bytes", (*Prober).lowWater},
		{"urgent data: event, SIOCATMARK, MSG_OOB, then the rest", "protocols that look for the mark, as telnet and rlogin", (*Prober).urgent},
		{"MSG_ZEROCOPY", "programs that do not look whether they may", (*Prober).zeroCopy},
		{"MSG_ERRQUEUE with nothing there", "programs that look for timestamps of what they sent", (*Prober).errorQueue},
		{"mmap, for TCP_ZEROCOPY_RECEIVE", "programs that receive so", (*Prober).mapSocket},
		{"sendfile", "", (*Prober).sendFile},
		{"splice from one connection into another", "", (*Prober).splice},
		{"SO_TIMESTAMPNS: recvmsg gives the time", "programs that measure delays so", func(p *Prober) (string, error) { return p.ancillary(unix.SOL_SOCKET, unix.SO_TIMESTAMPNS) }},
		{"TCP_INQ: recvmsg gives the bytes that are left", "programs that read as much as there is", func(p *Prober) (string, error) { return p.ancillary(unix.IPPROTO_TCP, unix.TCP_INQ) }},
		{"TCP_INFO counts the bytes of the connection", "monitoring by TCP_INFO, ss -i and eBPF: it sees the handshake", (*Prober).counted},
		{"SIOCOUTQ when the peer has read everything", "", func(p *Prober) (string, error) { return p.outQueue(unix.SIOCOUTQ) }},
		{"epoll, edge triggered, of what comes", "", (*Prober).edgeIn},
		{"epoll, edge triggered, of room to send", "", (*Prober).edgeOut},
		{"SCM_RIGHTS", "", (*Prober).passed},
	}
}

// told has the server send bytes, and waits for them.
func (p *Prober) told(n int) (sock, error) {
	s, err := p.dial(fmt.Sprintf("say %d", n))
	if err != nil {
		return s, err
	}
	return s, s.arrived(n)
}

func (p *Prober) peek() (string, error) {
	s, err := p.told(6)
	if err != nil {
		return "", err
	}
	first, second := make([]byte, 3), make([]byte, 6)
	n, _, err := unix.Recvfrom(s.fd, first, unix.MSG_PEEK)
	if err != nil {
		return "", err
	}
	m, _, err := unix.Recvfrom(s.fd, second, unix.MSG_WAITALL)
	return quoted(first[:n], second[:m]), err
}

func (p *Prober) truncate() (string, error) {
	s, err := p.told(6)
	if err != nil {
		return "", err
	}
	discarded := make([]byte, 4)
	n, _, err := unix.Recvfrom(s.fd, discarded, unix.MSG_TRUNC)
	if err != nil {
		return "", err
	}
	rest, err := s.read(2)
	return fmt.Sprintf("%d bytes, copied: %s; then %s", n, yesOrNo(!isZero(discarded)), quoted(rest)), err
}

func (p *Prober) dontWait() (string, error) {
	s, err := p.dial("say 0")
	if err != nil {
		return "", err
	}
	_, _, err = unix.Recvfrom(s.fd, make([]byte, 1), unix.MSG_DONTWAIT)
	return nameOfError(err)
}

func (p *Prober) receiveTimesOut() (string, error) {
	s, err := p.dial("say 0")
	if err != nil {
		return "", err
	}
	tv := unix.NsecToTimeval(timeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return "", err
	}
	_, err = unix.Read(s.fd, make([]byte, 1))
	return nameOfError(err)
}

func (p *Prober) lowWater() (string, error) {
	s, err := p.dial("say 4")
	if err != nil {
		return "", err
	}
	if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, 10); err != nil {
		return "", err
	}
	if err := s.arrived(4); err != nil {
		return "", err
	}
	events, err := s.poll(unix.POLLIN, 0)
	return yesOrNo(events == 0), err
}

func (p *Prober) urgent() (string, error) {
	s, err := p.dial("urgent")
	if err != nil {
		return "", err
	}
	events, err := s.poll(unix.POLLPRI, patience)
	if err != nil {
		return "", err
	}
	before := make([]byte, 10)
	n, err := unix.Read(s.fd, before)
	if err != nil {
		return "", err
	}
	mark, err := s.queued(unix.SIOCATMARK)
	if err != nil {
		return "", err
	}
	byteOf := make([]byte, 1)
	if _, _, err := unix.Recvfrom(s.fd, byteOf, unix.MSG_OOB); err != nil {
		return "", err
	}
	after, err := s.read(2)
	return fmt.Sprintf("%s; %s, mark %d, %s, %s", eventNames(events), quoted(before[:n]), mark, quoted(byteOf), quoted(after)), err
}

func (p *Prober) zeroCopy() (string, error) {
	s, err := p.dial("echo 4")
	if err != nil {
		return "", err
	}
	if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1); err != nil {
		return "", err
	}
	if _, err := unix.SendmsgN(s.fd, []byte("abcd"), nil, nil, unix.MSG_ZEROCOPY); err != nil {
		return "", err
	}
	b, err := s.read(4)
	return quoted(b), err
}

func (p *Prober) errorQueue() (string, error) {
	s, err := p.dial("say 0")
	if err != nil {
		return "", err
	}
	_, _, _, _, err = unix.Recvmsg(s.fd, make([]byte, 1), make([]byte, 64), unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	return nameOfError(err)
}

func (p *Prober) mapSocket() (string, error) {
	s, err := p.dial("say 0")
	if err != nil {
		return "", err
	}
	m, err := unix.Mmap(s.fd, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return "", err
	}
	return "ok", unix.Munmap(m)
}

func (p *Prober) sendFile() (_ string, err error) {
	f, err := os.CreateTemp("", "sockprobe")
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	if err := os.Remove(f.Name()); err != nil {
		return "", err
	}
	if _, err := f.Write(make([]byte, manyBytes)); err != nil {
		return "", err
	}
	s, err := p.dial("sink")
	if err != nil {
		return "", err
	}
	var offset int64
	for offset < manyBytes {
		if _, err := unix.Sendfile(s.fd, int(f.Fd()), &offset, manyBytes-int(offset)); err != nil {
			return "", err
		}
	}
	return s.sunk()
}

// sunk ends what is sent, and says how much the server got.
func (s sock) sunk() (string, error) {
	if err := unix.Shutdown(s.fd, unix.SHUT_WR); err != nil {
		return "", err
	}
	count, err := s.line()
	return count + " bytes", err
}

func (p *Prober) splice() (string, error) {
	from, err := p.told(someBytes)
	if err != nil {
		return "", err
	}
	to, err := p.dial("sink")
	if err != nil {
		return "", err
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return "", err
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	for _, way := range [][2]int{{from.fd, pipe[1]}, {pipe[0], to.fd}} {
		for left := int64(someBytes); left > 0; {
			n, err := unix.Splice(way[0], nil, way[1], nil, int(left), 0)
			if err != nil {
				return "", err
			}
			if n == 0 {
				return "", fmt.Errorf("the stream ended, and %d bytes are missing", left)
			}
			left -= n
		}
	}
	return to.sunk()
}

// ancillaryTries is how often ancillary tries: the kernel begins to stamp packets a while after it was asked to.
const ancillaryTries = 5

// ancillary tells whether what an option asks for comes with the data.
func (p *Prober) ancillary(level, option int) (string, error) {
	for range ancillaryTries {
		s, err := p.connected()
		if err != nil {
			return "", err
		}
		if err := unix.SetsockoptInt(s.fd, level, option, 1); err != nil {
			return "", err
		}
		if err := s.say("say 4"); err != nil {
			return "", err
		}
		control := make([]byte, 128)
		_, n, _, _, err := unix.Recvmsg(s.fd, make([]byte, 4), control, 0)
		if err != nil || n > 0 {
			return yesOrNo(n > 0), err
		}
		time.Sleep(timeout)
	}
	return yesOrNo(false), nil
}

func (p *Prober) counted() (string, error) {
	s, err := p.dial(fmt.Sprintf("echo %d", someBytes))
	if err != nil {
		return "", err
	}
	if err := s.write(bytes.Repeat([]byte{'x'}, someBytes)); err != nil {
		return "", err
	}
	if _, err := s.read(someBytes); err != nil {
		return "", err
	}
	info, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return "", err
	}
	return yesOrNo(info.Bytes_received >= someBytes), nil
}

func (p *Prober) outQueue(request uint) (string, error) {
	s, err := p.dial("echo 4")
	if err != nil {
		return "", err
	}
	if err := s.write([]byte("abcd")); err != nil {
		return "", err
	}
	if _, err := s.read(4); err != nil {
		return "", err
	}
	n, err := s.awaitQueued(request, 0)
	return fmt.Sprint(n), err
}

// epoll watches a socket, which does not block from then on.
func (s sock) epoll(events uint32) (int, error) {
	if err := unix.SetNonblock(s.fd, true); err != nil {
		return 0, err
	}
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return 0, err
	}
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, s.fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(s.fd)}); err != nil {
		unix.Close(ep)
		return 0, err
	}
	return ep, nil
}

// edge waits for the next event.
func edge(ep int) error {
	for {
		n, err := unix.EpollWait(ep, make([]unix.EpollEvent, 1), int(patience.Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
		case err == nil && n == 0:
			return unix.ETIMEDOUT
		default:
			return err
		}
	}
}

func (p *Prober) edgeIn() (string, error) {
	s, err := p.dial(fmt.Sprintf("say %d", someBytes))
	if err != nil {
		return "", err
	}
	ep, err := s.epoll(unix.EPOLLIN)
	if err != nil {
		return "", err
	}
	defer unix.Close(ep)
	b := make([]byte, someBytes)
	for got := 0; got < someBytes; {
		if err := edge(ep); err != nil {
			return "", err
		}
		for {
			n, err := unix.Read(s.fd, b)
			if errors.Is(err, unix.EAGAIN) {
				break
			}
			if err != nil || n == 0 {
				return "", fmt.Errorf("after %d bytes: %w", got, err)
			}
			got += n
		}
	}
	return "works", nil
}

func (p *Prober) edgeOut() (string, error) {
	s, err := p.dial("hold")
	if err != nil {
		return "", err
	}
	ep, err := s.epoll(unix.EPOLLOUT)
	if err != nil {
		return "", err
	}
	defer unix.Close(ep)
	b := make([]byte, 64<<10)
	for released := false; ; { // fill it, and after the release once more
		if err := edge(ep); err != nil {
			return "", err
		}
		if released {
			return "works", nil
		}
		for err = nil; err == nil; {
			_, err = unix.Write(s.fd, b)
		}
		if !errors.Is(err, unix.EAGAIN) {
			return "", err
		}
		if _, err := p.dial("release"); err != nil {
			return "", err
		}
		released = true
	}
}

// passed gives a connection to another socket's reader, and uses what comes out.
func (p *Prober) passed() (string, error) {
	s, err := p.dial("echo 3")
	if err != nil {
		return "", err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(s.fd), nil, 0); err != nil {
		return "", err
	}
	control := make([]byte, unix.CmsgSpace(4))
	if _, _, _, _, err := unix.Recvmsg(pair[1], make([]byte, 1), control, unix.MSG_CMSG_CLOEXEC); err != nil {
		return "", err
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(messages) != 1 {
		return "", fmt.Errorf("%d messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return "", fmt.Errorf("%d descriptors: %w", len(fds), err)
	}
	other := sock{fd: fds[0]}
	defer other.close()
	if err := other.write([]byte("abc")); err != nil {
		return "", err
	}
	b, err := other.read(3)
	return quoted(b), err
}
