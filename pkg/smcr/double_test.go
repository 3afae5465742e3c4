// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// The test doubles at the other end of a TCP connection, or in the middle of one.

// serveOnce is a hand-made server: it accepts one connection, reads the Proposal, and
// talks. The connection comes out of served when talk has returned.
func serveOnce(t *testing.T, at string, talk func(t *testing.T, c net.Conn)) (addr string, served <-chan net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	done := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			close(done)
			return
		}
		t.Cleanup(func() { _ = c.Close() })
		defer func() { done <- c }()
		readMessage(t, c)
		talk(t, c)
	}()
	return l.Addr().String(), done
}

// proxy is between clients and a server, and keeps what both say.
type proxy struct {
	addr   string
	server string
	edits  []func(msg []byte)

	mu   sync.Mutex // guards said
	said [2][]byte  // by the clients, by the server
}

// newProxy opens a proxy. Each edit gets a CLC message of the client's, the first one the
// Proposal, before that goes on to the server: it may change the message, or wait.
func newProxy(t *testing.T, server string, edits ...func(msg []byte)) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{addr: l.Addr().String(), server: server, edits: edits}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", server)
			if err != nil {
				t.Error(err)
				_ = c.Close()
				return
			}
			wg.Go(func() { p.pass(1, s, c) })
			wg.Go(func() {
				p.passEdited(t, c, s)
				p.pass(0, c, s)
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return p
}

// passEdited passes on the client's messages for which there is an edit.
func (p *proxy) passEdited(t *testing.T, from, to net.Conn) {
	for _, edit := range p.edits {
		msg := readMessage(t, from)
		_ = from.SetReadDeadline(time.Time{})
		edit(msg)
		_ = p.put(0, to, msg) // a server that has gone is noticed by the next one
	}
}

// pass passes everything on until one side ends.
func (p *proxy) pass(who int, from, to net.Conn) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		if werr := p.put(who, to, buf[:n]); err != nil || werr != nil {
			_ = to.Close()
			return
		}
	}
}

func (p *proxy) put(who int, to io.Writer, b []byte) error {
	p.mu.Lock()
	p.said[who] = append(p.said[who], b...)
	p.mu.Unlock()
	_, err := to.Write(b)
	return err
}

// take returns the CLC messages since the last call: Proposal, Accept, Confirm.
func (p *proxy) take(t *testing.T) (out [3][]byte) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, who := range [3]int{0, 1, 0} {
		b := p.said[who]
		if len(b) < clc.HeaderLen {
			t.Fatalf("message %d is missing", i)
		}
		h, err := clc.ParseHeader([clc.HeaderLen]byte(b))
		if err != nil || len(b) < h.Length {
			t.Fatalf("message %d: %d bytes: %v", i, len(b), err)
		}
		out[i], p.said[who] = b[:h.Length], b[h.Length:]
	}
	if len(p.said[0])+len(p.said[1]) > 0 {
		t.Errorf("bytes after the last CLC message: %x, %x", p.said[0], p.said[1])
	}
	return out
}

// withoutPeerID takes the peer ID out of a Proposal, as Linux does with those of version 2
// only.
func withoutPeerID(msg []byte) { clear(msg[clc.HeaderLen : clc.HeaderLen+8]) }

// unchanged passes a message on.
func unchanged([]byte) {}
