// SPDX-License-Identifier: Apache-2.0

package twonodes

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/test/netns/lab"
)

// probe is a small application: it streams requests over one connection and
// notes when the replies arrive. A reply that is not the one that is due ends
// it, so nothing is lost, doubled or changed without notice.
type probe struct {
	conn  *net.TCPConn
	local netip.AddrPort
	began time.Time
	wg    sync.WaitGroup
	done  chan struct{} // closed when the probe ended
	news  chan struct{} // a reply arrived

	mu       sync.Mutex // guards what is below
	arrivals []time.Duration
	err      error // why it ended
}

// startProbe takes over a connection. Times are since began.
func startProbe(conn *net.TCPConn, began time.Time) *probe {
	p := &probe{
		conn: conn, began: began, done: make(chan struct{}), news: make(chan struct{}, 1),
	}
	if a, ok := conn.LocalAddr().(*net.TCPAddr); ok {
		p.local = a.AddrPort()
	}
	p.wg.Go(p.send)
	p.wg.Go(p.receive)
	return p
}

func (p *probe) now() time.Duration { return time.Since(p.began) }

// request fills b with a request; its reply is the same.
func request(b []byte, n uint64) {
	binary.BigEndian.PutUint64(b, n)
	for i := 8; i < len(b); i++ {
		b[i] = byte(n) + byte(i)
	}
}

func (p *probe) send() {
	t := time.NewTicker(probeEvery)
	defer t.Stop()
	b := make([]byte, probeBytes)
	for n := uint64(0); ; n++ {
		select {
		case <-t.C:
		case <-p.done:
			return
		}
		request(b, n)
		if _, err := p.conn.Write(b); err != nil {
			p.end(err)
			return
		}
	}
}

func (p *probe) receive() {
	got, want := make([]byte, probeBytes), make([]byte, probeBytes)
	for n := uint64(0); ; n++ {
		if _, err := io.ReadFull(p.conn, got); err != nil {
			p.end(err)
			return
		}
		request(want, n)
		if !bytes.Equal(got, want) {
			p.end(fmt.Errorf("got reply %d, want reply %d", binary.BigEndian.Uint64(got), n))
			return
		}
		p.mu.Lock()
		p.arrivals = append(p.arrivals, p.now())
		p.mu.Unlock()
		select {
		case p.news <- struct{}{}:
		default:
		}
	}
}

func (p *probe) end(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
		_ = p.conn.Close() // what went wrong is known
		close(p.done)
	}
}

// close ends the probe and waits for its goroutines.
func (p *probe) close() {
	p.end(net.ErrClosed)
	p.wg.Wait()
}

// failed is why the probe ended, if it did.
func (p *probe) failed() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// last is when the last reply arrived.
func (p *probe) last() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.arrivals) == 0 {
		return -1
	}
	return p.arrivals[len(p.arrivals)-1]
}

// await waits for a reply at or after a time, but no longer than until limit,
// and returns when it stopped to wait. The error is the end of the probe.
func (p *probe) await(ctx context.Context, at, limit time.Duration) (time.Duration, error) {
	t := time.NewTimer(limit - p.now())
	defer t.Stop()
	for {
		if last := p.last(); last >= at {
			return last, nil
		}
		select {
		case <-p.news:
		case <-p.done:
			return p.now(), p.failed()
		case <-t.C:
			return p.now(), nil
		case <-ctx.Done():
			return p.now(), context.Cause(ctx)
		}
	}
}

// gap is the longest gap of the probe in a stretch of time.
func (p *probe) gap(from, to time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return longestGap(p.arrivals, from, to)
}

// echo is the probes' server in a pod.
type echo struct {
	listener *net.TCPListener
	wg       sync.WaitGroup

	mu    sync.Mutex // guards conns
	conns map[*net.TCPConn]struct{}
}

func startEcho(ctx context.Context, pod *lab.Pod, port uint16) (*echo, error) {
	l, err := linux.ListenInNS(ctx, pod.NS, nil, netip.AddrPortFrom(pod.Addr4, port))
	if err != nil {
		return nil, err
	}
	e := &echo{listener: l, conns: map[*net.TCPConn]struct{}{}}
	e.wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return // it was closed
			}
			e.mu.Lock()
			e.conns[c] = struct{}{}
			e.mu.Unlock()
			e.wg.Go(func() { e.serve(c) })
		}
	})
	return e, nil
}

func (e *echo) serve(c *net.TCPConn) {
	defer func() {
		_ = c.Close()
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.conns, c)
	}()
	b := make([]byte, 16<<10)
	for {
		n, err := c.Read(b)
		if err == nil {
			_, err = c.Write(b[:n])
		}
		if err != nil {
			return // the probe says what is wrong
		}
	}
}

func (e *echo) close() error {
	err := e.listener.Close()
	e.mu.Lock()
	for c := range e.conns {
		_ = c.Close() // its goroutine may have closed it
	}
	e.mu.Unlock()
	e.wg.Wait()
	return err
}
