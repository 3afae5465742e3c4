// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

// wanting is a negotiation that wants so many bytes, and keeps what it gets.
type wanting struct {
	negotiation
	want int
	got  []byte
}

func (w *wanting) Want() int     { return w.want }
func (w *wanting) Partial() bool { return false }
func (w *wanting) HandleData(_ time.Time, b []byte) error {
	w.got = append(w.got, b...)
	return nil
}

// tcpEnds are the two ends of a TCP connection.
func tcpEnds(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr)); err != nil {
		t.Fatal(err)
	}
	if b, err = l.AcceptTCP(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

// Bytes of a message that are there are read without a goroutine, and not more than these. For what is
// missing one waits, and has what was there before, too.
func TestRendezvous_readsWhatIsThere(t *testing.T) {
	a, b := tcpEnds(t)
	m := &wanting{want: 4}
	r := &rendezvous{tcp: b, m: m, reads: make(chan readResult, 1)}
	write := func(s string) {
		t.Helper()
		if _, err := a.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	write("headbod")
	if !r.startRead() || r.reading || string(m.got) != "head" {
		t.Errorf("what is there was not read at once: reading %v, got %q", r.reading, m.got)
	}
	if r.startRead() || !r.reading {
		t.Error("nobody waits for what is missing")
	}
	write("y-data")
	if res := <-r.reads; string(res.b) != "body" || res.err != nil {
		t.Errorf("then came %q, %v", res.b, res.err)
	}
	r.reading, m.want = false, 0
	if r.startRead() || r.reading {
		t.Error("it reads though nothing is wanted")
	}
	rest := make([]byte, 5)
	if _, err := io.ReadFull(b, rest); err != nil || string(rest) != "-data" {
		t.Errorf("the application has %q, %v", rest, err)
	}
	m.want = 4
	_ = a.Close()
	if r.startRead() {
		t.Error("the end was read for a message")
	}
	if res := <-r.reads; len(res.b) != 0 || !errors.Is(res.err, io.EOF) {
		t.Errorf("at the end came %q, %v", res.b, res.err)
	}
}
