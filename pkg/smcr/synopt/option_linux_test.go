// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// childEnv tells this test program, when a test starts it again, what to do.
const (
	childEnv    = "KUBE_SMCR_SYNOPT_TEST_CHILD"
	childCgroup = "cgroup"
	childProbe  = "probe"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(childEnv); role != "" {
		os.Exit(childMain(role))
	}
	goleak.VerifyTestMain(m)
}

// needAll is what tests with real sockets need.
func needAll(t testing.TB) {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.BPF)
}

// marks counts what newMark returned.
var marks atomic.Uint32

// newMark returns a mark that no other test uses, of this process or another.
func newMark() uint32 { return uint32(os.Getpid())<<8 | marks.Add(1)&0xff }

func openOption(t testing.TB, cfg Config) *Option {
	t.Helper()
	if cfg.Mark == 0 {
		cfg.Mark = newMark()
	}
	o, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	})
	return o
}

// exchange sends a few bytes each way.
func exchange(t testing.TB, a, b net.Conn) {
	t.Helper()
	for _, dir := range []struct{ from, to net.Conn }{{a, b}, {b, a}} {
		if _, err := dir.from.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(dir.to, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestOption_handshakes(t *testing.T) {
	needAll(t)
	o := openOption(t, Config{})
	other := &Option{mark: o.mark ^ 1<<7} // marks sockets with what no program wants
	client, server := newHosts(t)

	tests := []struct {
		name             string
		client, server   *Option
		syncookies       bool
		wantSYN, wantACK bool // on the wire
		wantClient       bool
		wantClientErr    error
		wantServer       bool
	}{
		{name: "both", client: o, server: o, wantSYN: true, wantACK: true, wantClient: true, wantServer: true},
		{name: "client only", client: o, wantSYN: true},
		{name: "server only", server: o, wantClientErr: ErrNotTracked},
		{name: "neither", wantClientErr: ErrNotTracked},
		{name: "client with another mark", client: other, server: o, wantClientErr: ErrNotTracked},
		{name: "server with another mark", client: o, server: other, wantSYN: true, wantServer: true},
		{name: "syncookies", client: o, server: o, syncookies: true, wantSYN: true},
	}
	for _, tt := range tests {
		for _, v6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/v6=%v", tt.name, v6), func(t *testing.T) {
				if tt.syncookies {
					server.sysctl(t, "ipv4/tcp_syncookies", "2") // for IPv6 as well
					defer server.sysctl(t, "ipv4/tcp_syncookies", "1")
				}
				l := server.listen(t, tt.server, v6)
				w := server.tap(t)
				c := client.dial(t, tt.client, l.Addr())

				got, err := o.PeerOffered(c)
				if got != tt.wantClient || !errors.Is(err, tt.wantClientErr) || err != nil && tt.wantClientErr == nil {
					t.Errorf("PeerOffered() = %v, %v; want %v, %v", got, err, tt.wantClient, tt.wantClientErr)
				}
				s := accept(t, l)
				if got, err := o.SYNOffered(s); err != nil || got != tt.wantServer {
					t.Errorf("SYNOffered() = %v, %v; want %v", got, err, tt.wantServer)
				}
				exchange(t, c, s)

				segs := w.read(t, func(segs []segment) bool { return count(segs, isData) >= 4 })
				for _, s := range segs {
					want := isSYN(s) && tt.wantSYN || isSYNACK(s) && tt.wantACK
					if s.carries() != want {
						t.Errorf("on the wire: %+v, want the option: %v", s, want)
					}
				}
				if syns, synacks := count(segs, isSYN), count(segs, isSYNACK); syns == 0 || synacks == 0 {
					t.Errorf("captured %d SYNs and %d SYN-ACKs", syns, synacks)
				}
			})
		}
	}
}

// TestOption_missesNothing asks at once after connect and accept, again and
// again: an answer that comes too late would be a connection of two opinions.
func TestOption_missesNothing(t *testing.T) {
	needAll(t)
	const connects = 500
	o := openOption(t, Config{})
	client, server := newHosts(t)
	l := server.listen(t, o, false)

	served := make(chan error, 1)
	go func() {
		for i := range connects {
			c, err := l.AcceptTCP()
			if err != nil {
				served <- err
				return
			}
			offered, err := o.SYNOffered(c)
			_ = c.Close()
			if err != nil || !offered {
				served <- fmt.Errorf("accept %d: SYNOffered() = %v, %w", i, offered, err)
				return
			}
		}
		served <- nil
	}()

	client.do(t, func() error {
		d := net.Dialer{Control: o.ControlDial, Timeout: waitTime}
		for i := range connects {
			c, err := d.Dial("tcp", l.Addr().String())
			if err != nil {
				return fmt.Errorf("connect %d: %w", i, err)
			}
			offered, err := o.PeerOffered(c.(*net.TCPConn))
			_ = c.Close()
			if err != nil || !offered {
				return fmt.Errorf("connect %d: PeerOffered() = %v, %w", i, offered, err)
			}
		}
		return nil
	})
	if err := <-served; err != nil {
		t.Fatal(err)
	}
}

// TestOption_twoPrograms: two agents on one cgroup do not disturb each other,
// though the kernel calls both programs for the sockets of either.
func TestOption_twoPrograms(t *testing.T) {
	needAll(t)
	first, second := openOption(t, Config{}), openOption(t, Config{})
	client, server := newHosts(t)
	for _, tt := range []struct {
		name           string
		client, server *Option
		want           bool
	}{
		{name: "first to first", client: first, server: first, want: true},
		{name: "first to second", client: first, server: second, want: true},
		{name: "second to first", client: second, server: first, want: true},
		{name: "second to second", client: second, server: second, want: true},
		{name: "first to none", client: first},
		{name: "second to none", client: second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := server.listen(t, tt.server, false)
			w := server.tap(t)
			c := client.dial(t, tt.client, l.Addr())
			if got, err := tt.client.PeerOffered(c); err != nil || got != tt.want {
				t.Errorf("PeerOffered() = %v, %v; want %v", got, err, tt.want)
			}
			s := accept(t, l)
			if tt.server != nil {
				if got, err := tt.server.SYNOffered(s); err != nil || got != tt.want {
					t.Errorf("SYNOffered() = %v, %v; want %v", got, err, tt.want)
				}
			}
			exchange(t, c, s)
			for _, s := range w.read(t, func(segs []segment) bool { return count(segs, isData) >= 4 }) {
				want := 0
				if isSYN(s) || isSYNACK(s) && tt.want {
					want = 1
				}
				if s.options != want {
					t.Errorf("on the wire: %+v, want %d options", s, want)
				}
			}
		})
	}
}

// TestOption_synackLost: the retransmitted SYN-ACK answers as the first did.
func TestOption_synackLost(t *testing.T) {
	needAll(t)
	testenv.Need(t, testenv.Nftables, testenv.Program("nft"))
	t.Parallel()
	o := openOption(t, Config{})
	client, server := newHosts(t)
	client.nft(t, `table inet ks { chain in { type filter hook input priority 0; tcp flags & (syn|ack) == syn|ack limit rate 1/hour burst 1 packets drop; }; }`)
	l := server.listen(t, o, false)
	w := server.tap(t)
	c := client.dial(t, o, l.Addr())
	if got, err := o.PeerOffered(c); err != nil || !got {
		t.Errorf("PeerOffered() = %v, %v; want true", got, err)
	}
	if got, err := o.SYNOffered(accept(t, l)); err != nil || !got {
		t.Errorf("SYNOffered() = %v, %v; want true", got, err)
	}
	segs := w.read(t, func(segs []segment) bool { return count(segs, isData) >= 1 })
	if n := count(segs, isSYNACK); n < 2 {
		t.Errorf("the SYN-ACK was sent %d times, want a retransmission", n)
	}
	for _, s := range segs {
		if s.syn && !s.carries() {
			t.Errorf("on the wire: %+v, want the option", s)
		}
	}
}

// TestOption_droppedOnPath: where SYNs with the option are lost, the
// connection comes up without it.
func TestOption_droppedOnPath(t *testing.T) {
	needAll(t)
	testenv.Need(t, testenv.Nftables, testenv.Program("nft"))
	t.Parallel()
	o := openOption(t, Config{})
	client, server := newHosts(t)
	server.nft(t, `table inet ks { chain in { type filter hook input priority 0; tcp option @254,16,32 0xe2d4c3d9 drop; }; }`)
	l := server.listen(t, o, false)
	w := server.tap(t)
	c := client.dial(t, o, l.Addr())
	if got, err := o.PeerOffered(c); err != nil || got {
		t.Errorf("PeerOffered() = %v, %v; want false", got, err)
	}
	if got, err := o.SYNOffered(accept(t, l)); err != nil || got {
		t.Errorf("SYNOffered() = %v, %v; want false", got, err)
	}
	segs := w.read(t, func(segs []segment) bool { return count(segs, isData) >= 1 })
	with := count(segs, func(s segment) bool { return isSYN(s) && s.carries() })
	without := count(segs, func(s segment) bool { return isSYN(s) && !s.carries() })
	if with != 2 || without != 1 {
		t.Errorf("%d SYNs with the option and %d without, want 2 and 1", with, without)
	}
}

// TestOption_costsNothingLater: once connected, the program is not called.
func TestOption_costsNothingLater(t *testing.T) {
	needAll(t)
	// A cgroup of its own, or the calls for other sockets would be counted.
	dir := newCgroup(t)
	o := openOption(t, Config{CgroupPath: dir})
	prog := attachedProgram(t, dir)
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stats.Close() }()
	calls := func() uint64 {
		s, err := prog.Stats()
		if err != nil {
			t.Fatal(err)
		}
		return s.RunCount
	}

	client, server := newHosts(t)
	var c, s *net.TCPConn
	inCgroup(t, dir, func() {
		l := server.listen(t, o, false)
		c = client.dial(t, o, l.Addr())
		s = accept(t, l)
	})
	if got, err := o.PeerOffered(c); err != nil || !got {
		t.Fatalf("PeerOffered() = %v, %v; want true", got, err)
	}
	exchange(t, c, s)
	before := calls()
	if before == 0 {
		t.Fatal("the program was never called")
	}
	for range 1000 {
		exchange(t, c, s)
	}
	if after := calls(); after != before {
		t.Errorf("the program was called %d times for the data of a connection", after-before)
	}
}

// TestOption_ControlListen_multipathTCP: net tries Multipath TCP first, and
// plain TCP when that is refused.
func TestOption_ControlListen_multipathTCP(t *testing.T) {
	needAll(t)
	o := openOption(t, Config{})
	var results []error
	var lc net.ListenConfig
	lc.Control = func(n, a string, c syscall.RawConn) error {
		err := o.ControlListen(n, a, c)
		results = append(results, err)
		return err
	}
	lc.SetMultipathTCP(true)
	l, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	last := len(results) - 1
	if results[last] != nil {
		t.Errorf("ControlListen() of the plain socket = %v", results[last])
	}
	for _, err := range results[:last] { // none if the kernel has no Multipath TCP
		if !errors.Is(err, unix.ENOPROTOOPT) || !strings.Contains(err.Error(), "SetMultipathTCP(false)") {
			t.Errorf("ControlListen() of a Multipath TCP socket = %v, want ENOPROTOOPT and what to do", err)
		}
	}

	d := net.Dialer{Control: o.ControlDial}
	c, err := d.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if got, err := o.PeerOffered(c.(*net.TCPConn)); err != nil || !got {
		t.Errorf("PeerOffered() = %v, %v; want true", got, err)
	}
	if got, err := o.SYNOffered(accept(t, l.(*net.TCPListener))); err != nil || !got {
		t.Errorf("SYNOffered() = %v, %v; want true", got, err)
	}
}

func TestOption_notTCP(t *testing.T) {
	needAll(t)
	o := openOption(t, Config{})
	lc := net.ListenConfig{Control: func(n, a string, c syscall.RawConn) error { return o.ControlListen(n, a, c) }}
	p, err := lc.ListenPacket(context.Background(), "udp", "127.0.0.1:0")
	if err == nil {
		_ = p.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "is not TCP") {
		t.Errorf("ListenPacket() = %v, want an error that says it is not TCP", err)
	}
}

func TestOption_closedSocket(t *testing.T) {
	needAll(t)
	o := openOption(t, Config{})
	client, server := newHosts(t)
	l := server.listen(t, o, false)
	c := client.dial(t, o, l.Addr())
	s := accept(t, l)
	_, _ = c.Close(), s.Close()
	if got, err := o.PeerOffered(c); got || !errors.Is(err, net.ErrClosed) {
		t.Errorf("PeerOffered() of a closed socket = %v, %v; want %v", got, err, net.ErrClosed)
	}
	if got, err := o.SYNOffered(s); got || !errors.Is(err, net.ErrClosed) {
		t.Errorf("SYNOffered() of a closed socket = %v, %v; want %v", got, err, net.ErrClosed)
	}
}

func TestOption_Close(t *testing.T) {
	needAll(t)
	dir := newCgroup(t)
	client, server := newHosts(t)

	// Once before counting: the library keeps what it learns of the kernel.
	openOption(t, Config{CgroupPath: dir})
	if err := Probe(); err != nil {
		t.Fatal(err)
	}
	programs, files := programIDs(t, dir), openFiles(t)

	o := openOption(t, Config{CgroupPath: dir})
	if got := programIDs(t, dir); len(got) != len(programs)+1 {
		t.Errorf("after Open programs %v are attached, before it %v", got, programs)
	}
	var c *net.TCPConn
	var l *net.TCPListener
	inCgroup(t, dir, func() {
		l = server.listen(t, o, false)
		c = client.dial(t, o, l.Addr())
	})
	s := accept(t, l)
	for range 2 {
		if err := o.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if got := programIDs(t, dir); len(got) != len(programs) {
		t.Errorf("after Close programs %v are attached, before Open %v", got, programs)
	}
	exchange(t, c, s)
	if _, err := o.PeerOffered(c); !errors.Is(err, os.ErrClosed) {
		t.Errorf("PeerOffered() after Close = %v, want %v", err, os.ErrClosed)
	}
	if _, err := o.SYNOffered(s); !errors.Is(err, os.ErrClosed) {
		t.Errorf("SYNOffered() after Close = %v, want %v", err, os.ErrClosed)
	}
	_, _, _ = c.Close(), s.Close(), l.Close()
	if got := openFiles(t); got != files {
		t.Errorf("%d files are open, %d before Open", got, files)
	}
}

func TestProbe(t *testing.T) {
	needAll(t)
	if err := Probe(); err != nil {
		t.Fatal(err)
	}
}

func TestOpen_unsupported(t *testing.T) {
	needAll(t)
	for _, tt := range []struct{ name, dir string }{
		{name: "no such directory", dir: filepath.Join(t.TempDir(), "none")},
		{name: "not a cgroup", dir: t.TempDir()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o, err := Open(Config{Mark: 1, CgroupPath: tt.dir})
			if err == nil {
				_ = o.Close()
			}
			var unsupported *UnsupportedError
			if !errors.As(err, &unsupported) || !strings.Contains(err.Error(), tt.dir) {
				t.Errorf("Open() = %v, want an UnsupportedError that names %s", err, tt.dir)
			}
		})
	}
}

// programIDs returns the sock_ops programs attached to a cgroup.
func programIDs(t testing.TB, dir string) []ebpf.ProgramID {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	res, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: ebpf.AttachCGroupSockOps})
	if err != nil {
		t.Fatal(err)
	}
	var ids []ebpf.ProgramID
	for _, p := range res.Programs {
		ids = append(ids, p.ID)
	}
	return ids
}

// attachedProgram opens the one program of a cgroup.
func attachedProgram(t testing.TB, dir string) *ebpf.Program {
	t.Helper()
	ids := programIDs(t, dir)
	if len(ids) != 1 {
		t.Fatalf("programs %v are attached to %s, want one", ids, dir)
	}
	p, err := ebpf.NewProgramFromID(ids[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func openFiles(t testing.TB) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// newCgroup makes a child of this process's cgroup.
func newCgroup(t testing.TB) string {
	t.Helper()
	own, err := openOwnCgroup()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(own.close)
	//nolint:usetesting // a cgroup must be below this process's own
	dir, err := os.MkdirTemp(own.path, "ks-synopt-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Errorf("remove cgroup: %v", err)
		}
	})
	return dir
}

// inCgroup runs f with this process moved into dir, and moves it back.
func inCgroup(t testing.TB, dir string, f func()) {
	t.Helper()
	own, err := openOwnCgroup()
	if err != nil {
		t.Fatal(err)
	}
	defer own.close()
	move := func(dir string) {
		if err := os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			t.Fatalf("move to cgroup %s: %v", dir, err)
		}
	}
	move(dir)
	defer move(own.path)
	f()
}
