// SPDX-License-Identifier: Apache-2.0

package synopt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOpen_ownCgroup starts this test program again inside a cgroup of its own
// and lets it find that cgroup, in the cgroup namespace it was born in and in
// others.
func TestOpen_ownCgroup(t *testing.T) {
	needAll(t)
	tests := []struct {
		name string
		// unshare are the namespaces the child gets.
		unshare uintptr
	}{
		{name: "same namespace"},
		// The mounts of the new namespaces show the cgroup namespace's root as
		// something far below theirs.
		{name: "cgroup namespace", unshare: unix.CLONE_NEWCGROUP},
		{name: "cgroup and pid namespace", unshare: unix.CLONE_NEWCGROUP | unix.CLONE_NEWPID},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := newCgroup(t)
			f, err := os.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _, _ = r.Close(), w.Close() }()

			var out strings.Builder
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), childEnv+"="+childCgroup)
			cmd.Stderr = &out
			cmd.ExtraFiles = []*os.File{w}
			cmd.SysProcAttr = &syscall.SysProcAttr{
				UseCgroupFD: true,
				CgroupFD:    int(f.Fd()),
				Cloneflags:  tt.unshare,
				Pdeathsig:   syscall.SIGKILL,
			}
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			_ = w.Close()
			// The child writes a byte once it is at work, and ends with its stdin.
			_, readErr := r.Read(make([]byte, 1))
			var attached int
			if readErr == nil {
				attached = len(programIDs(t, dir))
			}
			_ = stdin.Close()
			if err := cmd.Wait(); err != nil || readErr != nil {
				t.Fatalf("child: %v, %v: %s", err, readErr, out.String())
			}
			if attached != 1 {
				t.Errorf("%d programs were attached to the child's cgroup, want 1", attached)
			}
			if n := len(programIDs(t, dir)); n != 0 {
				t.Errorf("%d programs are attached after the child's death", n)
			}
		})
	}
}

// TestProbe_unprivileged starts this test program again as a user who may do
// nothing.
func TestProbe_unprivileged(t *testing.T) {
	needAll(t)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"="+childProbe)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: 65534, Gid: 65534},
		Pdeathsig:  syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	if err == nil {
		t.Fatalf("the child had the privilege: %s", out)
	}
	for _, want := range []string{"load the eBPF program", "CAP_BPF", "CAP_NET_ADMIN", "operation not permitted"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("Probe() = %s, want it to say %q", out, want)
		}
	}
}

// childMain is what this test program does when it is started by a test.
func childMain(role string) int {
	f := Probe
	if role == childCgroup {
		f = cgroupChild
	}
	if err := f(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// cgroupChild is the child of [TestOpen_ownCgroup].
func cgroupChild() error {
	o, err := Open(Config{Mark: newMark()})
	if err != nil {
		return err
	}
	// Not closed: what is attached must go away with the process.
	d := net.Dialer{Control: o.ControlDial}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	c, err := d.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	// The listener is plain, but the program must have seen the socket.
	if offered, err := o.PeerOffered(c.(*net.TCPConn)); offered || err != nil {
		return fmt.Errorf("PeerOffered() = %v, %w; want false", offered, err)
	}
	ready := os.NewFile(3, "ready")
	if _, err := ready.Write([]byte{1}); err != nil {
		return err
	}
	if _, err := os.Stdin.Read(make([]byte, 1)); err == nil {
		return errors.New("the test sent something")
	}
	return nil
}

// The ID is that by which the kernel opens the cgroup's file.
func TestOwnCgroupID(t *testing.T) {
	needAll(t)
	got, err := OwnCgroupID()
	if err != nil {
		t.Fatal(err)
	}
	own, err := openOwnCgroup()
	if err != nil {
		t.Fatal(err)
	}
	defer own.close()
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, own.path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if want := binary.NativeEndian.Uint64(h.Bytes()); got != want {
		t.Errorf("ID %d, want %d", got, want)
	}
}

// TestMountCgroup covers machines without any mount of cgroup v2.
func TestMountCgroup(t *testing.T) {
	needAll(t)
	mount, err := mountCgroup()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mount.Close() }()
	if _, err := ownCgroupIn(mount); err != nil {
		t.Fatal(err)
	}
}
