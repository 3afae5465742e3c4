// SPDX-License-Identifier: Apache-2.0

package scrape

import (
	"crypto/tls"
	"net"
	"net/netip"
	"slices"
	"sync"
)

// Listener returns a listener with TLS, if config is not nil, and with at most maxConns
// connections, maxSourceConns of them from one source. If a source has its number, a new
// connection closes the source's oldest one. If there are maxConns, a new connection closes
// the oldest one of the source that has the most. So clients that connect and send nothing
// cannot keep others out.
func Listener(ln net.Listener, config *tls.Config) net.Listener {
	ln = &fairListener{Listener: ln, open: map[netip.Prefix][]*fairConn{}}
	if config != nil {
		ln = tls.NewListener(ln, config)
	}
	return ln
}

// fairListener bounds the connections of one source, and of all.
type fairListener struct {
	net.Listener

	mu   sync.Mutex // guards what is below
	open map[netip.Prefix][]*fairConn
	all  int
}

// Accept returns the next connection. If there are too many, it closes another one.
func (l *fairListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	f := &fairConn{Conn: c, listener: l, from: sourceOf(c.RemoteAddr().String())}
	l.mu.Lock()
	gone := l.yields(f.from)
	if gone != nil {
		l.forget(gone)
	}
	l.open[f.from] = append(l.open[f.from], f)
	l.all++
	l.mu.Unlock()
	if gone != nil {
		_ = gone.Conn.Close() // the server's read fails
	}
	return f, nil
}

// yields is the connection to close for a further one of a source, nil if there is room.
// The caller has the lock, here and below.
func (l *fairListener) yields(from netip.Prefix) *fairConn {
	most := l.open[from]
	switch {
	case len(most) >= maxSourceConns:
		return most[0]
	case l.all < maxConns:
		return nil
	}
	for _, conns := range l.open {
		if len(conns) > len(most) {
			most = conns
		}
	}
	return most[0]
}

// forget removes a connection from the list, if it is there.
func (l *fairListener) forget(c *fairConn) {
	i := slices.Index(l.open[c.from], c)
	if i < 0 {
		return
	}
	l.all--
	if l.open[c.from] = slices.Delete(l.open[c.from], i, i+1); len(l.open[c.from]) == 0 {
		delete(l.open, c.from)
	}
}

// fairConn is a connection of a fairListener.
type fairConn struct {
	net.Conn
	listener *fairListener
	from     netip.Prefix
}

// Close closes the connection and removes it from the listener's list.
func (c *fairConn) Close() error {
	c.listener.mu.Lock()
	c.listener.forget(c)
	c.listener.mu.Unlock()
	return c.Conn.Close()
}
