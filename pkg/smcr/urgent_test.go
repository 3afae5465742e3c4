// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// playUrgent runs a script like "a.urgent:xyz b.pending b.read" and returns
// what each step said.
func playUrgent(t *testing.T, a, b *smcr.Conn, script string) []string {
	t.Helper()
	var got []string
	for word := range strings.FieldsSeq(script) {
		step, arg, _ := strings.Cut(word, ":")
		who, what, _ := strings.Cut(step, ".")
		c := map[string]*smcr.Conn{"a": a, "b": b}[who]
		var said any
		var err error
		switch what {
		case "write":
			_, err = c.Write([]byte(arg))
		case "urgent":
			_, err = c.WriteUrgent([]byte(arg))
		case "closewrite":
			err = c.CloseWrite()
		case "read":
			buf := make([]byte, 16)
			var n int
			n, err = c.Read(buf)
			said = string(buf[:n])
		case "readurgent":
			var u byte
			u, err = c.ReadUrgent()
			said = string(u)
		case "atmark":
			said, err = c.AtMark()
		case "ispending":
			said, err = c.UrgentPending()
		case "inline":
			err = c.SetUrgentInline(true)
		case "pending":
			waitFor(t, "urgent data", func() bool {
				ok, err := c.UrgentPending()
				return ok || err != nil
			})
		default:
			t.Fatalf("no step %q", what)
		}
		var errno syscall.Errno
		if errors.As(err, &errno) {
			err = errno
		}
		if said == nil || err != nil {
			said = ""
		}
		got = append(got, strings.TrimSpace(fmt.Sprintf("%s %v %v", word, said, err)))
	}
	return got
}

// RFC 7609 §4.7.5: a program that uses urgent data need not know what carries
// its connection.
func TestSection4_7_5_UrgentLikeTCP(t *testing.T) {
	tcp := newPair(t, func(c *smcr.Config) { c.Option = fakeOption{} })
	big, little := newPair(t), newPair(t, small)
	for _, script := range []string{
		"b.readurgent b.ispending b.atmark a.urgent:x b.pending b.atmark b.readurgent b.ispending b.readurgent b.atmark a.write:y b.read b.atmark",
		"a.urgent:abc b.pending b.read b.atmark b.readurgent a.write:d b.read b.atmark b.readurgent",
		"a.urgent:abc b.pending b.read a.write:d b.read b.ispending b.atmark",
		"b.inline a.urgent:abc b.pending b.readurgent b.read b.atmark b.read b.atmark a.write:d b.read",
		"a.urgent:a b.pending b.readurgent a.urgent:b b.pending b.readurgent a.write:c b.read",
		"a.urgent:ab b.pending a.closewrite b.read b.readurgent b.read",
		"a.urgent:a b.urgent:b a.pending b.pending a.readurgent b.readurgent",
		"a.urgent: b.ispending a.write:x b.read",
	} {
		t.Run(script, func(t *testing.T) {
			a, b := tcp.dial(t)
			want := playUrgent(t, a, b, script)
			_, _ = a.Close(), b.Close()
			for name, p := range map[string]*pair{"SMC-R": big, "SMC-R, small buffers": little} {
				a, b = p.dial(t)
				got := playUrgent(t, a, b, script)
				_, _ = a.Close(), b.Close()
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("-TCP +%s:\n%s", name, d)
				}
			}
		})
	}
}

// RFC 7609 §4.7.6: with the window closed, the reader hears of urgent data
// before it can come.
func TestSection4_7_6_UrgentIsAnnounced(t *testing.T) {
	p := newPair(t, func(c *smcr.Config) { c.RMBESizeBytes, c.SendBufferBytes = 16<<10, 64<<10 })
	a, b := p.dial(t)
	defer func() { _, _ = a.Close(), b.Close() }()
	_ = b.SetReadDeadline(time.Now().Add(10 * time.Second))
	told := b.UrgentNotify()
	const n = 50_000
	data := make([]byte, n)
	data[n-1] = '!'
	if m, err := a.WriteUrgent(data); m != n || err != nil {
		t.Fatalf("wrote %d, %v", m, err)
	}
	<-told
	if pending, err := b.UrgentPending(); !pending || err != nil {
		t.Errorf("pending %t, %v", pending, err)
	}
	if _, err := b.ReadUrgent(); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("urgent byte that cannot have come: %v", err)
	}
	if _, err := io.ReadFull(b, data[:n-1]); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the urgent byte", func() bool { at, _ := b.AtMark(); return at })
	if u, err := b.ReadUrgent(); u != '!' || err != nil {
		t.Errorf("urgent byte %q, %v", u, err)
	}
	<-told // that it is here
}

// TestConn_urgentAfterCloseWrite: an urgent byte that was to be written when CloseWrite came is not announced to the peer, although
// what was written before still waits.
func TestConn_urgentAfterCloseWrite(t *testing.T) {
	const n = 50_000
	a, b := newPair(t, func(c *smcr.Config) { c.RMBESizeBytes, c.SendBufferBytes = 16<<10, 64<<10 }).dial(t)
	told := b.UrgentNotify()
	_, err := a.Write(make([]byte, n))
	if err = errors.Join(err, a.CloseWrite()); err != nil {
		t.Fatal(err)
	}
	if written, err := smcr.WriteUrgentLate(a); written || err != nil {
		t.Errorf("written after the end: %t, %v", written, err)
	}
	if got, err := io.Copy(io.Discard, b); got != n || err != nil {
		t.Errorf("read %d bytes, %v", got, err)
	}
	select {
	case <-told:
		t.Error("the peer heard of urgent data")
	default:
	}
	_, _ = a.Close(), b.Close()
}

// relayEnds returns a connection whose far end b is in the hands of a relay
// to the program at app.
func relayEnds(t *testing.T, p *pair) (a, b *smcr.Conn, near, app *net.TCPConn) {
	t.Helper()
	a, b = p.dial(t)
	x, y := tcpPair(t)
	near, app = x.(*net.TCPConn), y.(*net.TCPConn)
	_ = near.SetLinger(0)
	t.Cleanup(func() { _, _, _, _ = a.Close(), b.Close(), near.Close(), app.Close() })
	return a, b, near, app
}

// A reset ends a relay also while what it carries cannot move.
func TestConn_relaySeesResets(t *testing.T) {
	for _, offered := range []bool{true, false} {
		opt := func(c *smcr.Config) { c.Option = fakeOption{offered: offered}; small(c) }
		for name, run := range map[string]func(t *testing.T, a, b *smcr.Conn, near, app *net.TCPConn, ended chan error){
			"by the peer of a program that does not read": func(t *testing.T, a, b *smcr.Conn, near, _ *net.TCPConn, ended chan error) {
				go func() { _, err := b.RelayTo(near); ended <- err }()
				fillUp(a)
				_ = a.Abort()
			},
			"by a program whose peer does not read": func(t *testing.T, a, b *smcr.Conn, near, app *net.TCPConn, ended chan error) {
				go func() { _, err := b.RelayFrom(near); ended <- err }()
				fillUp(app)
				abort(app)
			},
			"by the peer, after its stream": func(t *testing.T, a, b *smcr.Conn, near, _ *net.TCPConn, ended chan error) {
				_ = a.CloseWrite()
				if n, err := b.RelayTo(near); n != 0 || err != nil {
					t.Errorf("relayed %d, %v", n, err)
				}
				go func() { ended <- b.AwaitEnd() }()
				_ = a.Abort()
			},
			"by a program, after its stream": func(t *testing.T, a, b *smcr.Conn, near, app *net.TCPConn, ended chan error) {
				_ = app.CloseWrite()
				if n, err := b.RelayFrom(near); n != 0 || err != nil {
					t.Errorf("relayed %d, %v", n, err)
				}
				go func() { ended <- smcr.AwaitTCPEnd(near) }()
				abort(app)
			},
		} {
			t.Run(fmt.Sprintf("%s/SMC-R %t", name, offered), func(t *testing.T) {
				a, b, near, app := relayEnds(t, newPair(t, opt))
				ended := make(chan error, 1)
				run(t, a, b, near, app, ended)
				select {
				case err := <-ended:
					if !isReset(err) {
						t.Errorf("ended with %v", err)
					}
				case <-time.After(10 * time.Second):
					t.Error("did not end")
				}
			})
		}
	}
}

// TestConn_relayAnnouncesUrgent: the peer hears of a program's urgent byte also while that waits in the socket.
func TestConn_relayAnnouncesUrgent(t *testing.T) {
	const n = 64 << 10 // more than the buffers of the connection take
	a, b, near, app := relayEnds(t, newPair(t, small))
	ended := make(chan error, 1)
	go func() { _, err := b.RelayFrom(near); ended <- err }()
	if _, err := app.Write(make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	withFD(t, app, func(fd int) {
		if err := unix.Sendto(fd, []byte{'!'}, unix.MSG_OOB, nil); err != nil {
			t.Error(err)
		}
	})
	waitFor(t, "word of the urgent byte", func() bool { ok, _ := a.UrgentPending(); return ok })
	if _, err := a.ReadUrgent(); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("urgent byte that cannot have come: %v", err)
	}
	if _, err := io.ReadFull(a, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the urgent byte", func() bool { at, _ := a.AtMark(); return at })
	if u, err := a.ReadUrgent(); u != '!' || err != nil {
		t.Errorf("urgent byte %q, %v", u, err)
	}
	_ = app.CloseWrite()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// fillUp writes until nothing moves any more.
func fillUp(c net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		_ = c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := c.Write(buf); err != nil {
			return
		}
	}
}

func abort(c *net.TCPConn) { _, _ = c.SetLinger(0), c.Close() }

func TestConn_awaitEnd(t *testing.T) {
	for _, offered := range []bool{true, false} {
		a, b := newPair(t, func(c *smcr.Config) { c.Option = fakeOption{offered: offered} }).dial(t)
		ended := make(chan error, 1)
		_ = a.CloseWrite()
		if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		go func() { ended <- b.AwaitEnd() }()
		if err := b.CloseWrite(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Errorf("SMC-R %t: after both ends: %v", offered, err)
		}
		_, _ = a.Close(), b.Close()
	}
}

// CloseWrite ends a Write that waits, and what that had written arrives.
func TestConn_closeWriteEndsWrite(t *testing.T) {
	for _, offered := range []bool{true, false} {
		a, b := newPair(t, func(c *smcr.Config) { c.Option = fakeOption{offered: offered}; small(c) }).dial(t)
		type result struct {
			n   int
			err error
		}
		wrote := make(chan result, 1)
		go func() {
			n, err := a.Write(make([]byte, 64<<20))
			wrote <- result{n, err}
		}()
		// Both buffers are full when the reader has some and no more comes.
		waitFor(t, "data", func() bool { n, _ := b.Read(make([]byte, 1)); return n == 1 })
		if err := a.CloseWrite(); err != nil {
			t.Error(err)
		}
		r := <-wrote
		if !errors.Is(r.err, syscall.EPIPE) {
			t.Errorf("SMC-R %t: write ended with %v", offered, r.err)
		}
		if n, err := io.Copy(io.Discard, b); err != nil || n+1 != int64(r.n) {
			t.Errorf("SMC-R %t: %d bytes arrived of %d, %v", offered, n+1, r.n, err)
		}
		_, _ = a.Close(), b.Close()
	}
}

// A relay allocates nothing for a message.
func TestConn_relayAllocatesNothing(t *testing.T) {
	for _, offered := range []bool{true, false} {
		p := newPair(t, func(c *smcr.Config) { c.Option = fakeOption{offered: offered} })
		if offered {
			p = newSoftPair(t, rdma.MTU1024) // the fake device does allocate
		}
		a, b, near, app := relayEnds(t, p)
		x, y := tcpPair(t)
		done := make(chan struct{}, 2)
		go func() { _, _ = b.RelayTo(near); done <- struct{}{} }()
		go func() { _, _ = a.RelayFrom(y.(*net.TCPConn)); done <- struct{}{} }()
		buf := make([]byte, 100)
		round := func() {
			if _, err := x.Write(buf); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(app, buf); err != nil {
				t.Fatal(err)
			}
		}
		for range 200 {
			round()
		}
		if n := testing.AllocsPerRun(2000, round); n > 0.05 {
			t.Errorf("SMC-R %t: %v allocations per message", offered, n)
		}
		_, _ = x.Close(), y.Close()
		<-done
		_, _ = a.Close(), near.Close()
		_ = b.Close()
		<-done
	}
}

// A relay whose bytes cannot move does not keep its sockets from being closed.
func TestConn_relayCloseWhileStalled(t *testing.T) {
	for _, offered := range []bool{true, false} {
		_, b, near, app := relayEnds(t, newPair(t, func(c *smcr.Config) { c.Option = fakeOption{offered: offered}; small(c) }))
		ended, closed := make(chan error, 1), make(chan error, 1)
		go func() { _, err := b.RelayFrom(near); ended <- err }()
		fillUp(app)
		go func() { closed <- errors.Join(near.Close(), b.Abort()) }()
		for name, c := range map[string]chan error{"close": closed, "relay": ended} {
			select {
			case <-c:
			case <-time.After(10 * time.Second):
				t.Fatalf("SMC-R %t: %s hangs", offered, name)
			}
		}
	}
}
