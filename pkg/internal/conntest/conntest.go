// SPDX-License-Identifier: Apache-2.0

package conntest

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Scripts are ways to write, read and end a connection.
func Scripts() []string {
	return []string{
		"a.write a.close b.read b.read a.read a.write a.close",
		"a.write a.closewrite a.write b.read b.read b.write a.read b.close a.read a.close",
		"a.closewrite a.closewrite b.read b.read b.closewrite a.read b.close a.close",
		"a.closewrite b.closewrite a.read b.read a.write b.write",
		"a.close b.close a.read b.read b.write",
		"a.close b.read b.closewrite b.close",
		"a.write a.abort b.read b.read b.read b.write",
		"a.abort b.read b.read b.write b.write b.close",
		"a.abort b.write b.write b.read",
		"a.abort b.read0 b.read",
		"a.write b.close a.read a.read",         // unread data: a reset
		"b.write a.write b.close a.read a.read", // and what it sent before the reset
		"b.write a.write b.read b.close a.read a.read a.write a.write",
		"a.write a.close b.write b.read b.read b.write", // the response must not be lost because the request goes on
		"a.write a.close b.write b.write b.read b.read",
		"a.write a.closewrite b.write b.read a.read b.close a.read",
		"a.write b.read3 b.read3 b.read3 b.read0 b.read",
		"a.closewrite b.read0 b.read",
		"a.closewrite b.write b.close a.read a.read",
		"a.closewrite b.write a.close b.read b.write b.write",
	}
}

// Conn is what the scripts need; *net.TCPConn has it, and what else has an Abort.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// aborter is a Conn that is not of TCP.
type aborter interface{ Abort() error }

func abort(c Conn) error {
	switch c := c.(type) {
	case aborter:
		return c.Abort()
	case *net.TCPConn:
		return errors.Join(c.SetLinger(0), c.Close())
	}
	panic(fmt.Sprintf("conntest: %T cannot be aborted", c))
}

// Outcome names what a read or write returned, without the words of its provider.
func Outcome(n int, err error) string {
	for _, e := range []struct {
		err  error
		name string
	}{
		{io.EOF, "EOF"},
		{net.ErrClosed, "closed"},
		{syscall.ECONNRESET, "ECONNRESET"},
		{syscall.EPIPE, "EPIPE"},
		{syscall.ENOTCONN, "ENOTCONN"},
	} {
		if errors.Is(err, e.err) {
			return fmt.Sprintf("%d %s", n, e.name)
		}
	}
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		return fmt.Sprintf("%d timeout", n)
	}
	return fmt.Sprintf("%d %v", n, err)
}

// Check fails a test unless a script says the same over TCP and over something else; each function makes a connection, whose ends Check
// closes. wait is how long a step is given to be heard of by the other side. On a loaded machine that may be too short,
// and then what is said differs by chance: so it is played again with four times of it, three times at most. A difference that
// is one stays.
func Check(t testing.TB, script string, wait time.Duration, tcp, other func() (a, b Conn)) {
	t.Helper()
	if want, got := compare(script, wait, tcp, other); !slices.Equal(want, got) {
		t.Errorf("got  %q,\nwant %q, as over TCP", got, want)
	}
}

// compare plays a script on both until they say the same, four times at most, and returns what they said last.
func compare(script string, wait time.Duration, tcp, other func() (a, b Conn)) (want, got []string) {
	for range 4 {
		want, got = over(tcp, script, wait), over(other, script, wait)
		if slices.Equal(want, got) {
			break
		}
		wait *= 4
	}
	return want, got
}

// over plays a script over a connection of its own.
func over(open func() (a, b Conn), script string, wait time.Duration) []string {
	a, b := open()
	got := play(a, b, script, func() { <-time.After(wait) })
	_, _ = a.Close(), b.Close() // they may be
	return got
}

// play runs a script of steps like "a.write b.read a.close" and returns what
// each said. After every step it waits for the other side to hear of it.
func play(a, b Conn, script string, wait func()) []string {
	var got []string
	gone := map[Conn]bool{}
	for step := range strings.FieldsSeq(script) {
		who, what, _ := strings.Cut(step, ".")
		c := a
		if who == "b" {
			c = b
		}
		buf := make([]byte, 8)
		_ = c.SetDeadline(time.Now().Add(300 * time.Millisecond)) // fails on a closed connection, as the step will
		var n int
		var err error
		switch what {
		case "write":
			n, err = c.Write(buf)
		case "read":
			n, err = c.Read(buf)
		case "read3":
			n, err = c.Read(buf[:3])
		case "read0":
			n, err = c.Read(nil)
		case "close":
			err = c.Close()
		case "closewrite":
			err = c.CloseWrite()
		case "abort":
			err = abort(c)
		default:
			panic("no step " + what)
		}
		if gone[c] {
			// Once it has said that the connection was reset, TCP says EOF,
			// EPIPE and ENOTCONN; we say it again.
			got = append(got, step+": after the reset")
			continue
		}
		got = append(got, step+": "+Outcome(n, err))
		gone[c] = errors.Is(err, syscall.ECONNRESET) && n == 0
		wait()
	}
	return got
}
