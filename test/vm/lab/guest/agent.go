// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// serve serves all ports and returns with the first error.
func serve() error {
	errs := make(chan error)
	p := &programs{from: hostBin, to: copies}
	for n := range wire.Ports {
		device, err := findPort(wire.PortName(n))
		if err != nil {
			return err
		}
		go func() { errs <- servePort(device, p) }()
	}
	return <-errs
}

// findPort waits for the device of a port: the kernel hears of the ports from
// the host, after the boot has begun.
func findPort(name string) (string, error) {
	const wait, interval = 2 * time.Minute, 5 * time.Millisecond
	for deadline := time.Now().Add(wait); time.Now().Before(deadline); time.Sleep(interval) {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return "", err
		}
		for _, file := range names {
			text, err := os.ReadFile(file)
			if err == nil && strings.TrimSpace(string(text)) == name {
				return filepath.Join("/dev", filepath.Base(filepath.Dir(file))), nil
			}
		}
	}
	return "", fmt.Errorf("find the serial port %s: it is not there after %v", name, wait)
}

// servePort serves one program of the host after another.
func servePort(device string, all *programs) error {
	for {
		f, err := openPort(device)
		if err != nil {
			return err
		}
		if err := awaitHost(f); err != nil {
			return errors.Join(err, f.Close())
		}
		p := &port{file: f, programs: all, commands: map[uint32]*command{}}
		p.serve()
		p.killAll()
		// With this the kernel forgets what the host has not read.
		if err := f.Close(); err != nil {
			return err
		}
	}
}

// openPort opens a port, which only one can have open: a process that another port's command
// is about to become has what was open when it was forked until it executes its program.
func openPort(device string) (*os.File, error) {
	const wait, interval = 2 * time.Minute, 5 * time.Millisecond
	for deadline := time.Now().Add(wait); ; time.Sleep(interval) {
		f, err := os.OpenFile(device, os.O_RDWR, 0)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return f, err
		}
	}
}

// awaitHost returns when the host has opened its end. A port that it has not
// opened always reads as ended, and becomes writable with it.
func awaitHost(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		_, failed = unix.Poll(poll, 0)
		return failed != nil && !errors.Is(failed, unix.EINTR) || poll[0].Revents&unix.POLLHUP == 0 && poll[0].Revents&unix.POLLOUT != 0
	})
	return errors.Join(err, failed)
}

// A port is a talk with one program of the host.
type port struct {
	file     *os.File
	programs *programs

	writing sync.Mutex // held while a message is written

	mu       sync.Mutex
	commands map[uint32]*command
}

// serve handles messages until the host closes the port, or says what is no
// message.
func (p *port) serve() {
	r := bufio.NewReaderSize(p.file, wire.MaxPayload)
	for {
		m, err := wire.Read(r)
		if err != nil {
			return
		}
		if !p.handle(m) {
			return
		}
	}
}

func (p *port) handle(m wire.Message) bool {
	switch m.Kind {
	case wire.Hello:
		return p.send(wire.Hello, 0, m.Payload)
	case wire.Ping:
		return p.send(wire.Pong, m.Stream, nil)
	case wire.Start:
		p.start(m.Stream, m.Payload)
		return true
	default: // for a command
	}
	p.mu.Lock()
	c := p.commands[m.Stream]
	p.mu.Unlock()
	switch {
	case c == nil && m.Kind == wire.Stdin:
		return p.send(wire.StdinTaken, m.Stream, nil) // by nobody: it has ended
	case c != nil:
		c.handle(m)
	}
	return true
}

// send reports whether the host was there to be sent to.
func (p *port) send(kind wire.Kind, stream uint32, payload []byte) bool {
	p.writing.Lock()
	defer p.writing.Unlock()
	_, err := p.file.Write(wire.Message{Kind: kind, Stream: stream, Payload: payload}.Append(nil))
	return err == nil
}

func (p *port) killAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.commands {
		c.kill()
	}
}

func (p *port) remove(stream uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.commands, stream)
}
