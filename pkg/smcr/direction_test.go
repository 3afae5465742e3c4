// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

// lone is a call of one direction, between a connection and a program at app.
type lone struct {
	t         *testing.T
	a, b      *smcr.Conn // b is relayed
	near, app *net.TCPConn
	d         *smcr.Direction
	ended     chan error
}

func (l *lone) then(_ int64, err error) { l.ended <- err }
func (l *lone) over(err error)          { l.ended <- err }

// wantParked wants that something has happened and has not woken the direction.
func (l *lone) wantParked() {
	l.t.Helper()
	if s := smcr.StateOf(l.d); s != "parked" {
		l.t.Errorf("the direction is %s", s)
	}
}

// wantRead wants these bytes next.
func (l *lone) wantRead(from io.Reader, want string) {
	l.t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(from, got); err != nil || string(got) != want {
		l.t.Errorf("read %q, %v, want %q", got, err, want)
	}
}

// sendOOB sends an urgent byte over TCP.
func (l *lone) sendOOB(c *net.TCPConn, b byte) {
	l.t.Helper()
	withFD(l.t, c, func(fd int) {
		if err := unix.Sendto(fd, []byte{b}, unix.MSG_OOB, nil); err != nil {
			l.t.Error(err)
		}
	})
}

// wantOOB waits for an urgent byte over TCP.
func (l *lone) wantOOB(c *net.TCPConn, want byte) {
	l.t.Helper()
	waitFor(l.t, "the urgent byte", func() bool {
		var b [1]byte
		n := 0
		withFD(l.t, c, func(fd int) { n, _, _ = unix.Recvfrom(fd, b[:], unix.MSG_OOB|unix.MSG_DONTWAIT) })
		return n == 1 && b[0] == want
	})
}

// withFD does something with the descriptor of a socket.
func withFD(tb testing.TB, c *net.TCPConn, f func(fd int)) {
	tb.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
	if err != nil {
		tb.Error(err)
	}
}

// write writes to one end.
func (l *lone) write(to io.Writer, s string) {
	l.t.Helper()
	if _, err := to.Write([]byte(s)); err != nil {
		l.t.Error(err)
	}
}

// parkedEvent is something that happens to a parked call.
type parkedEvent struct {
	name string
	do   func(l *lone)
	want error // of the call; errStays: it goes on
	only string
}

// errStays stands for a call that has not ended.
var errStays = errors.New("the call goes on")

// What happens to a call while it is parked has the effect that it has while a goroutine waits.
func TestDirection_eventsWhileParked(t *testing.T) {
	const onSMCR, onTCP = "SMC-R", "TCP"
	for call, tt := range map[string]struct {
		start  func(l *lone)
		events []parkedEvent
	}{
		"RelayFrom": {func(l *lone) { l.b.StartRelayFrom(l.d, l.near, l.then) }, []parkedEvent{
			{"bytes", func(l *lone) { l.write(l.app, "hello"); l.wantRead(l.a, "hello") }, errStays, ""},
			{"the program's end", func(l *lone) { _ = l.app.CloseWrite() }, nil, ""},
			{"the last bytes and the end", func(l *lone) { l.write(l.app, "bye"); _ = l.app.Close(); l.wantRead(l.a, "bye") }, nil, ""},
			{"the program's reset", func(l *lone) { abort(l.app) }, syscall.ECONNRESET, ""},
			{"urgent data", func(l *lone) {
				l.sendOOB(l.app, '!')
				waitFor(l.t, "the urgent byte", func() bool { u, err := l.a.ReadUrgent(); return u == '!' && err == nil })
			}, errStays, onSMCR},
			{"the socket is closed", func(l *lone) { _ = l.near.Close(); l.d.Wake() }, net.ErrClosed, ""},
			{"a reset, and then the socket is closed", func(l *lone) {
				_ = l.a.Abort()
				if _, err := l.b.Read(make([]byte, 1)); !isReset(err) {
					l.t.Errorf("read: %v", err)
				}
				_ = l.near.Close()
				l.d.Wake()
			}, net.ErrClosed, onSMCR},
			{"a wake for nothing", func(l *lone) { l.d.Wake(); l.write(l.app, "hello"); l.wantRead(l.a, "hello") }, errStays, ""},
			{"the device looks for an answer", func(l *lone) {
				l.write(l.app, "hello")
				waitFor(l.t, "the answer", func() bool { smcr.LookForAnswer(l.b); return l.b.Info().BytesSent == 5 })
				l.wantRead(l.a, "hello")
			}, errStays, onSMCR},
		}},
		"RelayTo": {func(l *lone) { l.b.StartRelayTo(l.d, l.near, l.then) }, []parkedEvent{
			{"few bytes, for which nobody is woken", func(l *lone) { l.write(l.a, "hello"); l.wantRead(l.app, "hello"); l.wantParked() }, errStays, onSMCR},
			{"few bytes", func(l *lone) { l.write(l.a, "hello"); l.wantRead(l.app, "hello") }, errStays, onTCP},
			{"many bytes", func(l *lone) {
				want := make([]byte, 300_000)
				_, _ = randomReader(1).Read(want)
				go func() { _, _ = l.a.Write(want) }()
				l.wantRead(l.app, string(want))
			}, errStays, ""},
			{"urgent data", func(l *lone) {
				if _, err := l.a.WriteUrgent([]byte("u!")); err != nil {
					l.t.Error(err)
				}
				l.wantRead(l.app, "u")
				l.wantOOB(l.app, '!')
			}, errStays, ""},
			{"the peer's end", func(l *lone) { _ = l.a.CloseWrite() }, nil, ""},
			{"the last bytes and the end", func(l *lone) { l.write(l.a, "bye"); _ = l.a.CloseWrite(); l.wantRead(l.app, "bye") }, nil, ""},
			{"the peer's reset", func(l *lone) { _ = l.a.Abort() }, syscall.ECONNRESET, ""},
			{"the peer's process dies", func(l *lone) { smcr.BreakTCP(l.a) }, syscall.ECONNRESET, ""},
			{"we reset", func(l *lone) { _ = l.b.Abort(); l.d.Wake() }, net.ErrClosed, ""},
			{"we close", func(l *lone) { _ = l.b.Close(); l.d.Wake() }, net.ErrClosed, ""},
			{"the program has gone", func(l *lone) {
				abort(l.app)
				go func() { _, _ = l.a.Write(make([]byte, 300_000)) }()
			}, syscall.ECONNRESET, ""},
			{"a wake for nothing", func(l *lone) { l.d.Wake(); l.write(l.a, "hello"); l.wantRead(l.app, "hello") }, errStays, ""},
		}},
		"AwaitEnd": {func(l *lone) {
			_ = l.a.CloseWrite()
			if n, err := l.b.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
				l.t.Errorf("read %d, %v", n, err)
			}
			l.b.StartAwaitEnd(l.d, l.over)
		}, []parkedEvent{
			{"our end", func(l *lone) { _ = l.b.CloseWrite() }, nil, ""},
			{"the peer's reset", func(l *lone) { _ = l.a.Abort() }, syscall.ECONNRESET, ""},
			{"we reset", func(l *lone) { _ = l.b.Abort(); l.d.Wake() }, net.ErrClosed, ""},
			{"a wake for nothing", func(l *lone) { l.d.Wake() }, errStays, ""},
		}},
		"AwaitTCPEnd": {func(l *lone) {
			_ = l.app.CloseWrite()
			smcr.StartAwaitTCPEnd(l.d, l.near, l.over)
		}, []parkedEvent{
			{"our end", func(l *lone) { _ = l.near.CloseWrite() }, nil, ""},
			{"the program's reset", func(l *lone) { abort(l.app) }, syscall.ECONNRESET, ""},
			{"the socket is closed", func(l *lone) { _ = l.near.Close(); l.d.Wake() }, net.ErrClosed, ""},
			{"a wake for nothing", func(l *lone) { l.d.Wake() }, errStays, ""},
		}},
	} {
		for _, e := range tt.events {
			for _, mode := range []string{onSMCR, onTCP} {
				if e.only != "" && e.only != mode {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%s", call, e.name, mode), func(t *testing.T) {
					eventWhileParked(t, mode == onSMCR, tt.start, e)
				})
			}
		}
	}
}

func eventWhileParked(t *testing.T, offered bool, start func(*lone), e parkedEvent) {
	l := &lone{t: t, ended: make(chan error, 1)}
	l.a, l.b, l.near, l.app = relayEnds(t, newPair(t, func(c *smcr.Config) { c.Option = fakeOption{offered: offered} }))
	parker := newParker(t, time.Hour)
	l.d = parker.NewDirection()
	start(l)
	park := func() {
		waitFor(t, "parking", func() bool {
			smcr.Look(parker)
			return smcr.StateOf(l.d) == "parked"
		})
	}
	park()
	e.do(l)
	if errors.Is(e.want, errStays) {
		park()
		_, _ = l.near.Close(), l.b.Abort()
		l.d.Wake()
		<-l.ended
		return
	}
	select {
	case err := <-l.ended:
		if !errors.Is(err, e.want) && (!errors.Is(e.want, syscall.ECONNRESET) || !isReset(err)) {
			t.Errorf("ended with %v, want %v", err, e.want)
		}
	case <-time.After(10 * time.Second):
		buf := make([]byte, 1<<16)
		t.Fatalf("did not end; the direction is %s\n%s", smcr.StateOf(l.d), buf[:runtime.Stack(buf, true)])
	}
	if s := smcr.StateOf(l.d); s != "idle" {
		t.Errorf("after the end the direction is %s", s)
	}
}

// Bytes that come at the very moment of parking arrive, all of them and in order, in both
// directions, and so does the end.
func TestDirection_eventsAgainstParking(t *testing.T) {
	for _, offered := range []bool{true, false} {
		t.Run(fmt.Sprintf("SMC-R %t", offered), func(t *testing.T) {
			p := newSoftPair(t, rdma.MTU1024, small, func(c *smcr.Config) { c.Option = fakeOption{offered: offered} })
			a, b := p.dial(t)
			parker := newParker(t, 20*time.Microsecond)
			x, y := relay(t, parker, a), relay(t, parker, b)
			ds := []*smcr.Direction{x.out, x.in, y.out, y.in}
			const rounds = 300
			seed := testenv.Seed(t)
			rng := rand.New(rand.NewPCG(seed, 0))
			parks := 0
			for i := range rounds {
				// A moment of the way to being parked, of one direction or another.
				d, moment := ds[rng.IntN(len(ds))], []string{"running", "asked", "parking", "parked"}[rng.IntN(4)]
				for range 2000 {
					if smcr.StateOf(d) == moment {
						break
					}
					runtime.Gosched()
				}
				if smcr.StateOf(d) == "parked" {
					parks++
				}
				from, to := x.program, y.program
				if rng.IntN(2) == 0 {
					from, to = to, from
				}
				sent := make([]byte, []int{1, 100, 20_000}[rng.IntN(3)])
				for j := range sent {
					sent[j] = byte(i + j)
				}
				got := make([]byte, len(sent))
				_ = to.SetReadDeadline(time.Now().Add(20 * time.Second))
				if _, err := from.Write(sent); err != nil {
					t.Fatalf("round %d: %v", i, err)
				}
				if _, err := io.ReadFull(to, got); err != nil || !bytes.Equal(got, sent) {
					t.Fatalf("round %d: other bytes arrived, %v; the directions are %s, %s, %s, %s", i, err,
						smcr.StateOf(x.out), smcr.StateOf(x.in), smcr.StateOf(y.out), smcr.StateOf(y.in))
				}
			}
			if parks == 0 {
				t.Error("nothing was ever parked")
			}
		})
	}
}

// A reset that comes at the very moment of parking ends the call.
func TestDirection_resetAgainstParking(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024, small)
	parker := newParker(t, 20*time.Microsecond)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 30 {
		a, b := p.dial(t)
		x, y := relay(t, parker, a), relay(t, parker, b)
		for range rng.IntN(2000) {
			runtime.Gosched()
		}
		var d *relayed
		if i%2 == 0 {
			abort(x.program) // ends RelayFrom there
			d = x
		} else {
			_ = a.Abort() // ends RelayTo here
			d = y
		}
		select {
		case err := <-d.ended:
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("round %d: ended with %v", i, err)
			}
			d.ended <- err // for the end of the test
		case <-time.After(10 * time.Second):
			t.Fatalf("round %d: did not end; the directions are %s and %s", i, smcr.StateOf(d.out), smcr.StateOf(d.in))
		}
	}
}

// One direction makes one call after the other.
func TestDirection_calls(t *testing.T) {
	_, b, near, app := relayEnds(t, newPair(t))
	d := newParker(t, time.Millisecond).NewDirection()
	first, second := make(chan error, 1), make(chan error, 1)
	b.StartRelayFrom(d, near, func(_ int64, err error) {
		smcr.StartAwaitTCPEnd(d, near, func(err error) { second <- err })
		first <- err
	})
	parked(t, d)
	_ = app.CloseWrite()
	if err := <-first; err != nil {
		t.Errorf("the first call ended with %v", err)
	}
	parked(t, d)
	abort(app)
	if err := <-second; !isReset(err) {
		t.Errorf("the second call ended with %v", err)
	}
	_ = b.Abort()
	third := make(chan error, 1)
	b.StartRelayTo(d, near, func(_ int64, err error) { third <- err })
	if err := <-third; !errors.Is(err, net.ErrClosed) {
		t.Errorf("the third call ended with %v", err)
	}
	if s := smcr.StateOf(d); s != "idle" {
		t.Errorf("then the direction is %s", s)
	}
}

// A send buffer from which everything has arrived has no pages while its direction is parked, on
// a device that does not pin them.
func TestDirection_parkedHasNoSendBuffer(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024)
	a, b := p.dial(t)
	parker := newParker(t, time.Hour)
	x, y := relay(t, parker, a), relay(t, parker, b)
	// A page that was given back is zero.
	empty := func() bool { return len(bytes.Trim(smcr.SendBuffer(a), "\x00")) == 0 }
	for _, size := range []int{1, 100_000, 3} {
		sent := bytes.Repeat([]byte{byte(size)}, size)
		if _, err := x.program.Write(sent); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, size)
		if _, err := io.ReadFull(y.program, got); err != nil || !bytes.Equal(got, sent) {
			t.Fatalf("other bytes arrived, %v", err)
		}
		if empty() {
			t.Error("the bytes were not in the buffer")
		}
		waitFor(t, "delivery", func() bool { return smcr.Delivered(a) })
		waitFor(t, "empty pages", func() bool {
			smcr.Look(parker)
			return smcr.StateOf(x.out) == "parked" && empty()
		})
	}
}

// A wait that is over costs a relay that is a direction's call no allocation.
func TestDirection_allocatesNothing(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024)
	a, b := p.dial(t)
	parker := newParker(t, time.Hour)
	x, y := relay(t, parker, a), relay(t, parker, b)
	buf := make([]byte, 100)
	round := func() {
		for _, way := range [][2]*relayed{{x, y}, {y, x}} {
			if _, err := way[0].program.Write(buf); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(way[1].program, buf); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 200 {
		round()
	}
	if n := testing.AllocsPerRun(2000, round); n > 0.05 {
		t.Errorf("%v allocations per round trip", n)
	}
}

// A RelayTo for which nothing has arrived begins without a goroutine; one for which something has,
// or that has ended, runs.
func TestDirection_beginsParked(t *testing.T) {
	p := newSoftPair(t, rdma.MTU1024)
	d := newParker(t, time.Hour).NewDirection()
	ended := make(chan error, 1)
	begin := func() *lone {
		t.Helper()
		l := &lone{t: t, d: d}
		l.a, l.b, l.near, l.app = relayEnds(t, p)
		return l
	}
	start := func(l *lone) { l.b.StartRelayTo(d, l.near, func(_ int64, err error) { ended <- err }) }
	wantEnd := func(what string, want error) {
		t.Helper()
		if err := <-ended; !errors.Is(err, want) {
			t.Errorf("%s: the call ends with %v", what, err)
		}
	}

	l := begin()
	start(l)
	l.wantParked()
	l.write(l.a, "hello")
	l.wantRead(l.app, "hello")
	l.wantParked()
	if err := l.a.CloseWrite(); err != nil {
		t.Error(err)
	}
	wantEnd("the peer's end", nil)

	l = begin()
	l.write(l.a, "hello")
	waitFor(t, "the bytes", func() bool { return smcr.Delivered(l.a) })
	start(l)
	l.wantRead(l.app, "hello")
	_ = l.a.Abort()
	wantEnd("a reset", syscall.ECONNRESET)

	l = begin()
	_ = l.b.Close()
	start(l)
	wantEnd("the connection is closed", net.ErrClosed)
}
