// SPDX-License-Identifier: Apache-2.0

package kernelpath

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/smcr-io/kube-smcr/internal/linux"
	"github.com/smcr-io/kube-smcr/internal/testenv"
)

// childEnv tells this test program, when a test starts it again, to print which protocol a
// socket of TCP has.
const childEnv = "KUBE_SMCR_KERNELPATH_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	if _, err := os.Stdout.WriteString(wouldBe(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP)); err != nil {
		os.Exit(1)
	}
}

// What becomes of a socket.
const (
	isTCP = "TCP"
	isSMC = "SMC"
)

// wouldBe is what becomes of a socket. A kernel without SMC refuses a socket of that, which tells as
// much.
func wouldBe(family, kind, protocol int) string {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return isSMC
	}
	if err != nil {
		return err.Error()
	}
	defer unix.Close(fd)
	got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	switch {
	case err != nil:
		return err.Error()
	case got == unix.IPPROTO_TCP:
		return isTCP
	case got == protocolSMC:
		return isSMC
	}
	return strconv.Itoa(got)
}

// tcpIn is what becomes of a socket of TCP in a namespace.
func tcpIn(t *testing.T, ns *linux.NetNS) (was string) {
	t.Helper()
	if err := ns.Do(func() error { was = wouldBe(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP); return nil }); err != nil {
		t.Fatal(err)
	}
	return was
}

// need is what tests of the program need: it works on the whole machine.
func need(t *testing.T) {
	t.Helper()
	testenv.Need(t, testenv.InGuest, testenv.Root, testenv.NetAdmin, testenv.BPF)
}

func mustOpen(t *testing.T, cfg Config) *Chooser {
	t.Helper()
	c, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func mustClose(t *testing.T, c *Chooser) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// scratch is a namespace, with its cookie.
func scratch(t *testing.T) (*linux.NetNS, uint64) {
	t.Helper()
	ns, err := linux.ScratchNetNS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	cookie, err := ns.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	return ns, cookie
}

func TestChooser_netNS(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	ns, cookie := scratch(t)
	other, _ := scratch(t)
	if got := tcpIn(t, ns); got != isTCP {
		t.Errorf("without a rule: %s", got)
	}
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	if got := tcpIn(t, other); got != isTCP {
		t.Errorf("in another namespace: %s", got)
	}
	for _, tt := range []struct {
		name                   string
		family, kind, protocol int
		want                   string
	}{
		{"TCP", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_TCP, isSMC},
		{"the family's own protocol", unix.AF_INET, unix.SOCK_STREAM, 0, isSMC},
		{"MPTCP, as Go listens", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP, isSMC},
		{"not blocking", unix.AF_INET, unix.SOCK_STREAM | unix.SOCK_NONBLOCK, 0, isSMC},
		{"IPv6", unix.AF_INET6, unix.SOCK_STREAM, 0, isSMC},
		{"UDP", unix.AF_INET, unix.SOCK_DGRAM, 0, strconv.Itoa(unix.IPPROTO_UDP)},
		{"raw", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP, isTCP},
		{"Unix", unix.AF_UNIX, unix.SOCK_STREAM, 0, "0"},
	} {
		var got string
		if err := ns.Do(func() error { got = wouldBe(tt.family, tt.kind, tt.protocol); return nil }); err != nil {
			t.Fatal(err)
		}
		if got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
	rules, err := c.Rules()
	if want := []Rule{{Choice: Choice{NetNS: cookie}, Sockets: 5}}; err != nil || !slices.Equal(rules, want) {
		t.Errorf("rules %+v, %v; want %+v", rules, err, want)
	}
	for range 2 {
		if err := c.Forget(Choice{NetNS: cookie}); err != nil {
			t.Fatal(err)
		}
	}
	if got := tcpIn(t, ns); got != isTCP {
		t.Errorf("forgotten: %s", got)
	}
}

// newCgroup makes a cgroup in dir.
func newCgroup(t *testing.T, dir string) (string, uint64) {
	t.Helper()
	dir, err := os.MkdirTemp(dir, "kube-smcr-test") //nolint:usetesting // it is in the file system of cgroups
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	return dir, st.Ino
}

// cgroupRoot is where cgroup v2 is mounted.
func cgroupRoot(t *testing.T) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			var fs unix.Statfs_t
			if err := unix.Statfs(f[1], &fs); err == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC { // another mount may be over it
				return f[1]
			}
		}
	}
	t.Fatal("no cgroup v2 is mounted")
	return ""
}

// tcpInCgroup is what becomes of a socket of TCP of a program in a cgroup and a namespace.
func tcpInCgroup(t *testing.T, dir string, ns *linux.NetNS) string {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd()), Pdeathsig: syscall.SIGKILL}
	var out []byte
	err = ns.Do(func() (err error) { out, err = cmd.CombinedOutput(); return err })
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// The word of a cgroup counts more than that of a namespace, and that of a deeper one more than that of
// one above it.
func TestChooser_cgroup(t *testing.T) {
	need(t)
	ns, cookie := scratch(t)
	above, aboveID := newCgroup(t, cgroupRoot(t))
	deeper, deeperID := newCgroup(t, above)
	c := mustOpen(t, Config{Exclude: []uint64{deeperID}})
	defer mustClose(t, c)
	expect := func(when, wantAbove, wantDeeper string) {
		t.Helper()
		if got := tcpInCgroup(t, above, ns); got != wantAbove {
			t.Errorf("%s: %s, want %s", when, got, wantAbove)
		}
		if got := tcpInCgroup(t, deeper, ns); got != wantDeeper {
			t.Errorf("%s: %s in the deeper one, want %s", when, got, wantDeeper)
		}
	}
	expect("nobody is chosen", isTCP, isTCP)
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	expect("the namespace is", isSMC, isTCP)
	if err := errors.Join(c.Forget(Choice{NetNS: cookie}), c.Choose(Choice{Cgroup: aboveID}), c.Choose(Choice{Cgroup: deeperID})); err != nil {
		t.Fatal(err)
	}
	expect("the cgroups are", isSMC, isTCP)
	if err := c.Forget(Choice{Cgroup: deeperID}); err != nil {
		t.Fatal(err)
	}
	expect("the upper one is", isSMC, isSMC)
	rules, err := c.Rules()
	if want := []Rule{{Choice: Choice{Cgroup: aboveID}, Sockets: 3}}; err != nil || !slices.Equal(rules, want) {
		t.Errorf("rules %+v, %v; want %+v", rules, err, want)
	}
}

// bpffs mounts a BPF file system.
func bpffs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "pins")
}

func TestChooser_pinned(t *testing.T) {
	need(t)
	dir := bpffs(t)
	ns, cookie := scratch(t)
	c := mustOpen(t, Config{Dir: dir})
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	first := programOf(t, c)
	mustClose(t, c)
	if got := tcpIn(t, ns); got != isSMC {
		t.Errorf("without a process that has it open: %s", got)
	}
	c = mustOpen(t, Config{Dir: dir})
	if got := programOf(t, c); got != first {
		t.Errorf("program %d was loaded beside %d, which is the same", got, first)
	}
	if rules, err := c.Rules(); err != nil || len(rules) != 1 || rules[0].NetNS != cookie || rules[0].Sockets != 1 {
		t.Errorf("rules %+v, %v", rules, err)
	}
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	if rules, err := c.Rules(); err != nil || len(rules) != 1 || rules[0].Sockets != 1 {
		t.Errorf("chosen again: rules %+v, %v", rules, err)
	}
	mustClose(t, c)
	for _, id := range []uint64{17, 18} { // of an agent, and the next one
		c = mustOpen(t, Config{Dir: dir, Exclude: []uint64{id}})
		rules, err := c.Rules()
		if want := []Rule{{Choice: Choice{NetNS: cookie}, Sockets: 1}, {Choice: Choice{Cgroup: id}, Exclude: true}}; err != nil || !slices.Equal(rules, want) {
			t.Errorf("rules %+v, %v; want %+v", rules, err, want)
		}
		mustClose(t, c)
	}
	for range 2 {
		if err := Unpin(dir); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of the pins is left: %v", err)
	}
	// The kernel lets go of it in a worker.
	for end := time.Now().Add(10 * time.Second); tcpIn(t, ns) != isTCP; time.Sleep(10 * time.Millisecond) { // polls the end of the program
		if time.Now().After(end) {
			t.Fatal("unpinned, and still at work")
		}
	}
}

func programOf(t *testing.T, c *Chooser) ebpf.ProgramID {
	t.Helper()
	info, err := c.link.Info()
	if err != nil {
		t.Fatal(err)
	}
	return info.Program
}

// A pinned program that is not ours, as it has other rules, is replaced.
func TestChooser_otherProgram(t *testing.T) {
	need(t)
	dir := bpffs(t)
	ns, cookie := scratch(t)
	c := mustOpen(t, Config{Dir: dir})
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	mustClose(t, c)
	// Somebody took the pins of its rules.
	for _, m := range []string{"namespaces", "cgroups"} {
		if err := os.Remove(filepath.Join(dir, m)); err != nil {
			t.Fatal(err)
		}
	}
	c = mustOpen(t, Config{Dir: dir})
	defer mustClose(t, c)
	defer func() {
		if err := Unpin(dir); err != nil {
			t.Error(err)
		}
	}()
	if got := tcpIn(t, ns); got != isTCP {
		t.Errorf("by the rules of the program before: %s", got)
	}
	if err := c.Choose(Choice{NetNS: cookie}); err != nil {
		t.Fatal(err)
	}
	if got := tcpIn(t, ns); got != isSMC {
		t.Errorf("by its own rules: %s", got)
	}
	if !Pinned(dir) || Pinned(t.TempDir()) {
		t.Error("the pin of the program is not known, or another one is")
	}
	pinned, err := link.LoadPinnedLink(filepath.Join(dir, pinnedLink), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = pinned.Close() }()
	if info, err := pinned.Info(); err != nil || info.Program != programOf(t, c) {
		t.Errorf("pinned is %+v, %v", info, err)
	}
}

func TestChooser_full(t *testing.T) {
	need(t)
	c := mustOpen(t, Config{})
	defer mustClose(t, c)
	for id := range uint64(maxRules) {
		if err := c.Choose(Choice{NetNS: 1<<60 + id}); err != nil {
			t.Fatalf("rule %d: %v", id, err)
		}
	}
	if err := c.Choose(Choice{NetNS: 1 << 61}); !errors.Is(err, ErrFull) {
		t.Errorf("one more: %v", err)
	}
	if rules, err := c.Rules(); err != nil || len(rules) != maxRules {
		t.Errorf("%d rules, %v", len(rules), err)
	}
}

func TestOpen_noPins(t *testing.T) {
	need(t)
	var missing *MissingError
	if c, err := Open(Config{Dir: t.TempDir()}); !errors.As(err, &missing) || missing.Missing != NoPins {
		t.Errorf("%v, %v", c, err)
	}
}

// What the kernel answers where programs may not change what a function returns.
func TestLoadError_notModifiable(t *testing.T) {
	need(t)
	spec, err := loadProgram()
	if err != nil {
		t.Fatal(err)
	}
	spec.Programs["choose_protocol"].AttachTo = "inet_shutdown"
	var o programObjects
	err = spec.LoadAndAssign(&o, nil)
	if err == nil {
		_ = o.Close()
		t.Fatal("the program was loaded")
	}
	var missing *MissingError
	if !errors.As(loadError(err), &missing) || missing.Missing != NoHook {
		t.Errorf("%v, of %v", loadError(err), err)
	}
}

func TestLoadError(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want Missing
	}{
		{unix.EPERM, NoRights},
		{unix.ENOSYS, NoBPF},
		{ebpf.ErrNotSupported, NoBPF},
		{&ebpf.VerifierError{Cause: unix.EINVAL, Log: []string{"R1 is bad"}}, Refused},
	} {
		var missing *MissingError
		if err := loadError(tt.err); !errors.As(err, &missing) || missing.Missing != tt.want || !errors.Is(err, tt.err) {
			t.Errorf("%v: %v, want %s", tt.err, err, tt.want)
		}
	}
	if err := loadError(unix.ENOMEM); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("of another error: %v", err)
	}
}
