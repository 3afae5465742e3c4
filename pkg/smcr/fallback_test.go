// SPDX-License-Identifier: Apache-2.0

package smcr

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/smcr/clc"
)

// The application gets every byte of the peer's program, and nothing of a Decline.
func TestFallback_givesTheProgramsBytes(t *testing.T) {
	decline := string(clc.Decline{Version: clc.V1, Reason: clc.ReasonMem}.Append(nil))
	for _, tc := range []struct {
		name       string
		mayCross   bool
		early      string // read during the rendezvous
		then, want string // what the TCP connection carries, and what the application gets
	}{
		{"nothing early", false, "", "abc", "abc"},
		{"bytes early", false, "abc", "def", "abcdef"},
		{"a Decline is data where none can cross", false, "", decline, decline},
		{"a Decline crosses", true, "", decline + "abc", "abc"},
		{"half of a Decline early", true, decline[:10], decline[10:] + "abc", "abc"},
		{"a Decline and bytes early", true, decline + "abc", "def", "abcdef"},
		{"no Decline comes", true, "", "abc", "abc"},
		{"bytes that begin like a Decline", true, decline[:3], "abc", decline[:3] + "abc"},
		{"the stream ends after such a beginning", true, decline[:3], "", decline[:3]},
		{"the stream ends", true, "", "", ""},
	} {
		for how, get := range map[string]func(f *fallback, c *net.TCPConn) ([]byte, error){
			"read": func(f *fallback, c *net.TCPConn) ([]byte, error) {
				return io.ReadAll(readFunc(func(p []byte) (int, error) { return f.read(c, p, false) }))
			},
			"writeTo": func(f *fallback, c *net.TCPConn) ([]byte, error) {
				var b bytes.Buffer
				n, err := f.writeTo(c, &b)
				if err == nil && n != int64(b.Len()) {
					err = errors.New("wrong count")
				}
				return b.Bytes(), err
			},
		} {
			t.Run(how+"/"+tc.name, func(t *testing.T) {
				c := peerSends(t, tc.then)
				f := fallback{early: []byte(tc.early), mayCross: tc.mayCross}
				if over := tc.early == "" && !tc.mayCross; f.isOver() != over {
					t.Errorf("over at the beginning: %t, want %t", !over, over)
				}
				got, err := get(&f, c)
				if err != nil || string(got) != tc.want {
					t.Errorf("got %q, %v, want %q", got, err, tc.want)
				}
				if !f.isOver() {
					t.Errorf("not over at the end: %+v", &f)
				}
			})
		}
	}
}

// What came before the fallback is read as what comes after it: not behind the deadline, nor from a closed
// connection.
func TestFallback_readsAsTCP(t *testing.T) {
	c := peerSends(t, "later")
	f := fallback{early: []byte("early")}
	b := make([]byte, 2)
	if err := c.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if n, err := f.read(c, b, false); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("behind the deadline: %d, %v", n, err)
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if n, err := f.read(c, b, false); err != nil || string(b[:n]) != "ea" {
		t.Errorf("%q, %v", b[:n], err)
	}
	_ = c.Close()
	if n, err := f.read(c, b, false); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed: %d, %v", n, err)
	}
	written := 0
	w := writeFunc(func(p []byte) (int, error) { written++; return len(p), nil })
	if _, err := (&fallback{}).writeEarly(c, w); err != nil || written > 0 {
		t.Errorf("nothing came early: %v, written %d times", err, written)
	}
}

// What came before the fallback stays before what came after it, also if a writer does not take all at once and does not say why.
func TestFallback_shortWriter(t *testing.T) {
	c := peerSends(t, "later")
	f := fallback{early: []byte("early")}
	if n, err := f.writeTo(c, writeFunc(func([]byte) (int, error) { return 3, nil })); n != 3 || !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("%d, %v", n, err)
	}
	b := make([]byte, 9)
	if n, err := f.read(c, b, false); err != nil || string(b[:n]) != "ly" {
		t.Errorf("then %q, %v", b[:n], err)
	}
}

// After a fallback an urgent byte goes on as such, also where it is the first thing that comes, or follows what could
// have become a Decline; and before anything follows it.
func TestFallback_urgentByteFirst(t *testing.T) {
	decline := string(clc.Decline{Version: clc.V1, Reason: clc.ReasonMem}.Append(nil))
	for name, tc := range map[string]struct{ early, before, want string }{
		"first":                       {"", "", ""},
		"behind a Decline":            {"", decline, ""},
		"behind a beginning of one":   {"", decline[:3], decline[:3]},
		"behind one that was early":   {decline[:3], "", decline[:3]},
		"behind ordinary bytes":       {"", "abc", "abc"},
		"behind a Decline and others": {decline[:10], decline[10:] + "abc", "abc"},
	} {
		t.Run(name, func(t *testing.T) {
			peer, tcp := tcpEnds(t)
			w, program := tcpEnds(t)
			if _, err := io.WriteString(peer, tc.before); err != nil {
				t.Fatal(err)
			}
			c := newTCPConn(nil, tcp, Info{}, []byte(tc.early), true)
			ended := make(chan error, 1)
			go func() { _, err := c.RelayTo(w); ended <- err }()
			<-time.After(20 * time.Millisecond) // most often RelayTo waits by then
			sendUrgent(t, peer)
			p := newTCPConn(nil, program, Info{}, nil, false)
			if err := errors.Join(p.SetUrgentInline(true), p.SetReadDeadline(time.Now().Add(10*time.Second))); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(tc.want))
			if _, err := io.ReadFull(p, got); err != nil || string(got) != tc.want {
				t.Errorf("first %q, %v, want %q", got, err, tc.want)
			}
			deadline := time.Now().Add(10 * time.Second)
			for pending := false; !pending && time.Now().Before(deadline); <-time.After(time.Millisecond) { // polls for the urgent byte
				pending, _ = p.UrgentPending()
			}
			at, err := p.AtMark()
			if _, err := io.WriteString(peer, "x"); err != nil {
				t.Fatal(err)
			}
			rest := make([]byte, 2)
			if _, rerr := io.ReadFull(p, rest); !at || errors.Join(err, rerr) != nil || string(rest) != "!x" {
				t.Errorf("then %q, at the mark %t, %v, %v", rest, at, err, rerr)
			}
			_ = peer.Close()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// The mark is behind all bytes that were read before the application reads them, in the rendezvous or in search of a
// Decline, and Read ends there.
func TestFallback_markBehindEarlyBytes(t *testing.T) {
	decline := string(clc.Decline{Version: clc.V1, Reason: clc.ReasonMem}.Append(nil))
	for name, tc := range map[string]struct {
		early, then string
		mayCross    bool
		before      string // what the application gets before the mark
	}{
		"read in the rendezvous":        {"ab", "", false, "ab"},
		"read behind a Decline":         {"", decline + "ab", true, "ab"},
		"read in search of one":         {"", "ab", true, "ab"},
		"read in place of a second":     {decline + "a", "b", true, "ab"},
		"a beginning of a Decline":      {decline[:2], decline[2:4], true, decline[:4]},
		"nothing":                       {"", "", true, ""},
		"a Decline":                     {"", decline, true, ""},
		"a Decline that was early":      {decline, "", true, ""},
		"half of a Decline, and a half": {decline[:10], decline[10:], true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			peer, tcp := tcpEnds(t)
			c := newTCPConn(nil, tcp, Info{}, []byte(tc.early), tc.mayCross)
			if err := errors.Join(c.SetUrgentInline(true), c.SetReadDeadline(time.Now().Add(10*time.Second))); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(peer, tc.then); err != nil {
				t.Fatal(err)
			}
			sendUrgent(t, peer)
			if _, err := io.WriteString(peer, "x"); err != nil {
				t.Fatal(err)
			}
			awaitBytes(t, tcp, len(tc.then)+len("!x"))
			// A deadline that has passed is for Read only.
			if err := c.SetReadDeadline(time.Unix(1, 0)); err != nil {
				t.Fatal(err)
			}
			at, err := c.AtMark()
			if want := tc.before == ""; at != want || err != nil {
				t.Errorf("at the mark %t, %v, want %t", at, err, want)
			}
			if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			var got []byte
			for b := make([]byte, 100); !at && err == nil; at, err = c.AtMark() {
				n, rerr := c.Read(b)
				got, err = append(got, b[:n]...), rerr
				if err != nil {
					break
				}
			}
			if string(got) != tc.before || err != nil {
				t.Errorf("before the mark %q, %v, want %q", got, err, tc.before)
			}
			rest := make([]byte, 2)
			if _, err := io.ReadFull(c, rest); err != nil || string(rest) != "!x" {
				t.Errorf("at the mark %q, %v", rest, err)
			}
		})
	}
}

// awaitBytes waits until a TCP connection, which has urgent bytes in line, can give n bytes.
func awaitBytes(t *testing.T, c *net.TCPConn, n int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	has, deadline := 0, time.Now().Add(10*time.Second)
	for ; has < n && err == nil && time.Now().Before(deadline); <-time.After(time.Millisecond) { // polls for the bytes
		cerr := raw.Control(func(fd uintptr) { has, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
		err = errors.Join(err, cerr)
	}
	if has != n || err != nil {
		t.Fatalf("%d bytes came, %v, want %d", has, err, n)
	}
}

// sendUrgent sends an urgent byte.
func sendUrgent(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if n, err := newSocket(c).WriteUrgent([]byte("!")); n != 1 || err != nil {
		t.Fatalf("sent %d urgent bytes, %v", n, err)
	}
}

type writeFunc func(p []byte) (int, error)

func (f writeFunc) Write(p []byte) (int, error) { return f(p) }

type readFunc func(p []byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// peerSends returns a TCP connection whose peer has sent something and ended its stream.
func peerSends(t *testing.T, s string) *net.TCPConn {
	t.Helper()
	peer, c := tcpEnds(t)
	_, err := io.WriteString(peer, s)
	if err = errors.Join(err, peer.Close()); err != nil {
		t.Fatal(err)
	}
	return c
}
