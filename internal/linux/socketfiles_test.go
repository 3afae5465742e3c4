// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// roleSearcher is a process without rights that looks for a socket.
const (
	roleSearcher = "searcher"
	inodeEnv     = "KUBE_SMCR_TEST_INODE"
)

// Processes of which the main thread does not have the socket that is their first file.
const (
	roleHeadless = "headless" // it has ended
	rolePrivate  = "private"  // another thread has it in a table of files of its own
)

func init() { //nolint:gochecknoinits // only here the main goroutine is on the main thread for sure
	if role := os.Getenv(roleEnv); role == roleHeadless || role == rolePrivate {
		runtime.LockOSThread()
	}
}

// hide plays one of the roles, and says so by the end of its output.
func hide(role string) error {
	if role == roleHeadless {
		go func() {
			waitUntilDead(os.Getpid())
			_ = os.Stdout.Close()
		}()
		_, _, _ = syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0) // of this thread
	}
	hidden := make(chan error)
	go func() {
		runtime.LockOSThread()
		hidden <- errors.Join(unix.Unshare(unix.CLONE_FILES), unix.Close(1))
		for {
			_ = unix.Pause()
		}
	}()
	if err := errors.Join(<-hidden, unix.Close(3), os.Stdout.Close()); err != nil {
		return err
	}
	for {
		_ = unix.Pause() // until it is killed
	}
}

// waitUntilDead waits for the end of a thread.
func waitUntilDead(tid int) {
	for {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", tid)); err != nil || strings.Contains(string(b), ") Z ") {
			return
		}
		_, _ = unix.Poll(nil, 1) // ms
	}
}

// Programs that hide a socket from who asks their main thread are found, too.
func TestFindSocketFiles_threads(t *testing.T) {
	for _, role := range []string{roleHeadless, rolePrivate} {
		t.Run(role, func(t *testing.T) {
			pod, peer := newPair(t)
			ln := listen(t, peer, nil, families[0].peer, 7000)
			f, inode := fileOf(t, mustDial(t, pod, nil, netip.AddrPortFrom(families[0].peer, 7000)))
			server := mustAccept(t, ln)
			c := roleCommand(role)
			c.ExtraFiles = []*os.File{f}
			c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			out, err := c.StdoutPipe()
			mustDo(t, err)
			mustDo(t, pod.Do(c.Start))
			t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
			if _, err := io.ReadAll(out); err != nil {
				t.Fatal(err)
			}
			at := mustFind(t, "by its threads", pod, nil, inode)[inode]
			if at.PID != c.Process.Pid || at.TID == 0 || at.TID == at.PID {
				t.Errorf("found %+v, want a thread of process %d", at, c.Process.Pid)
			}
			fd, err := at.Open(inode)
			if errors.Is(err, unix.EINVAL) {
				t.Log("this kernel opens no threads (PIDFD_THREAD, Linux 6.9); the kernel's datapath needs a later one")
				return
			}
			mustDo(t, err)
			defer func() { mustDo(t, CloseSocket(fd, time.Now().Add(time.Second))) }()
			mustDo(t, ShutDown(fd, time.Now().Add(time.Second)))
			if n, err := server.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				t.Errorf("the peer read %d bytes, %v", n, err)
			}
		})
	}
}

// searchAsNobody looks for a socket in the namespace that it has as a file, and returns what that said.
func searchAsNobody() error {
	ns, err := newNetNS("", 3)
	if err != nil {
		return err
	}
	var inode uint64
	if _, err := fmt.Sscan(os.Getenv(inodeEnv), &inode); err != nil {
		return err
	}
	found, err := FindSocketFiles(ns, []uint64{inode}, time.Now().Add(waitLimit))
	if len(found) != 0 || !errors.Is(err, ErrNoInsight) {
		return fmt.Errorf("found %v, %v", found, err) //nolint:errorlint // it is not what was expected
	}
	return nil
}

// fileOf is a copy of a connection's file, with its inode.
func fileOf(t *testing.T, c *net.TCPConn) (*os.File, uint64) {
	t.Helper()
	f, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return f, st.Sys().(*syscall.Stat_t).Ino
}

// startIn starts a program that sleeps in a namespace, with these files.
func startIn(t *testing.T, ns *NetNS, files ...*os.File) (pid int) {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	mustDo(t, ns.Do(cmd.Start))
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd.Process.Pid
}

// mustFind finds all sockets, or fails with what was expected.
func mustFind(t *testing.T, when string, ns *NetNS, want error, inodes ...uint64) map[uint64]SocketFile {
	t.Helper()
	found, err := FindSocketFiles(ns, inodes, time.Now().Add(waitLimit))
	if !errors.Is(err, want) {
		t.Fatalf("%s: %v, want %v", when, err, want)
	}
	return found
}

// A socket of a program in a namespace is found by its inode and ended, and the others are not.
func TestFindSocketFiles(t *testing.T) {
	pod, peer := newPair(t)
	ln := listen(t, peer, nil, families[0].peer, 7000)
	at := netip.AddrPortFrom(families[0].peer, 7000)
	ours, other := mustDial(t, pod, nil, at), mustDial(t, pod, nil, at)
	server, otherServer := mustAccept(t, ln), mustAccept(t, ln)
	f, inode := fileOf(t, ours)
	otherFile, otherInode := fileOf(t, other)

	mustFind(t, "nobody is in the namespace", pod, ErrNoProcess, inode)
	startIn(t, pod, otherFile)
	mustFind(t, "a process that has another one", pod, ErrNotHeld, inode)
	if got := mustFind(t, "of both, the one that is held", pod, ErrNotHeld, inode, otherInode); len(got) != 1 || got[otherInode].FD < 3 {
		t.Errorf("found %v, want that with inode %d", got, otherInode)
	}
	pid := startIn(t, pod, otherFile, f)
	startIn(t, peer, f)
	found := mustFind(t, "a process that has it", pod, nil, inode)
	if found[inode].PID != pid {
		t.Fatalf("found %v, want inode %d of process %d", found, inode, pid)
	}
	if _, err := FindSocketFiles(pod, []uint64{inode}, time.Now().Add(-time.Second)); !errors.Is(err, ErrTooMuch) {
		t.Errorf("without time: %v", err)
	}

	fd, err := found[inode].Open(inode)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { mustDo(t, CloseSocket(fd, time.Now().Add(time.Second))) }()
	ends, err := EndsOf(fd)
	if err != nil || ends != (TCPConn{Local: addrPortOf(t, ours.LocalAddr()), Peer: at}) {
		t.Errorf("its ends are %v, %v", ends, err)
	}
	mustDo(t, ShutDown(fd, time.Now().Add(time.Second)))
	if n, err := server.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the peer read %d bytes, %v", n, err)
	}
	exchange(t, other, otherServer)
	mustDo(t, server.Close())
	waitFor(t, "the end of the connection to be told by ShutDown", func() bool {
		err := ShutDown(fd, time.Now())
		if err != nil && !errors.Is(err, unix.ENOTCONN) {
			t.Fatalf("shut down once more: %v", err)
		}
		return err != nil
	})
}

// A system call that waits is interrupted at the time given for it, and not before.
func TestNudged(t *testing.T) {
	const patience = 50 * time.Millisecond
	began := time.Now()
	err := nudged(began.Add(patience), func() error {
		_, err := unix.Poll(nil, int(waitLimit.Milliseconds()))
		return err
	})
	if took := time.Since(began); !errors.Is(err, unix.EINTR) || took < patience || took >= waitLimit {
		t.Errorf("%v after %v", err, took)
	}
}

func addrPortOf(t *testing.T, a net.Addr) netip.AddrPort {
	t.Helper()
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// A number of a file that is another one's by now opens nothing.
func TestSocketFile_reused(t *testing.T) {
	ns := newNS(t)
	f, err := os.Open(os.DevNull)
	mustDo(t, err)
	defer func() { _ = f.Close() }()
	pid := startIn(t, ns, f)
	for _, at := range []SocketFile{{PID: pid, FD: 3}, {PID: pid, FD: 99}, {PID: 1 << 22, FD: 3}} {
		if fd, err := at.Open(1); !errors.Is(err, ErrNotHeld) {
			t.Errorf("%+v: descriptor %d, %v", at, fd, err)
		}
	}
}

// Without rights it is those that are missing, and not the socket.
func TestFindSocketFiles_noRights(t *testing.T) {
	pod, peer := newPair(t)
	ln := listen(t, peer, nil, families[0].peer, 7000)
	f, inode := fileOf(t, mustDial(t, pod, nil, netip.AddrPortFrom(families[0].peer, 7000)))
	mustAccept(t, ln)
	startIn(t, pod, f)
	mustDo(t, pod.WithFD(func(fd int) error {
		copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		nsFile := os.NewFile(uintptr(copied), "namespace")
		defer func() { _ = nsFile.Close() }()
		c := roleCommand(roleSearcher)
		c.Env = append(c.Environ(), fmt.Sprintf("%s=%d", inodeEnv, inode))
		c.ExtraFiles = []*os.File{nsFile}
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		return c.Run()
	}))
}

func TestTCPConns(t *testing.T) {
	pod, peer := newPair(t)
	var want []TCPConn
	for _, f := range families {
		at := netip.AddrPortFrom(f.peer, 7000)
		ln := listen(t, peer, nil, f.peer, 7000)
		c := mustDial(t, pod, nil, at)
		mustAccept(t, ln)
		want = append(want, TCPConn{Local: addrPortOf(t, c.LocalAddr()), Peer: at})
	}
	got, err := TCPConns(pod)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	if got, err := TCPConns(peer); err != nil || len(got) != len(want) || got[0].Local != want[0].Peer || got[0].Peer != want[0].Local {
		t.Errorf("at the peer, which listens, too: %v, %v", got, err)
	}
}

func TestParseSocket_malformed(t *testing.T) {
	if s, err := parseSocket(make([]byte, inetDiagSize-1)); err == nil || !strings.Contains(err.Error(), "71 bytes") {
		t.Errorf("%v, %v", s, err)
	}
	attribute := []byte{12, 0, inetDiagCgroup, 0, 1, 2, 3, 4} // less than it says
	if s, err := parseSocket(append(make([]byte, inetDiagSize), attribute...)); err == nil {
		t.Errorf("%v", s)
	}
}
