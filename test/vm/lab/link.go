// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/test/vm/lab/wire"
)

// A link is a talk with the program of a guest over one of its ports.
type link struct {
	guest *Guest
	conn  net.Conn
	lock  *os.File // of the port, so that no two programs use it
	done  sync.WaitGroup
	quit  chan struct{} // closed with the link

	writing sync.Mutex // held while a message is written

	mu      sync.Mutex
	streams map[uint32]*Process
	last    uint32
	heard   time.Time // when the guest last said anything, or had nothing to say
	ended   error
}

// lockPort takes a port if nobody has it.
func (g *Guest) lockPort(n int) (*os.File, error) {
	f, err := os.OpenFile(g.portSocket(n)+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("take port %d: %w", n, err), f.Close())
	}
	return f, nil
}

// connectPort greets the guest at a port and waits for its answer. While it boots
// there is nobody to answer, and QEMU may throw away what is said: so it is said
// again.
func (g *Guest) connectPort(ctx context.Context, n int, lock *os.File) (*link, error) {
	for patience := greetTimeout; ; patience = min(2*patience, maxGreetTimeout) {
		conn, r, err := greet(ctx, g.portSocket(n), patience)
		if err == nil {
			return g.connectedBy(conn, r, lock)
		}
		if failed := g.failure(); failed != nil {
			return nil, errors.Join(failed, lock.Close())
		}
		if paused := pause(ctx); paused != nil {
			return nil, errors.Join(
				fmt.Errorf("%s: wait for it to take commands: %w (last: %w)\n%s", g.Name(), paused, err, g.console.excerpt()), lock.Close(),
			)
		}
	}
}

// greet opens a port and waits a moment for the answer to a greeting.
func greet(ctx context.Context, socket string, patience time.Duration) (_ net.Conn, _ *bufio.Reader, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, nil, err
	}
	nonce := make([]byte, wire.NonceBytes)
	_, _ = rand.Read(nonce) // never fails
	if _, err := conn.Write(wire.Message{Kind: wire.Hello, Payload: nonce}.Append(nil)); err != nil {
		return nil, nil, err
	}
	r := bufio.NewReaderSize(conn, wire.MaxPayload)
	if err := wire.AwaitHello(r, nonce); err != nil {
		return nil, nil, err
	}
	return conn, r, conn.SetDeadline(time.Time{})
}

// connectedBy makes the connection the guest's link.
func (g *Guest) connectedBy(conn net.Conn, r *bufio.Reader, lock *os.File) (*link, error) {
	l := &link{guest: g, conn: conn, lock: lock, quit: make(chan struct{}), streams: map[uint32]*Process{}, heard: time.Now()}
	g.mu.Lock()
	failed := g.failed
	if failed == nil {
		g.link = l
	}
	g.mu.Unlock()
	if failed != nil {
		return nil, errors.Join(failed, conn.Close(), lock.Close())
	}
	l.done.Go(func() { l.read(r) })
	l.done.Go(l.ping)
	return l, nil
}

// read hands out what the guest says.
func (l *link) read(r *bufio.Reader) {
	for {
		m, err := wire.Read(r)
		if err != nil {
			l.end(fmt.Errorf("%s: read its port: %w", l.guest.Name(), err))
			return
		}
		l.mu.Lock()
		l.heard = time.Now()
		p := l.streams[m.Stream]
		if m.Kind == wire.Exit {
			delete(l.streams, m.Stream)
		}
		l.mu.Unlock()
		if p != nil {
			p.handle(m)
		}
	}
}

// ping finds out that the guest hangs, while something runs there.
func (l *link) ping() {
	ticker := time.NewTicker(pingInterval)
	defer ticker.Stop()
	for {
		select {
		case <-l.quit:
			return
		case now := <-ticker.C:
			l.mu.Lock()
			if len(l.streams) == 0 {
				l.heard = now
			}
			silent, idle := now.Sub(l.heard), len(l.streams) == 0
			l.mu.Unlock()
			switch {
			case silent > time.Duration(l.guest.lab.hungAfter.Load()):
				// By fail, which closes the link, as its own goroutine: close waits for this one.
				go l.guest.fail(fmt.Errorf("%s: %w for %.0fs\n%s", l.guest.Name(), ErrUnresponsive, silent.Seconds(), l.guest.console.excerpt()))
				return
			case !idle:
				// Not by this goroutine, which is to notice when nobody takes it.
				go l.send(wire.Ping, 0, nil)
			}
		}
	}
}

// send sends a message. An error of it is one of the link, which read has too.
func (l *link) send(kind wire.Kind, stream uint32, payload []byte) {
	l.writing.Lock()
	defer l.writing.Unlock()
	_, _ = l.conn.Write(wire.Message{Kind: kind, Stream: stream, Payload: payload}.Append(nil))
}

// end ends all that runs with that error.
func (l *link) end(err error) {
	l.mu.Lock()
	if l.ended == nil {
		l.ended = err
	}
	streams := l.streams
	l.streams = map[uint32]*Process{}
	l.mu.Unlock()
	for _, p := range streams {
		p.end(err)
	}
}

func (l *link) close(err error) {
	l.end(err)
	close(l.quit)
	_ = l.conn.Close()
	l.done.Wait()
	_ = l.lock.Close()
}

// open starts a command.
func (l *link) open(p *Process, c wire.Command) error {
	payload, err := json.Marshal(c)
	if err == nil && len(payload) > wire.MaxPayload {
		err = fmt.Errorf("it has %d bytes, the most is %d: write a file to Share", len(payload), wire.MaxPayload)
	}
	if err != nil {
		return err
	}
	l.mu.Lock()
	if err := l.ended; err != nil {
		l.mu.Unlock()
		return err
	}
	if len(l.streams) == 0 {
		l.heard = time.Now()
	}
	l.last++
	p.link, p.stream = l, l.last
	l.streams[p.stream] = p
	l.mu.Unlock()
	l.send(wire.Start, p.stream, payload)
	return nil
}

// pause waits a moment, less when ctx ends.
func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pollInterval):
		return nil
	}
}
