// SPDX-License-Identifier: Apache-2.0

package soft_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/testenv"
	"github.com/smcr-io/kube-smcr/pkg/rdma"
	"github.com/smcr-io/kube-smcr/pkg/rdma/rdmatest"
	"github.com/smcr-io/kube-smcr/pkg/rdma/soft"
)

func shared(addr netip.Addr, name string) soft.Config {
	return soft.Config{Name: name, Addr: addr, Port: testPort, Share: true, Receivers: 4}
}

// stream sends from x and back from y until stop is closed, a few times at
// least.
func stream(t testing.TB, x, y *rdmatest.End, stop <-chan struct{}) {
	const (
		size  = 40_000
		least = 5
	)
	for rounds := 0; ; rounds++ {
		select {
		case <-stop:
			if rounds >= least {
				return
			}
		default:
		}
		for _, e := range [][2]*rdmatest.End{{x, y}, {y, x}} {
			e[1].Recv(t, 1, 900_000, 100)
			e[0].Send(t, e[0].Write(2, e[1], 0, size))
			e[0].Send(t, rdma.SendWR{ID: 3, Op: rdma.OpSend, Flags: rdma.SendSignaled, SGL: []rdma.SGE{e[0].SGE(0, 44)}})
			rdmatest.AwaitOne(t, e[1].RecvCQ, 1, rdma.StatusSuccess)
			rdmatest.AwaitOne(t, e[0].SendCQ, 2, rdma.StatusSuccess)
			rdmatest.AwaitOne(t, e[0].SendCQ, 3, rdma.StatusSuccess)
		}
	}
}

// talk runs traffic on a pair until the returned function is called.
func talk(t testing.TB, a, b rdma.Device) (end func()) {
	t.Helper()
	x, y := rdmatest.Pair(t, a, b, rdmatest.Options{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { stream(t, x, y, stop) })
	return func() {
		close(stop)
		wg.Wait()
	}
}

// strays fails the test if a device got packets of another one. Its own may come late,
// when their queue pair is gone.
func strays(t *testing.T, ds ...*soft.Device) {
	t.Helper()
	for _, d := range ds {
		if s := d.Stats(); s.RxOtherDevice != 0 || s.RxWrongSource != 0 {
			t.Errorf("%s got packets of another device: %+v", d.Name(), s)
		}
	}
}

// generations is six devices that follow each other on one address, each with
// traffic to a peer that stays, while its predecessor and its successor have
// theirs.
func generations(t *testing.T, open func(t testing.TB, name string) *soft.Device, peer *soft.Device) {
	var (
		last *soft.Device
		end  func()
	)
	for i := range 6 {
		d := open(t, fmt.Sprintf("generation%d", i))
		before := end
		end = talk(t, d, peer)
		if last == nil {
			last = d
			continue
		}
		both := talk(t, d, last)
		pause(20 * time.Millisecond)
		both()
		before()
		settle(t, last)
		if err := last.Close(); err != nil {
			t.Fatal(err)
		}
		strays(t, last, d)
		last = d
	}
	end()
	strays(t, last)
	if s := peer.Stats(); s.RxUnknownQP != 0 {
		t.Errorf("peer: %+v", s)
	}
}

// settle waits until nothing comes to a device any more whose traffic has ended: a packet that was
// sent again, and comes when the device is gone, is its successor's, which counts it as a stray.
func settle(t *testing.T, d *soft.Device) {
	t.Helper()
	for end, last := time.Now().Add(10*time.Second), ^uint64(0); ; {
		now := d.Stats().RxPackets
		if now == last {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s gets packets 10 s after its traffic ended", d.Name())
		}
		last = now
		pause(50 * time.Millisecond)
	}
}

// pause lets traffic run for a moment.
func pause(d time.Duration) { <-time.After(d) }

// TestShare_receivers: a device receives by several sockets while it is alone, but not again after it had company.
func TestShare_receivers(t *testing.T) {
	await := func(when string, d *soft.Device, want int) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); d.Stats().Receivers != want; pause(time.Millisecond) { // polls the device
			if time.Now().After(end) {
				t.Fatalf("%s: %s has %d receivers, want %d", when, d.Name(), d.Stats().Receivers, want)
			}
		}
	}
	first := openUDP(t, shared(loopA, "first"))
	await("alone", first, 4)
	second := openUDP(t, shared(loopA, "second"))
	await("two", first, 1)
	await("two", second, 1)
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	pause(50 * time.Millisecond)
	await("alone again", first, 1)
	third := openUDP(t, shared(loopA, "third"))
	await("two", third, 1)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	await("the older one is gone", third, 4)
	await("one receiver", openUDP(t, soft.Config{Name: "one", Addr: loopB, Port: testPort, Receivers: 1}), 1)
}

func TestShare_generations(t *testing.T) {
	peer := openUDP(t, soft.Config{Name: "peer", Addr: loopB, Port: testPort})
	generations(t, func(t testing.TB, name string) *soft.Device { return openUDP(t, shared(loopA, name)) }, peer)
}

// TestShare_merged has a path on which the receiver's kernel merges packets of
// one flow, as real NICs do: packets for two devices must not be merged.
func TestShare_merged(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.NetAdmin, testenv.Program("ethtool"))
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			v := newVethPair(t, 1500)
			ip(t, "netns", "exec", v.a, "ethtool", "-K", "v0", "gro", "on")
			// The kernel merges nothing that a veth could have left whole.
			ip(t, "netns", "exec", v.b, "ethtool", "-K", "v1", "tso", "off")
			// Packets wait so long for others that they can be merged with.
			ip(t, "netns", "exec", v.a, "sh", "-c", "echo 100000 > /sys/class/net/v0/gro_flush_timeout")
			at, peerAt := v.a4, v.b4
			if family == "IPv6" {
				at, peerAt = v.a6, v.b6
			}
			// Packet by packet, so that all merging is the kernel's.
			peer := active(t, v.b, soft.Config{Name: "peer", Addr: peerAt, Port: testPort, Share: true, NoSegmentation: true})
			generations(t, func(t testing.TB, name string) *soft.Device { return active(t, v.a, shared(at, name)) }, peer)
		})
	}
}

// TestShare_third: two share, a third one waits for the end of the first.
func TestShare_third(t *testing.T) {
	first := openUDP(t, shared(loopA, "first"))
	second := openUDP(t, shared(loopA, "second"))
	if d, err := soft.Open(shared(loopA, "third")); !errors.Is(err, soft.ErrShared) {
		t.Errorf("third device: %v, want ErrShared", err)
		if err == nil {
			_ = d.Close()
		}
	}
	for name, d := range map[string]*soft.Device{"first": first, "second": second} {
		if err := d.Close(); err != nil {
			t.Errorf("close %s: %v", name, err)
		}
	}
	openUDP(t, shared(loopA, "third"))
}

// TestShare_youngerEndsFirst: a successor that fails leaves the older device
// as it was, again and again.
func TestShare_youngerEndsFirst(t *testing.T) {
	peer := openUDP(t, soft.Config{Name: "peer", Addr: loopB, Port: testPort})
	first := openUDP(t, shared(loopA, "first"))
	end := talk(t, first, peer)
	for i := range 5 {
		d := openUDP(t, shared(loopA, fmt.Sprintf("try%d", i)))
		talk(t, d, peer)()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	end()
	strays(t, first, peer)
}

// TestShare_atOnce opens and closes devices from many goroutines: at most two
// are open at a time, and none waits forever.
func TestShare_atOnce(t *testing.T) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 20 {
				d, err := soft.Open(shared(loopA, fmt.Sprint("d", i)))
				if errors.Is(err, soft.ErrShared) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	openUDP(t, shared(loopA, "last"))
}

// TestShare_refuses: sharing is for devices that both want it.
func TestShare_refuses(t *testing.T) {
	for _, tt := range []struct {
		name          string
		first, second bool
	}{{"the first shares", true, false}, {"the second shares", false, true}} {
		t.Run(tt.name, func(t *testing.T) {
			first, second := shared(loopA, "first"), shared(loopA, "second")
			first.Share, second.Share = tt.first, tt.second
			openUDP(t, first)
			if d, err := soft.Open(second); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("second device: %v, want EADDRINUSE", err)
				if err == nil {
					_ = d.Close()
				}
			}
			// What the attempt took is free again.
			second.Addr = loopB
			openUDP(t, second)
		})
	}
	if _, err := soft.Open(soft.Config{Name: "x", Addr: loopA, Share: true, Wire: &stubborn{}}); err == nil || !strings.Contains(err.Error(), "only a UDP socket") {
		t.Errorf("shared wire: %v", err)
	}
}

// TestShare_stranger: a device does not share with a socket that did not ask it, in
// whatever order they come, although both let others bind to the port. One that asks
// in another way is a device of another version.
func TestShare_stranger(t *testing.T) {
	stranger := func() (net.PacketConn, error) {
		lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
			cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
			return errors.Join(cerr, err)
		}}
		return lc.ListenPacket(t.Context(), "udp4", netip.AddrPortFrom(loopA, testPort).String())
	}
	first, err := stranger()
	if err != nil {
		t.Fatal(err)
	}
	if d, err := soft.Open(shared(loopA, "a")); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("beside a stranger: %v, want EADDRINUSE", err)
		if err == nil {
			_ = d.Close()
		}
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	openUDP(t, shared(loopA, "a")) // what the attempt took is free again
	if c, err := stranger(); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a stranger beside a device: %v, want EADDRINUSE", err)
		if err == nil {
			_ = c.Close()
		}
	}
}

// TestShare_generalServices: a packet to queue pair 1 is one device's, and
// harmless.
func TestShare_generalServices(t *testing.T) {
	first, second := openUDP(t, shared(loopA, "first")), openUDP(t, shared(loopA, "second"))
	c, err := net.Dial("udp", netip.AddrPortFrom(loopA, testPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	var bth [16]byte
	bth[7] = 1
	if _, err := c.Write(bth[:]); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for first.Stats().RxPackets == 0 { // polls the device's counter
		if time.Now().After(deadline) {
			t.Fatalf("packet not seen: %+v, %+v", first.Stats(), second.Stats())
		}
		pause(time.Millisecond)
	}
	if s := second.Stats(); s.RxPackets != 0 {
		t.Errorf("second device: %+v", s)
	}
}

// holdDirEnv has the test program open a shared device on loopA, in the directory of that
// name and on the port of holdPortEnv, say so, and hold it until its standard input ends.
const (
	holdDirEnv  = "SOFT_TEST_HOLD_DIR"
	holdPortEnv = "SOFT_TEST_HOLD_PORT"
)

func hold(dir string) error {
	port, err := strconv.ParseUint(os.Getenv(holdPortEnv), 10, 16)
	if err != nil {
		return err
	}
	cfg := shared(loopA, "held")
	cfg.Dir, cfg.Port = dir, uint16(port)
	d, err := soft.Open(cfg)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintln(os.Stdout, "open")
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, d.Close())
}

// holder is another process with a shared device on loopA.
func holder(t *testing.T, dir string) (process *os.Process, end func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holdDirEnv+"="+dir, fmt.Sprintf("%s=%d", holdPortEnv, testPort))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "open\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}
	return cmd.Process, func() {
		_ = in.Close()
		_ = cmd.Wait() // it may have been killed
	}
}

// TestShare_stoppedProcess: a device whose process does not answer keeps its
// successor from the socket, with a word about why.
func TestShare_stoppedProcess(t *testing.T) {
	cfg := shared(loopA, "second")
	cfg.Dir = t.TempDir()
	privately(t, cfg.Dir)
	p, end := holder(t, cfg.Dir)
	defer end()
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; pause(time.Millisecond) { // polls the process's state
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid))
		if err != nil || time.Now().After(end) {
			t.Fatalf("the other process does not stop: %s, %v", stat, err)
		}
		if strings.Contains(string(stat), ") T ") {
			break
		}
	}
	if d, err := soft.Open(cfg); err == nil || !strings.Contains(err.Error(), "is its process stopped?") {
		t.Errorf("open = %v", err)
		if err == nil {
			_ = d.Close()
		}
	}
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	openUDP(t, cfg)
}

func privately(t *testing.T, dir string) {
	t.Helper()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
}

// TestShare_killedProcess: what a process leaves that is killed keeps nobody out, and goes
// with the next device.
func TestShare_killedProcess(t *testing.T) {
	cfg := shared(loopA, "next")
	cfg.Dir = t.TempDir()
	privately(t, cfg.Dir)
	for round := range 5 {
		older := openUDP(t, cfg) // in every second round the younger of the two is killed
		p, end := holder(t, cfg.Dir)
		if round%2 == 0 {
			if err := older.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Kill(); err != nil {
			t.Fatal(err)
		}
		end()
		if left := files(t, cfg.Dir); len(left) == 0 {
			t.Fatal("a killed process left nothing: this test needs to kill earlier")
		}
		d := openUDP(t, cfg)
		if err := errors.Join(older.Close(), d.Close()); err != nil {
			t.Fatal(err)
		}
		if left := files(t, cfg.Dir); len(left) > 0 {
			t.Errorf("round %d: the last device left %v", round, left)
		}
	}
	for range 2 { // both generations again
		openUDP(t, cfg)
	}
}

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}

// TestShare_killedOlder: a device receives with several sockets when the older one's process was killed, and all of its
// queue pairs have a receiver.
func TestShare_killedOlder(t *testing.T) {
	cfg := shared(loopA, "younger")
	cfg.Dir = t.TempDir()
	privately(t, cfg.Dir)
	p, end := holder(t, cfg.Dir)
	d := openUDP(t, cfg)
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	end()
	for end := time.Now().Add(20 * time.Second); d.Stats().Receivers != 4; pause(10 * time.Millisecond) { // polls the device
		if time.Now().After(end) {
			t.Fatalf("%d receivers", d.Stats().Receivers)
		}
	}
	peer := openUDP(t, soft.Config{Name: "peer", Addr: loopB, Port: testPort})
	for range 24 { // of each receiver some
		talk(t, d, peer)()
	}
	strays(t, d, peer)
}

// TestShare_directory: the directory is its user's alone, and may have any path.
func TestShare_directory(t *testing.T) {
	base := t.TempDir()
	dir := func(name string, make func(path string) error) string {
		path := filepath.Join(base, name)
		if make != nil {
			if err := make(path); err != nil {
				t.Fatal(err)
			}
		}
		return path
	}
	mode := func(m os.FileMode) func(string) error {
		return func(path string) error { return errors.Join(os.Mkdir(path, 0o700), os.Chmod(path, m)) }
	}
	for _, c := range []struct {
		name string
		dir  string
		want string // of the error; "": it opens
	}{
		{"new", dir("new", nil), ""},
		{"new, with parents", dir("a/b/c", nil), ""},
		{"longer than a socket's address", dir(strings.Repeat("long", 30)+"/"+strings.Repeat("long", 30), nil), ""},
		{"there", dir("there", mode(0o700)), ""},
		{"relative", "relative", "not an absolute path"},
		{"others may look", dir("look", mode(0o755)), "chmod 700"},
		{"the group may write", dir("write", mode(0o730)), "chmod 700"},
		{"another user's", dir("foreign", func(path string) error {
			return errors.Join(os.Mkdir(path, 0o700), os.Chown(path, 65534, 65534))
		}), "belongs to user 65534"},
		{"link", dir("link", func(path string) error { return os.Symlink(filepath.Join(base, "there"), path) }), "symbolic link"},
		{"file", dir("file", func(path string) error { return os.WriteFile(path, nil, 0o600) }), "not a directory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			testenv.Need(t, testenv.Root) // to give a directory away
			cfg := shared(loopA, "first")
			cfg.Dir = c.dir
			d, err := soft.Open(cfg)
			if c.want != "" {
				if err == nil {
					_ = d.Close()
				}
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("open: %v, want %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			second := openUDP(t, cfg)
			if err := errors.Join(d.Close(), second.Close()); err != nil {
				t.Error(err)
			}
			if left := files(t, c.dir); len(left) != 0 {
				t.Errorf("the devices left %v", left)
			}
		})
	}
}

// TestShare_namespaces: devices of two network namespaces have the same address and the
// same directory, and nothing to do with each other.
func TestShare_namespaces(t *testing.T) {
	v := newVethPair(t, 1500)
	dir := filepath.Join(t.TempDir(), "shared")
	for range 2 {
		for _, ns := range []string{v.a, v.b} {
			inNS(t, ns, func() {
				cfg := shared(loopA, ns)
				cfg.Dir = dir
				openUDP(t, cfg)
			})
		}
	}
	if n := len(files(t, dir)); n != 6 {
		t.Errorf("%d files of two namespaces, want 6", n)
	}
}
