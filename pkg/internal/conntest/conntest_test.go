// SPDX-License-Identifier: Apache-2.0

package conntest

import (
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// openTCP makes a connection on the loopback.
func openTCP(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if a, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr)); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// unended is a connection whose peer does not hear of the end of the stream.
type unended struct{ *net.TCPConn }

func (unended) CloseWrite() error { return nil }

// TestCompare: TCP is like TCP, in what every step of a script says, and what is not like it is found, however often it is played.
func TestCompare(t *testing.T) {
	const script = "a.closewrite b.read0 b.read"
	tcp := func() (Conn, Conn) { return openTCP(t) }
	want, got := compare(script, 5*time.Millisecond, tcp, tcp)
	if !slices.Equal(want, got) || len(want) != len(strings.Fields(script)) {
		t.Errorf("TCP says %q, and then %q", want, got)
	}
	want, got = compare(script, 5*time.Millisecond, tcp, func() (Conn, Conn) {
		a, b := openTCP(t)
		return unended{a}, b
	})
	if slices.Equal(want, got) {
		t.Errorf("a stream that does not end says what one does that ends: %q", got)
	}
}
