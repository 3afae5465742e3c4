// SPDX-License-Identifier: Apache-2.0

package streamfault

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"
)

// Damage is what is done to a connection.
type Damage uint8

// Kinds of damage.
const (
	Whole Damage = iota // none
	Flip                // one bit is turned
	Cut                 // one direction ends early, in order as TCP sees it
	Reset               // the connection is reset, for both ends
)

func (d Damage) String() string {
	names := [...]string{"whole", "flip", "cut", "reset"}
	if int(d) < len(names) {
		return names[d]
	}
	return fmt.Sprintf("Damage(%d)", uint8(d))
}

// Faults say what the proxy does to each connection. The zero value hands everything on.
type Faults struct {
	Piece int           // the longest piece that is written at a time, in bytes; every fourth has one byte; 0: as they come
	Stall time.Duration // the longest pause behind a piece; one in sixteen has one
	// Damage happens once, in the direction that Back says: in one of Within bytes behind the
	// first From.
	Damage       Damage
	Back         bool // towards who dialed
	From, Within int
}

// readBytes is what is read at a time.
const readBytes = 64 << 10

// Proxy is a listener whose connections are handed on.
type Proxy struct {
	seed   uint64
	to     string
	faults Faults
	l      *net.TCPListener
	wg     sync.WaitGroup

	mu     sync.Mutex // guards what follows
	conns  []*net.TCPConn
	closed bool
}

// Listen makes a proxy at an address. It ends with the test, which logs the seed if it fails.
func Listen(t testing.TB, seed uint64, at, to string, f Faults) *Proxy {
	t.Helper()
	a, err := net.ResolveTCPAddr("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenTCP("tcp", a)
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{seed: seed, to: to, faults: f, l: l}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		p.close()
		if t.Failed() {
			t.Logf("stream faults: seed %d, %+v", seed, f)
		}
	})
	return p
}

// Addr is where to connect to.
func (p *Proxy) Addr() string { return p.l.Addr().String() }

func (p *Proxy) close() {
	_ = p.l.Close()
	p.mu.Lock()
	p.closed = true
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// keep has the connection closed with the proxy. It reports false if that is past.
func (p *Proxy) keep(c *net.TCPConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = c.Close()
		return false
	}
	p.conns = append(p.conns, c)
	return true
}

func (p *Proxy) accept() {
	for n := uint64(0); ; n++ {
		c, err := p.l.AcceptTCP()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(c, n) })
	}
}

// serve hands the connection of a number on.
func (p *Proxy) serve(client *net.TCPConn, n uint64) {
	if !p.keep(client) {
		return
	}
	c, err := net.Dial("tcp", p.to)
	if err != nil {
		_ = client.Close() // the client sees that nobody is there
		return
	}
	server, ok := c.(*net.TCPConn)
	if !ok || !p.keep(server) {
		_ = c.Close()
		return
	}
	there, back := p.direction(client, server, 2*n), p.direction(server, client, 2*n+1)
	if p.faults.Damage != Whole {
		f := there
		if p.faults.Back {
			f = back
		}
		f.damage, f.left = p.faults.Damage, p.faults.From
		if p.faults.Within > 0 {
			f.left += f.rng.IntN(p.faults.Within)
		}
	}
	p.wg.Go(back.run)
	there.run()
}

// direction is one direction of a connection.
type direction struct {
	from, to *net.TCPConn
	faults   Faults
	rng      *rand.Rand
	damage   Damage // yet to be done
	left     int    // bytes before it
}

func (p *Proxy) direction(from, to *net.TCPConn, stream uint64) *direction {
	return &direction{from: from, to: to, faults: p.faults, rng: rand.New(rand.NewPCG(p.seed, stream))}
}

// errDamaged ends a direction.
var errDamaged = errors.New("the stream is damaged")

// run hands bytes on until the stream ends. What comes behind a cut is dropped.
func (f *direction) run() {
	buf := make([]byte, readBytes)
	for {
		n, err := f.from.Read(buf)
		if n > 0 {
			if f.hand(buf[:n]) != nil {
				_, _ = io.Copy(io.Discard, f.from)
				return
			}
		}
		if err != nil {
			_ = f.to.CloseWrite() // after a reset there is nothing to be ended
			return
		}
	}
}

// hand hands bytes on in pieces.
func (f *direction) hand(b []byte) error {
	for len(b) > 0 {
		n := len(b)
		if most := f.faults.Piece; most > 0 {
			k := 1
			if f.rng.IntN(4) > 0 {
				k += f.rng.IntN(most)
			}
			n = min(n, k)
		}
		if f.damage != Whole && f.left < n {
			n = f.left // the piece ends before the byte
			if err := f.write(b[:n]); err != nil {
				return err
			}
			b = b[n:]
			if err := f.harm(b); err != nil {
				return err
			}
			continue
		}
		if err := f.write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
		if f.faults.Stall > 0 && f.rng.IntN(16) == 0 {
			time.Sleep(time.Duration(f.rng.Int64N(int64(f.faults.Stall))))
		}
	}
	return nil
}

func (f *direction) write(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	f.left -= len(b)
	_, err := f.to.Write(b)
	return err
}

// harm does the damage, before the byte b begins with or to it. An error says that nothing more is
// handed on.
func (f *direction) harm(b []byte) error {
	d := f.damage
	f.damage = Whole
	switch d {
	case Flip:
		b[0] ^= 1 << f.rng.IntN(8)
		return nil
	case Cut:
		_ = f.to.CloseWrite()
	case Reset:
		for _, c := range []*net.TCPConn{f.from, f.to} {
			_ = c.SetLinger(0)
			_ = c.Close()
		}
	case Whole:
	}
	return errDamaged
}
