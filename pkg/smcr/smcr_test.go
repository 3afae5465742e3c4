// SPDX-License-Identifier: Apache-2.0

package smcr_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"

	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/smcr"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is two stacks on one fabric, and a listener on the second.
type pair struct {
	fabric         *fakeFabric
	client, server *smcr.Stack
	l              *smcr.Listener
	dialTo         string     // in place of l's address, if something is between
	dialFrom       netip.Addr // of the client's TCP connections, if it matters
}

func newPair(tb testing.TB, edit ...func(*smcr.Config)) *pair {
	tb.Helper()
	f := newFakeFabric()
	p := &pair{fabric: f}
	p.client = newStack(tb, f.device("c", 1), edit...)
	p.server = newStack(tb, f.device("s", 2), edit...)
	p.listen(tb)
	return p
}

// listen opens the pair's listener.
func (p *pair) listen(tb testing.TB) {
	tb.Helper()
	l, err := smcr.Listen(tb.Context(), p.server, "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	p.l = l
	tb.Cleanup(func() {
		if err := l.Close(); err != nil {
			tb.Error(err)
		}
	})
}

func newStack(tb testing.TB, d rdma.Device, edit ...func(*smcr.Config)) *smcr.Stack {
	tb.Helper()
	cfg := smcr.Config{Devices: []rdma.Device{d}, Option: smcr.BothSpeak{}, Hooks: smcr.Hooks{
		Malformed: func(where string, err error) { tb.Logf("malformed: %s: %v", where, err) },
		Failed:    func(what string, err error) { tb.Logf("%s: %v", what, err) },
	}}
	for _, e := range edit {
		e(&cfg)
	}
	s, err := smcr.NewStack(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
		if st := s.Stats(); st.MemoryBytes != 0 || st.Groups != 0 || st.Conns != 0 {
			tb.Errorf("closed stack still has %+v", st)
		}
	})
	return s
}

// versions sets the versions that a stack may use.
func versions(v smcr.VersionSet) func(*smcr.Config) {
	return func(c *smcr.Config) { c.Versions = v }
}

// eachVersion runs a test with each version of the protocol.
func eachVersion(t *testing.T, test func(t *testing.T, v smcr.VersionSet)) {
	for _, v := range []struct {
		name string
		set  smcr.VersionSet
	}{{"v1", smcr.VersionsV1}, {"v2", smcr.VersionsV2}} {
		t.Run(v.name, func(t *testing.T) { test(t, v.set) })
	}
}

// dial opens a connection and returns both ends.
func (p *pair) dial(tb testing.TB) (client, server *smcr.Conn) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), 20*time.Second)
	defer cancel()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := p.l.Accept()
		if err != nil {
			tb.Error(err)
		}
		accepted <- c
	}()
	d := smcr.Dialer{Stack: p.client}
	if p.dialFrom.IsValid() {
		d.Dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.dialFrom, 0))
	}
	c, err := d.DialContext(ctx, "tcp", cmp.Or(p.dialTo, p.l.Addr().String()))
	if err != nil {
		tb.Fatal(err)
	}
	s := <-accepted
	if s == nil {
		tb.FailNow()
	}
	return c.(*smcr.Conn), s.(*smcr.Conn)
}

func TestConn_netTest(t *testing.T) {
	for _, tc := range []struct {
		name     string
		offered  bool
		versions smcr.VersionSet
		want     smcr.Mode
	}{
		{"version 1", true, smcr.VersionsV1, smcr.ModeSMCR},
		{"version 2", true, smcr.VersionsV2, smcr.ModeSMCR},
		{"fallback", false, smcr.VersionsBoth, smcr.ModeTCP},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t, versions(tc.versions), func(c *smcr.Config) { c.Option = fakeOption{offered: tc.offered} })
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				a, b := p.dial(t)
				if a.Mode() != tc.want || b.Mode() != tc.want {
					return nil, nil, nil, errors.New("wrong mode")
				}
				return a, b, func() { _ = a.Close(); _ = b.Close() }, nil
			})
		})
	}
}

func TestConn_streamsBothWays(t *testing.T) {
	for _, size := range []int{16 << 10, 64 << 10, 512 << 10} {
		p := newPair(t, func(c *smcr.Config) { c.RMBESizeBytes = size })
		a, b := p.dial(t)
		var wg sync.WaitGroup
		send := func(c *smcr.Conn, seed uint64) {
			src := io.LimitReader(randomReader(seed), 3<<20)
			if n, err := c.ReadFrom(src); err != nil || n != 3<<20 {
				t.Errorf("sent %d: %v", n, err)
			}
			if err := c.CloseWrite(); err != nil {
				t.Error(err)
			}
		}
		receive := func(c *smcr.Conn, seed uint64) {
			var got bytes.Buffer
			if _, err := c.WriteTo(&got); err != nil {
				t.Error(err)
			}
			want, _ := io.ReadAll(io.LimitReader(randomReader(seed), 3<<20))
			if !bytes.Equal(got.Bytes(), want) {
				t.Errorf("size %d: stream differs, %d bytes", size, got.Len())
			}
		}
		wg.Go(func() { send(a, 1) })
		wg.Go(func() { send(b, 2) })
		wg.Go(func() { receive(a, 2) })
		wg.Go(func() { receive(b, 1) })
		wg.Wait()
		for _, c := range []*smcr.Conn{a, b} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func randomReader(seed uint64) io.Reader {
	return rand.NewChaCha8([32]byte{byte(seed)})
}

func TestStack_reusesGroup(t *testing.T) {
	p := newPair(t)
	var conns []*smcr.Conn
	for i := range 20 {
		a, b := p.dial(t)
		conns = append(conns, a, b)
		if a.Info().FirstContact != (i == 0) || a.Info().GroupID != conns[0].Info().GroupID {
			t.Errorf("connection %d: %+v", i, a.Info())
		}
		if _, err := a.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		var buf [8]byte
		if n, err := b.Read(buf[:]); err != nil || string(buf[:n]) != "hello" {
			t.Fatalf("read %q, %v", buf[:n], err)
		}
	}
	if g := p.client.LinkGroups(); len(g) != 1 || g[0].Conns != 20 || g[0].State != "ACTIVE" {
		t.Errorf("groups: %+v", g)
	}
	for _, c := range conns {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	waitFor(t, "connections gone", func() bool { return p.client.Stats().Conns == 0 && p.server.Stats().Conns == 0 })
}

func waitFor(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if now := <-tick.C; now.After(deadline) {
			tb.Fatalf("%s: not within 10 s", what)
		}
	}
}

func TestConn_abortIsReset(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	if err := a.Abort(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) || errors.Is(err, smcr.ErrLinkGroupLost) {
		t.Errorf("read after the peer's abort: %v", err)
	}
	_ = b.Close()
}

// TestConn_abortAfterWrite: what was written before an abort goes out before the reset, also if nobody had the turn to send it
// until then.
func TestConn_abortAfterWrite(t *testing.T) {
	for name, edit := range map[string]func(*smcr.Config){
		"at once":   func(*smcr.Config) {},
		"coalesced": func(c *smcr.Config) { c.Coalesce = smcr.Coalesce{Bytes: 4096, Delay: 200 * time.Millisecond} },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, edit)
			a, b := p.dial(t)
			release := smcr.HoldTurn(p.client)
			_, err := a.Write([]byte("last words"))
			release()
			if err = errors.Join(err, a.Abort()); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(b)
			if string(got) != "last words" || !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read %q, %v after the peer's abort", got, err)
			}
			_ = b.Close()
		})
	}
}

// TestConn_abortBehindOthers: what was written before an abort goes out before the reset, also if it waits because of what is under
// way: for company, or to fill datagrams.
func TestConn_abortBehindOthers(t *testing.T) {
	for _, tc := range []struct {
		name        string
		sends, size int
	}{{"many messages", 12, 1}, {"much data", 3, 64 << 10}} {
		t.Run(tc.name, func(t *testing.T) {
			p := newPair(t)
			a, b := p.dial(t)
			p.fabric.hold(true)
			for i := range tc.sends {
				if _, err := a.Write(make([]byte, tc.size)); err != nil {
					t.Fatal(err)
				}
				waitFor(t, "a message of it", func() bool { return a.Info().CDCSent == uint64(i+1) })
			}
			_, err := a.Write([]byte("last words"))
			if err = errors.Join(err, a.Abort()); err != nil {
				t.Fatal(err)
			}
			p.fabric.hold(false)
			got, err := io.ReadAll(b)
			if want := tc.sends*tc.size + len("last words"); len(got) != want || !bytes.HasSuffix(got, []byte("last words")) || !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read %d bytes of %d, %v after the peer's abort", len(got), want, err)
			}
			_ = b.Close()
		})
	}
}

func TestConn_closeWithUnreadDataIsReset(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	if _, err := a.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "data there", func() bool { return b.Info().CDCRecv > 0 })
	_ = b.Close()
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v", err)
	}
	_ = a.Close()
}

func TestConn_linkFailureResetsAll(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	p.fabric.cut()
	lost := 0
	for _, c := range []*smcr.Conn{a, b} {
		_, err := c.Read(make([]byte, 1))
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read after link failure: %v", err)
		}
		if errors.Is(err, smcr.ErrLinkGroupLost) {
			lost++
		}
		_ = c.Close()
	}
	if lost == 0 { // who finds out first resets the TCP connection of the other
		t.Error("nobody says that the link group was lost")
	}
	c, d := p.dial(t) // a new group
	if !c.Info().FirstContact {
		t.Error("the dead group was used again")
	}
	_, _ = c.Close(), d.Close()
}

func TestConn_tcpResetResets(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	smcr.BreakTCP(a)
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after the TCP connection was reset: %v", err)
	}
	_, _ = a.Close(), b.Close()
}

func BenchmarkConn_pingPong(b *testing.B) {
	p := newPair(b)
	c, s := p.dial(b)
	go func() { _, _ = io.Copy(s, s) }()
	buf := make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			b.Fatal(err)
		}
	}
	_, _ = c.Close(), s.Close()
}

// RFC 7609 appendix B: the addresses are those of the TCP connection.
func TestSectionB_addresses(t *testing.T) {
	p := newPair(t)
	a, b := p.dial(t)
	defer func() { _, _ = a.Close(), b.Close() }()
	listener := p.l.Addr().String()
	for _, tt := range []struct {
		name      string
		got, want net.Addr
	}{
		{"the client's peer", a.RemoteAddr(), p.l.Addr()},
		{"the server's own", b.LocalAddr(), p.l.Addr()},
		{"the server's peer", b.RemoteAddr(), a.LocalAddr()},
	} {
		if tt.got == nil || tt.want == nil || tt.got.String() != tt.want.String() || tt.got.Network() != "tcp" {
			t.Errorf("%s is %v, want %v", tt.name, tt.got, tt.want)
		}
	}
	if own := a.LocalAddr(); own == nil || own.String() == listener {
		t.Errorf("the client's own is %v", own)
	}
}

// oddWriter says that it took so many bytes, and no error; it may be asked once.
type oddWriter struct{ took, calls int }

func (w *oddWriter) Write([]byte) (int, error) {
	if w.calls++; w.calls > 1 {
		return 0, errors.New("asked again")
	}
	return w.took, nil
}

// What a writer does not take, and does not say why, is not lost, and is no reason to try for ever: WriteTo ends as io.Copy does.
func TestConn_writeToOddWriters(t *testing.T) {
	p := newPair(t)
	for _, tc := range []struct {
		took, want int
		short      bool
	}{{0, 0, true}, {3, 3, true}, {5, 0, false}, {-1, 0, false}} {
		a, b := p.dial(t)
		if _, err := a.Write([]byte("four")); err != nil {
			t.Fatal(err)
		}
		if err := a.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		n, err := b.WriteTo(&oddWriter{took: tc.took})
		if n != int64(tc.want) || errors.Is(err, io.ErrShortWrite) != tc.short || !tc.short && (err == nil || err.Error() != "smcr: invalid result of a write") {
			t.Errorf("the writer took %d of 4 bytes: %d, %v", tc.took, n, err)
		}
		var rest bytes.Buffer
		if _, err := b.WriteTo(&rest); err != nil || rest.String() != "four"[tc.want:] {
			t.Errorf("behind %d bytes: %q, %v", tc.want, rest.String(), err)
		}
		_, _ = a.Close(), b.Close()
	}
}
