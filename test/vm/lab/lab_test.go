// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(leaseEnv); name != "" {
		holdLease(name)
	}
	goleak.VerifyTestMain(m)
}

// TestLab has one pair of guests for all cases. Those that break a guest are the
// last.
func TestLab(t *testing.T) {
	var l *Lab
	t.Cleanup(func() { // after that of ForTest
		if l == nil || os.Getenv(TestEnv) != "" {
			return
		}
		if left := leftovers(t, l.Name()); len(left) > 0 {
			t.Errorf("there is still %q", left)
		}
	})
	began := time.Now()
	l = ForTest(t, Config{Disks: []string{blankDisk(t)}})
	t.Logf("up after %.1fs", time.Since(began).Seconds())
	for _, c := range []struct {
		name string
		run  func(*testing.T, *Lab)
	}{
		{"exit codes", testExitCodes},
		{"streams", testStreams},
		{"signals", testSignals},
		{"a command that does not end", testEndlessCommand},
		{"a host that goes", testHostGoes},
		{"too much output", testTooMuchOutput},
		{"network", testNetwork},
		{"links", testLinks},
		{"capture", testCapture},
		{"rxe", testRXE},
		{"siw", testSIW},
		{"this machine", testJoin},
		{"tests of a package", testGoTest},
		{"reset", testReset},
		{"a kernel that panics", testPanic},
		{"a guest that hangs", testHang},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, l) })
	}
}

// limited is the test's context, which here ends before the tests of the package
// have to: a command that hangs is then named.
func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), bootTimeout)
	t.Cleanup(cancel)
	return ctx
}

func testExitCodes(t *testing.T, l *Lab) {
	for _, c := range []struct {
		name, want string
		command    []string
	}{
		{name: "well", command: []string{"true"}},
		{name: "code", command: []string{"sh", "-c", "echo no >&2; exit 3"}, want: "g0: sh -c echo no >&2; exit 3: exit code 3: no"},
		{name: "signal", command: []string{"sh", "-c", "kill -TERM $$"}, want: "g0: sh -c kill -TERM $$: signal 15"},
		{name: "no such program", command: []string{"no-such-program"}, want: `g0: no-such-program: exec: "no-such-program": executable file not found in $PATH`},
		{name: "no command", want: "g0: : no command"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := l.Guest(0).Run(limited(t), c.command...)
			got := ""
			if err != nil {
				got = err.Error()
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

func testStreams(t *testing.T, l *Lab) {
	const size = 3 << 20
	sent := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	p, err := l.Guest(1).StartIn(limited(t), "/tmp", []string{"WHERE=here"}, "bash", "-c", "cat; echo $WHERE $PWD >&2")
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	if err := p.Stream(bytes.NewReader(sent), &stdout, &stderr); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(stdout.Bytes(), sent) {
		t.Errorf("sent %d bytes, and got %d others back", len(sent), stdout.Len())
	}
	if diff := cmp.Diff("here /tmp\n", stderr.String()); diff != "" {
		t.Errorf("standard error (-want +got):\n%s", diff)
	}
	// A daemon keeps its command's output open and is not waited for.
	if _, err := l.Guest(1).Run(limited(t), "sh", "-c", "sleep 100 & echo started"); err != nil {
		t.Error(err)
	}
	if _, err := l.Guest(1).Run(limited(t), "pkill", "sleep"); err != nil {
		t.Errorf("the daemon is gone: %v", err)
	}
}

func testSignals(t *testing.T, l *Lab) {
	// Short sleeps: a trap runs when they end. Bash can spin for ever when the signal
	// comes while it makes a process substitution.
	p, err := l.Guest(0).Start(limited(t), "sh", "-c", "trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.05; done")
	if err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(p.Stdout, line); err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(p.Stdout)
	if err != nil || string(out) != "caught\n" {
		t.Errorf("output %q, %v", out, err)
	}
	if err := p.Wait(); !Exited(err, 7) {
		t.Errorf("end: %v", err)
	}
	if err := p.Signal(unix.SIGUSR1); !errors.Is(err, unix.ESRCH) {
		t.Errorf("signal after the end: %v", err)
	}
}

// gone waits until no process with that command line is in the guest.
func gone(t *testing.T, g *Guest, pattern string) {
	t.Helper()
	err := poll(limited(t), "the end of "+pattern, 2*killTimeout, func() error {
		out, err := g.Run(limited(t), "pgrep", "-af", "^"+pattern)
		if Exited(err, 1) {
			return nil
		}
		return errors.Join(err, errors.New(out))
	})
	if err != nil {
		t.Error(err)
	}
}

func testEndlessCommand(t *testing.T, l *Lab) {
	ctx, cancel := context.WithCancel(limited(t))
	defer cancel()
	p, err := l.Guest(0).Start(ctx, "sh", "-c", "echo first; sleep 4711; sleep 4712")
	if err != nil {
		t.Fatal(err)
	}
	first := make([]byte, len("first\n"))
	if _, err := io.ReadFull(p.Stdout, first); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	cancel()
	rest, _ := io.ReadAll(p.Stdout)
	if err := p.Wait(); !errors.Is(err, context.Canceled) || string(first)+string(rest) != "first\n" {
		t.Errorf("output %q%q, %v", first, rest, err)
	}
	if took := time.Since(began); took > killTimeout {
		t.Errorf("it took %v to give up", took)
	}
	gone(t, l.Guest(0), "sleep 471")
}

// A program of the host that ends takes its commands with it.
func testHostGoes(t *testing.T, l *Lab) {
	other, err := Open(l.Name())
	if err != nil {
		t.Fatal(err)
	}
	p, err := other.Guest(0).Start(limited(t), "sleep", "4713")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Guest(0).Run(limited(t), "kill", "-0", fmt.Sprint(p.PID)); err != nil {
		t.Errorf("look for the process: %v", err)
	}
	other.Forget()
	if err := p.Wait(); !errors.Is(err, errClosed) {
		t.Errorf("the command of a closed host: %v", err)
	}
	gone(t, l.Guest(0), "sleep 4713")
	if _, err := other.Guest(0).Run(limited(t), "true"); !errors.Is(err, errClosed) {
		t.Errorf("a command after Forget: %v", err)
	}
}

func testTooMuchOutput(t *testing.T, l *Lab) {
	p, err := l.Guest(0).Start(limited(t), "yes", "4714")
	if err != nil {
		t.Fatal(err)
	}
	p.stdout.mu.Lock()
	p.stdout.limit = 1 << 20
	p.stdout.mu.Unlock()
	if err := p.Wait(); err == nil || !strings.Contains(err.Error(), "that nobody read") {
		t.Errorf("end: %v", err)
	}
	gone(t, l.Guest(0), "yes 4714")
}

func testNetwork(t *testing.T, l *Lab) {
	const full = "8972" // with 28 bytes of headers the MTU
	for nic := range 2 {
		to := l.Guest(1)
		for _, addr := range []string{to.Addr(nic).String(), to.Addr6(nic).String()} {
			if _, err := l.Guest(0).Run(limited(t), "ping", "-c1", "-w60", addr); err != nil {
				t.Error(err)
			}
		}
		if _, err := l.Guest(0).Run(limited(t), "ping", "-c1", "-w60", "-Mdo", "-s"+full, "-I"+l.Guest(0).Addr(nic).String(), to.Addr(nic).String()); err != nil {
			t.Error(err)
		}
	}
	// What has the address of a NIC leaves by it.
	out, err := l.Guest(0).Run(limited(t), "ip", "route", "get", "10.0.0.2", "from", "10.0.0.11")
	if err != nil || !strings.Contains(out, "dev eth1") {
		t.Errorf("route from the second NIC: %q, %v", out, err)
	}
}

func testLinks(t *testing.T, l *Lab) {
	g := l.Guest(1)
	for _, up := range []bool{false, true} {
		if err := g.SetLink(1, up); err != nil {
			t.Fatal(err)
		}
		err := poll(limited(t), fmt.Sprintf("carrier %v", up), bootTimeout, func() error {
			out, err := g.Run(limited(t), "cat", "/sys/class/net/eth1/carrier")
			if err == nil && (out == "1\n") != up {
				err = fmt.Errorf("carrier is %s", out)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	if err := g.SetLink(2, false); err == nil || !strings.Contains(err.Error(), "nic2") {
		t.Errorf("cut a link that is not there: %v", err)
	}
}

func testCapture(t *testing.T, l *Lab) {
	stop, err := l.Capture("ping")
	if err != nil {
		t.Fatal(err)
	}
	const pattern = "kube-smcr"
	if _, err := l.Guest(0).Run(limited(t), "ping", "-c1", "-w60", "-p", fmt.Sprintf("%x", pattern), l.Guest(1).Addr(0).String()); err != nil {
		t.Error(err)
	}
	file, err := stop()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// A ping and its answer, with the pattern a few times each.
	if n := bytes.Count(text, []byte(pattern)); n < 2 {
		t.Errorf("the capture of %d bytes has the pattern %d times", len(text), n)
	}
	if _, err := l.Capture("Not A Name"); err == nil {
		t.Error("a capture took any name")
	}
}

func testRXE(t *testing.T, l *Lab) {
	for i := range 2 {
		if err := l.Guest(i).AddRXE(limited(t), 0, 1); err != nil {
			t.Fatal(err)
		}
	}
	const device = "ibv_rc_pingpong -d rxe1 -g1 -n20"
	server, err := l.Guest(0).Start(limited(t), strings.Fields(device)...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Guest(1).Shell(limited(t), "until ss -Htan | grep -q :18515; do ss -H; break; done; until "+device+" 10.0.0.1; do sleep 0.1; done"); err != nil {
		t.Error(err)
	}
	if err := server.Wait(); err != nil {
		t.Error(err)
	}
	for i := range 2 {
		if err := l.Guest(i).RemoveRXE(limited(t), 0, 1); err != nil {
			t.Error(err)
		}
	}
}

func testGoTest(t *testing.T, l *Lab) {
	var out bytes.Buffer
	err := l.Guest(0).GoTest(limited(t), "github.com/smcr-io/kube-smcr/pkg/smcr/cdc", BuildOptions{}, &out, "-test.short", "-test.run=^TestCursor")
	if err != nil || !strings.Contains(out.String(), "PASS") {
		t.Errorf("%v: %s", err, &out)
	}
	_, err = l.Build(limited(t), "./no/such/package", BuildOptions{})
	if err == nil {
		t.Error("a package that is not there was built")
	}
}

// qemu is the process of the guest's QEMU.
func qemu(t *testing.T, l *Lab, guest int) *os.Process {
	t.Helper()
	if l.keeper == nil {
		t.Fatalf("%s is set: this test wants guests of its own", TestEnv)
	}
	return l.keeper.commands[guest].Process
}

func testHang(t *testing.T, l *Lab) {
	g, process := l.Guest(1), qemu(t, l, 1)
	p, err := g.Start(limited(t), "sleep", "4715")
	if err != nil {
		t.Fatal(err)
	}
	if err := process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	l.hungAfter.Store(int64(2 * time.Second))
	defer l.hungAfter.Store(int64(hungAfter))
	if err := p.Wait(); !errors.Is(err, ErrUnresponsive) {
		t.Errorf("a command of a guest that hangs: %v", err)
	}
	if _, err := g.Run(limited(t), "true"); !errors.Is(err, ErrUnresponsive) {
		t.Errorf("another one: %v", err)
	}
	if err := process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

// blankDisk is the image of a disk of zeros.
func blankDisk(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(name, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// A guest comes back with its links up and its files forgotten, but for those on a disk of its
// own.
func testReset(t *testing.T, l *Lab) {
	g := l.Guest(1)
	if _, err := g.Shell(limited(t), "echo marker >/dev/vdb; sync"); err != nil {
		t.Fatal(err)
	}
	if err := g.SetLink(0, false); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Run(limited(t), "touch", "/tmp/marker", "/etc/marker"); err != nil {
		t.Fatal(err)
	}
	p, err := g.Start(limited(t), "sleep", "4716")
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); !errors.Is(err, errReset) {
		t.Errorf("a command that ran: %v", err)
	}
	if _, err := g.Shell(limited(t), "test ! -e /tmp/marker; test ! -e /etc/marker; head -n1 /dev/vdb | grep -qx marker"); err != nil {
		t.Error(err)
	}
	if _, err := l.Guest(0).Run(limited(t), "ping", "-c1", "-w60", g.Addr(0).String()); err != nil {
		t.Error(err)
	}
	if _, err := l.Guest(0).Shell(limited(t), "! grep -q marker /dev/vdb"); err != nil {
		t.Errorf("the other guest's disk: %v", err)
	}
	for _, image := range l.cfg.Disks {
		if text, err := os.ReadFile(image); err != nil || !bytes.Equal(text, make([]byte, len(text))) {
			t.Errorf("the image of the disk was written to: %v", err)
		}
	}
}

func testPanic(t *testing.T, l *Lab) {
	g := l.Guest(1)
	began := time.Now()
	_, err := g.Run(limited(t), "sh", "-c", "echo c >/proc/sysrq-trigger")
	var crash *CrashError
	if !errors.As(err, &crash) || crash.Guest != "g1" || !strings.Contains(crash.Excerpt, "sysrq triggered crash") {
		t.Errorf("the command that crashed it: %v", err)
	}
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("it took %v to find out", took)
	}
	if _, err := l.Guest(0).Run(limited(t), "true"); err != nil {
		t.Errorf("the other guest: %v", err)
	}
	if err := g.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Run(limited(t), "true"); err != nil {
		t.Error(err)
	}
}

// leftovers are what there is on this machine of the lab of that name.
func leftovers(t *testing.T, name string) []string {
	t.Helper()
	dir, err := directory(name)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	if _, err := os.Lstat(dir); err == nil {
		left = append(left, dir)
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		line, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		if bytes.Contains(line, []byte(dir+"/")) {
			left = append(left, p+": "+string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	return left
}
